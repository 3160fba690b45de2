package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// kill is the end of a process by a signal, and what came of it. Times are in milliseconds from the kill. If it was not
// the demo's, nobody knows when that was: they count from when it was first noticed.
type kill struct {
	Rank     int     `json:"rank"`
	Signal   string  `json:"signal"`
	Planned  bool    `json:"planned"` // by the demo
	Served   bool    `json:"served"`  // it had made a step; if not, nobody had to notice
	AtToken  int     `json:"at_token"`
	DetectMs float64 `json:"detect_ms"` // until the first survivor has installed a view without it
	ResumeMs float64 `json:"resume_ms"` // until the last survivor has completed a step without it
	Epoch    uint64  `json:"epoch"`     // of that step; 0 if there was none, because all was answered
	Taken    int     `json:"requests_taken_over"`

	at, resumed time.Time
	after       uint64 // epoch of its last step
	down        []int  // ranks that did not serve at that time, it too
}

// rejoin is one replacement.
type rejoin struct {
	Rank    int     `json:"rank"`
	JoinMs  float64 `json:"join_ms"`  // from its call of Join (weights loaded) to its first completed step
	TotalMs float64 `json:"total_ms"` // from the start of its process
	Epoch   uint64  `json:"epoch"`

	at time.Time
}

// drama kills two ranks in mid-sentence, rank 0 last. Each is replaced like one that somebody else has killed.
func (c *cluster) drama() error {
	w := c.w
	for _, act := range []struct {
		rank int
		at   float64 // share of the bytes
	}{{c.o.ranks / 2, 0.2}, {0, 0.55}} {
		at := int(act.at * float64(w.total))
		var p *process
		err := c.until(fmt.Sprintf("all ranks, and %d bytes, to kill rank %d", at, act.rank), func() bool {
			if len(w.down()) > 0 || w.tokens < at && !w.answered() {
				return false
			}
			p = w.procs[act.rank]
			p.kill = &kill{Rank: act.rank, Planned: true, AtToken: w.tokens, at: time.Now()}
			return true
		})
		if err != nil {
			return err
		}
		if err := c.l.Kill(act.rank, syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("killing rank %d: %w", act.rank, err)
		}
		w.say(bad, "kill -9 rank %d, after %d bytes", act.rank, p.kill.AtToken)
		err = c.until(fmt.Sprintf("rank %d to serve again", act.rank), func() bool {
			now := w.procs[act.rank]
			return now != p && now.serves()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// replace starts a rank again, whose process has ended, and waits until it serves. k is nil if no signal ended it.
func (c *cluster) replace(rank int, k *kill) error {
	w := c.w
	if k != nil && k.Served {
		if err := c.until("a step of all survivors", func() bool { return k.finish(w) }); err != nil {
			return err
		}
		w.say(plain, "%s", k)
	}
	if k != nil && k.Planned { // the survivors serve alone for a moment
		alone := k.AtToken + w.total/20
		if err := c.until("the survivors' bytes", func() bool { return w.tokens >= alone || w.answered() }); err != nil {
			return err
		}
	}
	p, err := c.start(rank)
	if err != nil {
		return err
	}
	w.say(plain, "rank %d is started again", rank)
	j := rejoin{Rank: rank}
	err = c.until(fmt.Sprintf("the first step of rank %d", rank), func() bool {
		if p.serves() {
			j.Epoch, j.at, j.JoinMs, j.TotalMs = p.entered, p.served, ms(p.served.Sub(p.joining)), ms(p.served.Sub(p.started))
			c.rejoins = append(c.rejoins, j)
		}
		return p.serves() || p.ended // if that comes first, happened has seen to it
	})
	if err == nil && j.Epoch > 0 {
		w.say(good, "rank %d serves again, %.0f ms after its call of Join", rank, j.JoinMs)
	}
	return err
}

// finish computes what came of a kill from what the ranks have said so far, and says whether they all serve on. Under the
// watcher's lock.
func (k *kill) finish(w *watcher) bool {
	var ok bool
	k.Epoch, k.resumed, ok = w.resumed(k.Rank, k.after)
	noticed := w.noticed(k.Rank, k.after)
	if !k.Served || !ok || noticed.IsZero() {
		k.Epoch = 0
		return false
	}
	if !k.Planned && noticed.Before(k.at) {
		k.at = noticed
	}
	k.DetectMs, k.ResumeMs, k.Taken = ms(noticed.Sub(k.at)), ms(k.resumed.Sub(k.at)), w.takenFrom(k.Rank, k.after)
	return true
}

// String is what came of it.
func (k *kill) String() string {
	switch {
	case !k.Served:
		return "before it served"
	case k.Epoch == 0:
		return "when all was answered"
	}
	s := fmt.Sprintf("all serve on in %.1f ms, %d requests taken over", k.ResumeMs, k.Taken)
	if k.Planned {
		s = fmt.Sprintf("new view in %.1f ms, %s", k.DetectMs, s)
	}
	return s
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

package main

import (
	"fmt"
	"time"
)

// kill is one SIGKILL and what came of it. Times are in milliseconds from the kill.
type kill struct {
	Rank     int     `json:"rank"`
	Signal   string  `json:"signal"`
	AtToken  int     `json:"at_token"`
	DetectMs float64 `json:"detect_ms"` // until the first survivor has installed the view without it
	ResumeMs float64 `json:"resume_ms"` // until the last survivor has completed a step in that view
	Epoch    uint64  `json:"epoch"`     // of that view
	Taken    int     `json:"requests_taken_over"`

	at, resumed time.Time
}

// rejoin is one replacement.
type rejoin struct {
	Rank    int     `json:"rank"`
	JoinMs  float64 `json:"join_ms"`  // from its call of Join (weights loaded) to its first completed step
	TotalMs float64 `json:"total_ms"` // from the start of its process
	Epoch   uint64  `json:"epoch"`

	started, joining, at time.Time
}

// drama kills two ranks in mid-sentence, rank 0 last, and replaces each.
func (c *cluster) drama() (kills []kill, rejoins []rejoin, err error) {
	for _, act := range []struct {
		rank int
		at   float64 // share of the bytes
	}{{c.o.ranks / 2, 0.2}, {0, 0.55}} {
		k, err := c.murder(act.rank, int(act.at*float64(c.w.total)))
		if err != nil {
			return nil, nil, fmt.Errorf("killing rank %d: %w", act.rank, err)
		}
		alone := k.AtToken + c.w.total/20 // the survivors serve alone for a moment
		if err := c.until("the survivors' bytes", time.Minute, func() bool { return c.w.tokens >= min(alone, c.w.total) }); err != nil {
			return nil, nil, err
		}
		j, err := c.replace(act.rank, k.Epoch)
		if err != nil {
			return nil, nil, fmt.Errorf("replacing rank %d: %w", act.rank, err)
		}
		kills, rejoins = append(kills, k), append(rejoins, j)
	}
	return kills, rejoins, nil
}

// murder kills a rank once so many bytes are there, and waits until the survivors go on.
func (c *cluster) murder(rank, at int) (k kill, err error) {
	w := c.w
	begin := fmt.Sprintf("all ranks and %d bytes", at)
	if err := c.until(begin, 2*time.Minute, func() bool { return w.tokens >= at && len(w.steps[w.epoch]) == c.o.ranks }); err != nil {
		return k, err
	}
	var others []int
	for r := range c.o.ranks {
		if r != rank {
			others = append(others, r)
		}
	}
	w.mu.Lock()
	before := w.epoch
	k = kill{Rank: rank, Signal: "SIGKILL", AtToken: w.tokens}
	w.mu.Unlock()
	k.at = time.Now()
	if err := c.kill(rank); err != nil {
		return k, err
	}
	w.say(bad, "kill -9 rank %d, after %d bytes", rank, k.AtToken)
	err = c.until("a step of all survivors", 20*time.Second, func() (ok bool) {
		k.Epoch, k.resumed, ok = w.resumed(before, others)
		return ok && !w.views[k.Epoch].IsZero()
	})
	if err != nil {
		return k, err
	}
	w.mu.Lock()
	k.finish(w)
	w.mu.Unlock()
	w.say(plain, "new view in %.1f ms, all serve on in %.1f ms, %d requests taken over", k.DetectMs, k.ResumeMs, k.Taken)
	return k, nil
}

// finish computes the times from what the ranks have said so far. Under the watcher's lock.
func (k *kill) finish(w *watcher) {
	k.DetectMs, k.ResumeMs, k.Taken = ms(w.views[k.Epoch].Sub(k.at)), ms(k.resumed.Sub(k.at)), len(w.taken[k.Epoch])
}

// replace starts a rank again and waits until it serves. One that dies before that gets two more chances.
func (c *cluster) replace(rank int, after uint64) (j rejoin, err error) {
	w := c.w
	for try := 1; ; try++ {
		j = rejoin{Rank: rank, started: time.Now()}
		pid, err := c.start(rank)
		if err != nil {
			return j, err
		}
		w.say(plain, "rank %d is started again", rank)
		dead := false
		err = c.until("the replacement's first step", 30*time.Second, func() bool {
			dead = c.dead(pid)
			for e, by := range w.steps {
				if t, ok := by[rank]; ok && e > after && t.After(j.started) {
					j.Epoch, j.at = e, t
				}
			}
			return dead || !j.at.IsZero()
		})
		if err != nil {
			return j, err
		}
		if !dead {
			break
		}
		w.say(bad, "the replacement of rank %d has died", rank)
		if try == 3 {
			return j, fmt.Errorf("%d processes died before they served", try)
		}
	}
	c.expect(rank, false)
	w.mu.Lock()
	j.joining = w.joining[rank]
	w.mu.Unlock()
	j.JoinMs, j.TotalMs = ms(j.at.Sub(j.joining)), ms(j.at.Sub(j.started))
	w.say(good, "rank %d serves again, %.0f ms after its call of Join", rank, j.JoinMs)
	return j, nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

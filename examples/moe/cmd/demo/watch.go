package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"
)

// kill is one SIGKILL and what came of it. Times are in milliseconds from the kill.
type kill struct {
	Rank     int     `json:"rank"`
	Signal   string  `json:"signal"`
	AtToken  int     `json:"at_token"`
	DetectMs float64 `json:"detect_ms"` // until the first survivor has the new view
	ResumeMs float64 `json:"resume_ms"` // until the last survivor has completed a step decided in it
	Epoch    uint64  `json:"epoch"`
	Taken    int     `json:"requests_taken_over"`

	at time.Time
}

// rejoin is one replacement. JoinMs is from its call of Join (weights loaded) to the first step with its contribution.
type rejoin struct {
	Rank    int     `json:"rank"`
	JoinMs  float64 `json:"join_ms"`
	TotalMs float64 `json:"total_ms"` // from the start of its process
	Epoch   uint64  `json:"epoch"`

	started, joining, at time.Time
}

// takeover is what a rank said about requests whose owner is gone.
type takeover struct {
	at time.Time
	n  int
}

// watcher collects what the ranks say. Its methods may be called from several goroutines.
type watcher struct {
	mu      sync.Mutex
	begin   time.Time
	out     io.Writer
	prompts []string
	want    []serve.Answer // nil: not compared
	text    [][]byte
	hashes  [][]uint64
	lost    float64
	owner   []int
	differs []string
	tokens  int
	times   []time.Time // of each token
	active  []int
	epoch   uint64
	steps   map[uint64]map[int]time.Time // by epoch and rank: its first step
	views   map[uint64]time.Time         // by epoch: the first rank that had it
	taken   []takeover
	stats   map[int]*serve.Stats
	joining map[int]time.Time
	changed chan struct{}
}

func newWatcher(out io.Writer, prompts []string, want []serve.Answer) *watcher {
	w := &watcher{
		begin: time.Now(), out: out, prompts: prompts, want: want, text: make([][]byte, len(prompts)), hashes: make([][]uint64, len(prompts)),
		owner: make([]int, len(prompts)), steps: map[uint64]map[int]time.Time{}, views: map[uint64]time.Time{},
		stats: map[int]*serve.Stats{}, joining: map[int]time.Time{}, changed: make(chan struct{}),
	}
	for i := range w.owner {
		w.owner[i] = -1
	}
	return w
}

func (w *watcher) say(f string, a ...any) {
	fmt.Fprintf(w.out, "%7.3fs  %s\n", time.Since(w.begin).Seconds(), fmt.Sprintf(f, a...))
}

// event takes what a rank printed.
func (w *watcher) event(e serve.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := time.Unix(0, e.Time)
	switch e.Kind {
	case "token":
		w.token(e, at)
	case "view":
		if t, ok := w.views[e.Epoch]; !ok || at.Before(t) {
			w.views[e.Epoch] = at
		}
	case "step":
		if w.steps[e.Epoch] == nil {
			w.steps[e.Epoch] = map[int]time.Time{}
			if e.Epoch > w.epoch {
				w.epoch, w.active = e.Epoch, e.Active
				w.say("epoch %d: active ranks %v", e.Epoch, e.Active)
			}
		}
		w.steps[e.Epoch][e.Rank] = at
	case "taken":
		w.taken = append(w.taken, takeover{at, len(e.Requests)})
	case "joining":
		w.joining[e.Rank] = at
	case "done":
		w.stats[e.Rank] = e.Stats
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

// token is one agreed byte. A rank that took a request over may say again what a dead one said: it must be the same.
func (w *watcher) token(e serve.Event, at time.Time) {
	r := e.Request
	if r < 0 || r >= len(w.text) {
		return
	}
	w.owner[r] = e.Rank
	w.lost += float64(e.Lost)
	if e.Pos < len(w.hashes[r]) {
		if w.hashes[r][e.Pos] != e.Hash {
			w.differ(r, e.Pos, "two ranks gave different logits")
		}
		return
	}
	for len(w.hashes[r]) < e.Pos { // who agreed on it died before it could say so
		w.hashes[r] = append(w.hashes[r], 0)
		w.text[r] = append(w.text[r], '?')
	}
	w.hashes[r] = append(w.hashes[r], e.Hash)
	if e.Token != 0 {
		w.text[r] = append(w.text[r], byte(e.Token))
	}
	w.tokens++
	w.times = append(w.times, at)
	if w.want != nil {
		a := &w.want[r]
		switch {
		case e.Pos >= len(a.Hashes):
			w.differ(r, e.Pos, "longer than the reference")
		case a.Hashes[e.Pos] != e.Hash:
			w.differ(r, e.Pos, "the logits' bits differ")
		case e.Token != 0 && (e.Pos >= len(a.Text) || a.Text[e.Pos] != byte(e.Token)):
			w.differ(r, e.Pos, "the byte differs")
		}
	}
}

func (w *watcher) differ(r, pos int, why string) {
	if len(w.differs) < 20 {
		w.differs = append(w.differs, fmt.Sprintf("request %d, byte %d: %s", r, pos, why))
	}
}

// takenSince is how many requests were taken over after that time. Every survivor says the same. Under the lock.
func (w *watcher) takenSince(t time.Time) (n int) {
	for _, x := range w.taken {
		if x.at.After(t) {
			n = max(n, x.n)
		}
	}
	return n
}

// until waits for a condition on what the ranks have said, which is checked under the lock.
func (w *watcher) until(stop <-chan struct{}, d time.Duration, cond func() bool) error {
	timeout := time.After(d)
	for {
		w.mu.Lock()
		ok, ch := cond(), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ch:
		case <-stop:
			return fmt.Errorf("the ranks ended")
		case <-timeout:
			return fmt.Errorf("nothing of that kind in %v", d)
		}
	}
}

// resumed says that every rank but the victim has completed a step of an epoch after the given one. Under the lock.
func (w *watcher) resumed(after uint64, ranks []int) (epoch uint64, last time.Time, ok bool) {
	for e, by := range w.steps {
		if e <= after || (epoch != 0 && e > epoch) {
			continue
		}
		all := true
		t := time.Time{}
		for _, r := range ranks {
			at, has := by[r]
			all = all && has
			if at.After(t) {
				t = at
			}
		}
		if all {
			epoch, last, ok = e, t, true
		}
	}
	return epoch, last, ok
}

// paint prints the request that has moved furthest since it was shown last: the text as it is written.
func (w *watcher) paint(shown []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	best := -1
	for i := range w.text {
		if d := len(w.text[i]) - shown[i]; d > 0 && (best < 0 || d > len(w.text[best])-shown[best]) {
			best = i
		}
	}
	if best < 0 {
		return
	}
	piece := w.text[best][shown[best]:]
	shown[best] = len(w.text[best])
	s := strings.ReplaceAll(strings.ReplaceAll(string(piece), "\n", "⏎"), "\t", "→")
	if r := []rune(s); len(r) > 72 {
		s = "…" + string(r[len(r)-71:])
	}
	w.say("%5d bytes %5.0f/s active %v  #%d@%d %s", w.tokens, w.rate(time.Now().Add(-time.Second), time.Now()), w.active, best, w.owner[best], s)
}

// rate is bytes per second between two times. Under the lock.
func (w *watcher) rate(from, to time.Time) float64 {
	n := 0
	for _, t := range w.times {
		if t.After(from) && !t.After(to) {
			n++
		}
	}
	d := to.Sub(from).Seconds()
	if d <= 0 {
		return 0
	}
	return float64(n) / d
}

// identical compares all that was answered with the reference.
func (w *watcher) identical() (bool, []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	bad := slices.Clone(w.differs)
	for i, a := range w.want {
		if string(a.Text) != string(w.text[i]) {
			at := 0
			for at < len(a.Text) && at < len(w.text[i]) && a.Text[at] == w.text[i][at] {
				at++
			}
			bad = append(bad, fmt.Sprintf("request %d: %d bytes, the reference has %d; they differ from byte %d on", i, len(w.text[i]), len(a.Text), at))
		}
	}
	return len(bad) == 0, bad
}

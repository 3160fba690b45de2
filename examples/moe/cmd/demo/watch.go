package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"
)

// watcher collects what the ranks say, and compares it with the reference. Its methods may be called from any goroutine.
type watcher struct {
	mu      sync.Mutex
	begin   time.Time
	scr     screen
	prompts []string
	want    []serve.Answer
	ranks   int
	total   int // bytes that there will be
	changed chan struct{}

	text    [][]byte
	hashes  [][]uint64
	owner   []int
	moved   []time.Time // when the owner changed
	tokens  int
	times   []time.Time // of each token
	differs []string

	epoch   uint64 // the last one in which a step was made
	active  []int
	steps   map[uint64]map[int]time.Time // by epoch and rank: its first step
	views   map[uint64]time.Time         // by epoch: the first rank that had it
	taken   map[uint64][]int             // by epoch: the requests whose owner was gone
	joining map[int]time.Time            // by rank: its last call of Join
	answers map[int]int                  // by rank: how many it has given in full
	lost    []float64                    // by request
	stats   map[int]*serve.Stats
}

func newWatcher(scr screen, prompts []string, want []serve.Answer, ranks, total int) *watcher {
	n := len(prompts)
	w := &watcher{
		begin: time.Now(), scr: scr, prompts: prompts, want: want, ranks: ranks, total: total, changed: make(chan struct{}),
		text: make([][]byte, n), hashes: make([][]uint64, n), owner: make([]int, n), moved: make([]time.Time, n), lost: make([]float64, n),
		steps: map[uint64]map[int]time.Time{}, views: map[uint64]time.Time{}, taken: map[uint64][]int{},
		joining: map[int]time.Time{}, answers: map[int]int{}, stats: map[int]*serve.Stats{},
	}
	for i := range w.owner {
		w.owner[i] = -1
	}
	return w
}

// say shows that something has happened.
func (w *watcher) say(m mood, f string, a ...any) {
	w.scr.event(m, fmt.Sprintf("%7.3fs  %s", time.Since(w.begin).Seconds(), fmt.Sprintf(f, a...)))
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
		if t := w.views[e.Epoch]; t.IsZero() || at.Before(t) {
			w.views[e.Epoch] = at
		}
	case "step":
		if w.steps[e.Epoch] == nil {
			w.steps[e.Epoch] = map[int]time.Time{}
		}
		w.steps[e.Epoch][e.Rank] = at
		if e.Epoch > w.epoch {
			w.epoch, w.active = e.Epoch, e.Active
			w.say(plain, "epoch %d: active ranks %v", e.Epoch, e.Active)
		}
	case "taken":
		if was, ok := w.taken[e.Epoch]; ok && !slices.Equal(was, e.Requests) {
			w.differ("rank %d: takes requests %v over, another said %v", e.Rank, e.Requests, was)
		}
		w.taken[e.Epoch] = e.Requests
	case "joining":
		w.joining[e.Rank] = at
	case "answer":
		w.answer(e)
	case "done":
		w.stats[e.Rank] = e.Stats
	}
	w.signal()
}

// wake makes those who wait look again.
func (w *watcher) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signal()
}

func (w *watcher) signal() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// token is one agreed byte. A rank that took a request over says again what a dead one said: it must be the same.
func (w *watcher) token(e serve.Event, at time.Time) {
	r := e.Request
	if r < 0 || r >= len(w.want) {
		w.differ("rank %d: a byte for request %d", e.Rank, r)
		return
	}
	if w.owner[r] != e.Rank && w.owner[r] >= 0 {
		w.moved[r] = at
	}
	w.owner[r] = e.Rank
	a := &w.want[r]
	switch {
	case e.Pos >= len(a.Hashes):
		w.differ("request %d, byte %d, rank %d: the reference has only %d", r, e.Pos, e.Rank, len(a.Hashes))
	case a.Hashes[e.Pos] != e.Hash:
		w.differ("request %d, byte %d, rank %d: the logits' bits", r, e.Pos, e.Rank)
	case e.Token != 0 && (e.Pos >= len(a.Text) || a.Text[e.Pos] != byte(e.Token)):
		w.differ("request %d, byte %d, rank %d: the byte", r, e.Pos, e.Rank)
	}
	switch n := len(w.hashes[r]); {
	case e.Pos < n:
		if w.hashes[r][e.Pos] != e.Hash {
			w.differ("request %d, byte %d: two ranks gave different logits", r, e.Pos)
		}
		return
	case e.Pos > n:
		w.differ("request %d: nobody said byte %d", r, n)
		return
	}
	w.hashes[r] = append(w.hashes[r], e.Hash)
	if e.Token != 0 {
		w.text[r] = append(w.text[r], byte(e.Token))
	}
	w.tokens++
	w.times = append(w.times, at)
}

// answer is a whole answer, as a rank has it at the end.
func (w *watcher) answer(e serve.Event) {
	r := e.Request
	if r < 0 || r >= len(w.want) || e.Answer == nil {
		w.differ("rank %d: an answer to request %d", e.Rank, r)
		return
	}
	w.answers[e.Rank]++
	a := &w.want[r]
	if string(e.Answer.Text) != string(a.Text) {
		at := 0
		for at < len(a.Text) && at < len(e.Answer.Text) && a.Text[at] == e.Answer.Text[at] {
			at++
		}
		w.differ("request %d, at the end, rank %d: %d bytes, the reference has %d; they differ from byte %d on", r, e.Rank, len(e.Answer.Text), len(a.Text), at)
	} else if !slices.Equal(e.Answer.Hashes, a.Hashes) {
		w.differ("request %d, at the end, rank %d: the logits' bits", r, e.Rank)
	}
	// Who made the last bytes may have died before it could say so.
	w.text[r], w.hashes[r] = e.Answer.Text, e.Answer.Hashes
	w.lost[r] = e.Answer.Lost
}

const mostDiffers = 20

func (w *watcher) differ(f string, a ...any) {
	if len(w.differs) < mostDiffers {
		w.differs = append(w.differs, fmt.Sprintf(f, a...))
	}
}

// until waits for a condition on what the ranks have said, which is checked under the lock. It ends with ctx, with its
// cause.
func (w *watcher) until(ctx context.Context, cond func() bool) error {
	for {
		w.mu.Lock()
		ok, ch := cond(), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// resumed is the first epoch after the given one in which all those ranks have completed a step, and when the last of
// them had. Under the lock.
func (w *watcher) resumed(after uint64, ranks []int) (epoch uint64, last time.Time, ok bool) {
	for e, by := range w.steps {
		if e <= after || (ok && e > epoch) {
			continue
		}
		all, t := true, time.Time{}
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

// rate is bytes per second between two times. Under the lock.
func (w *watcher) rate(from, to time.Time) float64 {
	n, d := 0, to.Sub(from).Seconds()
	for _, t := range w.times {
		if t.After(from) && !t.After(to) {
			n++
		}
	}
	if d <= 0 {
		return 0
	}
	return float64(n) / d
}

// verdict says what differs from the reference, now that all ranks have ended. Under the lock.
func (w *watcher) verdict() []string {
	bad := slices.Clone(w.differs)
	for r := range w.ranks {
		if w.answers[r] != len(w.want) {
			bad = append(bad, fmt.Sprintf("rank %d has given %d answers of %d", r, w.answers[r], len(w.want)))
		}
	}
	return bad
}

// view is how things stand, for the screen.
func (w *watcher) view() view {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	span := min(now.Sub(w.begin), time.Second)
	v := view{
		at: now.Sub(w.begin), tokens: w.tokens, total: w.total, rate: w.rate(now.Add(-span), now),
		epoch: w.epoch, active: slices.Clone(w.active), ranks: w.ranks,
	}
	for i := range w.text {
		v.rows = append(v.rows, row{
			owner: w.owner[i], moved: now.Sub(w.moved[i]) < 1500*time.Millisecond,
			prompt: w.prompts[i], text: string(w.text[i]), done: len(w.hashes[i]) == len(w.want[i].Hashes), want: len(w.want[i].Hashes),
		})
	}
	return v
}

// painter shows how things stand, again and again, until stop is called.
func (w *watcher) painter() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(100 * time.Millisecond)
		defer t.Stop()
		for {
			w.scr.update(w.view())
			select {
			case <-t.C:
			case <-quit:
				return
			}
		}
	}()
	return func() { close(quit); <-done }
}

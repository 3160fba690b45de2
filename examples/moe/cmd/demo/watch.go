package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
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
	early   []map[int]serve.Event // by request and position: bytes that came before those before them

	procs []*process                   // of each rank the latest
	waits []string                     // what the demo waits for
	epoch uint64                       // the last one in which a step was made
	first time.Time                    // of all steps
	sets  map[uint64][]int             // by epoch of a step: the active ranks
	steps map[uint64]map[int]time.Time // by epoch and rank: its first step
	views map[uint64]sight             // by epoch
	taken map[takeover]took
	final []*serve.Answer // by request, as a rank gave it
	stats map[int]*serve.Stats
}

// process is one process of a rank.
type process struct {
	pid           int
	tries         int // processes of its rank that ended before they served, since one did
	started       time.Time
	joining       time.Time // it called Join
	served        time.Time // it made its first step
	heard         time.Time // it said something
	entered, last uint64    // epochs of its first step and its latest one
	answers       int       // that it has given in full
	kill          *kill     // its end by a signal
	ended         bool
}

func (p *process) serves() bool { return !p.served.IsZero() }

// sight is a view, when the first rank had it.
type sight struct {
	at     time.Time
	active []int
}

// takeover is the step in which a dead rank's requests got other owners, took which they were and the epoch.
type takeover struct {
	step uint64
	from int
}

type took struct {
	epoch    uint64
	requests []int
}

func newWatcher(scr screen, prompts []string, want []serve.Answer, ranks, total int) *watcher {
	n := len(prompts)
	w := &watcher{
		begin: time.Now(), scr: scr, prompts: prompts, want: want, ranks: ranks, total: total, changed: make(chan struct{}),
		text: make([][]byte, n), hashes: make([][]uint64, n), owner: make([]int, n), moved: make([]time.Time, n), final: make([]*serve.Answer, n),
		sets: map[uint64][]int{}, steps: map[uint64]map[int]time.Time{}, views: map[uint64]sight{}, taken: map[takeover]took{},
		stats: map[int]*serve.Stats{},
	}
	for range ranks {
		w.procs = append(w.procs, &process{})
	}
	for i := range w.owner {
		w.owner[i] = -1
		w.early = append(w.early, map[int]serve.Event{})
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
	if e.Rank < 0 || e.Rank >= w.ranks {
		return
	}
	at, p := time.Unix(0, e.Time), w.procs[e.Rank]
	p.heard = time.Now()
	switch e.Kind {
	case "token":
		w.token(e, at)
	case "view":
		if v, ok := w.views[e.Epoch]; !ok || at.Before(v.at) {
			w.views[e.Epoch] = sight{at, e.Active}
		}
	case "step":
		if w.steps[e.Epoch] == nil {
			w.steps[e.Epoch] = map[int]time.Time{}
		}
		w.steps[e.Epoch][e.Rank] = at
		if was, ok := w.sets[e.Epoch]; ok && !slices.Equal(was, e.Active) {
			w.differ("rank %d: epoch %d has ranks %v, another said %v", e.Rank, e.Epoch, e.Active, was)
		}
		w.sets[e.Epoch] = e.Active
		if p.last = e.Epoch; !p.serves() {
			p.served, p.entered, p.tries = at, e.Epoch, 0
		}
		if w.first.IsZero() {
			w.first = at
		}
		if e.Epoch > w.epoch {
			w.epoch = e.Epoch
			w.say(plain, "epoch %d: active ranks %v", e.Epoch, e.Active)
		}
	case "taken":
		key := takeover{e.Step, e.From}
		was, ok := w.taken[key]
		if ok && !slices.Equal(was.requests, e.Requests) {
			w.differ("rank %d: takes requests %v of rank %d over, another said %v", e.Rank, e.Requests, e.From, was.requests)
		}
		w.taken[key] = took{max(was.epoch, e.Epoch), e.Requests}
	case "joining":
		p.joining = at
	case "answer":
		w.answer(e)
	case "done":
		w.stats[e.Rank] = e.Stats
	}
	w.signal()
}

// signal makes those who wait look again. Under the lock.
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
	case e.Pos > n: // of the bytes before some are in another rank's pipe
		w.early[r][e.Pos] = e
		return
	}
	for ok := true; ok; e, ok = w.early[r][len(w.hashes[r])] {
		delete(w.early[r], e.Pos)
		w.hashes[r] = append(w.hashes[r], e.Hash)
		if e.Token != 0 {
			w.text[r] = append(w.text[r], byte(e.Token))
		}
		w.tokens++
		w.times = append(w.times, time.Unix(0, e.Time))
	}
}

// answer is a whole answer, as a rank has it at the end.
func (w *watcher) answer(e serve.Event) {
	r := e.Request
	if r < 0 || r >= len(w.want) || e.Answer == nil {
		w.differ("rank %d: an answer to request %d", e.Rank, r)
		return
	}
	w.procs[e.Rank].answers++
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
	w.final[r] = e.Answer
}

const mostDiffers = 20

func (w *watcher) differ(f string, a ...any) {
	if len(w.differs) < mostDiffers {
		w.differs = append(w.differs, fmt.Sprintf(f, a...))
	}
}

// until waits for a condition on what the ranks have said, which is checked under the lock. It ends with ctx, with its
// cause.
func (w *watcher) until(ctx context.Context, what string, cond func() bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waits = append(w.waits, what)
	defer func() {
		i := slices.Index(w.waits, what)
		w.waits = slices.Delete(w.waits, i, i+1)
	}()
	for !cond() {
		ch := w.changed
		w.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
		}
		w.mu.Lock()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// news is another one each time that something has happened.
func (w *watcher) news() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

// stuck says who is to blame that nothing has happened for so long, as far as can be seen from here.
func (w *watcher) stuck(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var stopped, silent []string
	for rank, p := range w.procs {
		switch {
		case p.ended:
			silent = append(silent, fmt.Sprintf("rank %d has ended", rank))
		case isStopped(p.pid):
			stopped = append(stopped, fmt.Sprintf("rank %d (process %d) is stopped: kill -CONT %d lets it go on, after kill -9 %d it is replaced", rank, p.pid, p.pid, p.pid))
		case p.heard.IsZero():
			silent = append(silent, fmt.Sprintf("rank %d (process %d) has said nothing yet", rank, p.pid))
		default:
			silent = append(silent, fmt.Sprintf("rank %d (process %d) said something %.1f s ago", rank, p.pid, time.Since(p.heard).Seconds()))
		}
	}
	who := strings.Join(stopped, "; ")
	if len(stopped) == 0 {
		who = strings.Join(silent, ", ") + "; SERRY_LOG=info makes them say more, --patience gives a slow machine more time"
	}
	return fmt.Errorf("nothing has happened for %v, waiting for %s: %s", d, strings.Join(w.waits, " and "), who)
}

// isStopped says that a process was sent SIGSTOP or the like, where the system tells it.
func isStopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ") // the name before may be anything
	return err == nil && strings.HasPrefix(rest, "T")
}

// down are the ranks that do not serve. Under the lock, as all that follow.
func (w *watcher) down() (ranks []int) {
	for rank, p := range w.procs {
		if p.ended || !p.serves() {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// nobody says that no process is left of those that were members: a replacement alone has nobody to ask.
func (w *watcher) nobody() bool {
	return !w.first.IsZero() && !slices.ContainsFunc(w.procs, func(p *process) bool {
		return !p.ended && (p.serves() || p.started.Before(w.first))
	})
}

// answered says that all is answered.
func (w *watcher) answered() bool {
	return slices.ContainsFunc(w.procs, func(p *process) bool { return p.answers == len(w.want) })
}

// noticed is when the first rank had a view without a rank, after an epoch in which that lived.
func (w *watcher) noticed(rank int, after uint64) (at time.Time) {
	for e, v := range w.views {
		if e > after && !slices.Contains(v.active, rank) && (at.IsZero() || v.at.Before(at)) {
			at = v.at
		}
	}
	return at
}

// resumed is the first epoch without a rank, after one in which that lived, in which all others have completed a step, and
// when the last of them had.
func (w *watcher) resumed(rank int, after uint64) (epoch uint64, last time.Time, ok bool) {
	for e, set := range w.sets {
		if e <= after || (ok && e > epoch) || slices.Contains(set, rank) || len(w.steps[e]) < len(set) {
			continue
		}
		epoch, last, ok = e, time.Time{}, true
		for _, at := range w.steps[e] {
			if at.After(last) {
				last = at
			}
		}
	}
	return epoch, last, ok
}

// takenFrom is how many requests of a rank others took over, the first time after an epoch in which that lived.
func (w *watcher) takenFrom(rank int, after uint64) int {
	var first took
	for key, t := range w.taken {
		if key.from == rank && t.epoch > after && (first.epoch == 0 || t.epoch < first.epoch) {
			first = t
		}
	}
	return len(first.requests)
}

// rate is bytes per second between two times.
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

// verdict says what differs from the reference, now that all ranks have ended. Who was killed after all was answered need
// not have said so; the others must.
func (w *watcher) verdict() []string {
	bad := slices.Clone(w.differs)
	for r, p := range w.procs {
		if p.answers != len(w.want) && (p.kill == nil || !w.answered()) {
			bad = append(bad, fmt.Sprintf("rank %d has given %d answers of %d", r, p.answers, len(w.want)))
		}
	}
	for r := range w.want {
		// Who made the last byte may have died before it could say so, when nothing was left to take over.
		if n := len(w.hashes[r]); n < len(w.want[r].Hashes)-1 || len(w.early[r]) > 0 {
			bad = append(bad, fmt.Sprintf("request %d: nobody said byte %d", r, n))
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
		epoch: w.epoch, active: slices.Clone(w.sets[w.epoch]), ranks: w.ranks,
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

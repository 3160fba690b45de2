package ep

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/serry-project/serry/ep/route"
)

// world is an in-memory process group whose ranks are goroutines. It keeps the contract of Group and Pair, and makes
// life hard: parts are overwritten after Take, may be unaligned, and a rank can be killed at any point.
type world struct {
	mu        sync.Mutex
	cond      *sync.Cond
	n         int
	slotBytes int
	unaligned bool
	version   uint64 // the last
	views     map[uint64]route.Ranks
	start     map[uint64]uint64 // first sequence of a version
	cut       map[uint64]uint64 // of a closed version: operations from here on failed
	grown     map[uint64]bool   // closed by a boundary: nobody is lost
	ops       map[opKey]*op
	dead      route.Ranks
	corrupt   func(from, to int, half string, part []byte) []byte // nil: leaves it alone
	at        func(rank int, seq uint64, point string)            // may kill
}

type opKey struct{ version, seq uint64 }

type op struct {
	key        opKey
	set        route.Ranks
	digest     [2]uint64
	disp, comb [][][]byte // [from][to]
	dispDone   route.Ranks
	combDone   route.Ranks
	decided    bool
}

func newWorld(n, slotBytes int) *world {
	w := &world{n: n, slotBytes: slotBytes, version: 1, views: map[uint64]route.Ranks{1: route.All(n)},
		start: map[uint64]uint64{1: 0}, cut: map[uint64]uint64{}, grown: map[uint64]bool{}, ops: map[opKey]*op{}}
	w.cond = sync.NewCond(&w.mu)
	return w
}

// killed is what a killed rank's goroutine panics with.
type killed struct{ rank int }

// kill makes a rank dead: the version is closed before the first operation that is not decided. w.mu is held.
func (w *world) kill(rank int) {
	if w.dead.Has(rank) {
		return
	}
	w.dead.Add(rank)
	view := w.views[w.version]
	view.Del(rank)
	w.next(view)
}

func (w *world) next(view route.Ranks) {
	cut := w.start[w.version]
	for w.ops[opKey{w.version, cut}] != nil && w.ops[opKey{w.version, cut}].decided {
		cut++
	}
	w.cut[w.version] = cut
	w.version++
	w.views[w.version], w.start[w.version] = view, cut
	w.cond.Broadcast()
}

// boundary lets a rank in again. No rank is in an operation, and all have finished theirs.
func (w *world) boundary(rank int, groups []*fakeGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.grown[w.version] = true
	w.dead.Del(rank)
	view := w.views[w.version]
	view.Add(rank)
	w.next(view)
	for _, g := range groups {
		g.resume()
	}
}

// last is the last view.
func (w *world) last() route.Ranks {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.views[w.version]
}

func (w *world) group(rank int) *fakeGroup {
	w.mu.Lock()
	defer w.mu.Unlock()
	return &fakeGroup{w: w, rank: rank, version: w.version, seq: w.start[w.version]}
}

type fakeGroup struct {
	w       *world
	rank    int
	version uint64
	seq     uint64
}

func (g *fakeGroup) Rank() int      { return g.rank }
func (g *fakeGroup) Size() int      { return g.w.n }
func (g *fakeGroup) SlotBytes() int { return g.w.slotBytes }
func (g *fakeGroup) Depth() int     { return 4 }

func (g *fakeGroup) Active() (route.Ranks, uint64) {
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	return g.w.views[g.version], g.version
}

// point is where a rank may die.
func (g *fakeGroup) point(seq uint64, name string) {
	if f := g.w.at; f != nil {
		f(g.rank, seq, name)
	}
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	if g.w.dead.Has(g.rank) {
		panic(killed{g.rank})
	}
}

// resume takes the last view. w.mu is held.
func (g *fakeGroup) resume() {
	g.version, g.seq = g.w.version, g.w.start[g.w.version]
}

// lost is what an operation of a closed version returns, or nil. w.mu is held.
func (g *fakeGroup) lost(k opKey) error {
	w := g.w
	if cut, closed := w.cut[k.version]; !closed || k.seq < cut {
		return nil
	}
	if w.grown[k.version] {
		return ErrMoved
	}
	now := w.views[w.version]
	rl := &RankLost{Lost: w.views[k.version].Minus(now).Slots(), Epoch: w.version}
	if g.version == k.version {
		g.resume()
	}
	return rl
}

func (g *fakeGroup) StartPair(ctx context.Context, x *Exchange) (Pair, error) {
	g.point(g.seq, "start.before")
	w := g.w
	w.mu.Lock()
	if x.Version != g.version {
		w.mu.Unlock()
		return nil, ErrMoved
	}
	k := opKey{g.version, g.seq}
	if err := g.lost(k); err != nil {
		w.mu.Unlock()
		return nil, err
	}
	o := w.ops[k]
	if o == nil {
		o = &op{key: k, set: w.views[k.version], digest: [2]uint64{x.Digest}, disp: make([][][]byte, w.n), comb: make([][][]byte, w.n)}
		w.ops[k] = o
	}
	bad := o.digest[0] != x.Digest
	w.mu.Unlock()
	if bad {
		return nil, errors.New("fake: mismatch of digest")
	}
	parts, err := g.fill(x, o, "fill.dispatch")
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	g.seq++
	o.disp[g.rank] = parts
	o.dispDone.Add(g.rank)
	w.cond.Broadcast()
	w.mu.Unlock()
	g.point(k.seq, "start.after")
	return &fakePair{g: g, o: o, disp: x}, nil
}

// fill makes the parts of a half.
func (g *fakeGroup) fill(x *Exchange, o *op, point string) ([][]byte, error) {
	total := 0
	for r, n := range x.Sizes {
		if n%16 != 0 {
			return nil, fmt.Errorf("fake: part of %d bytes", n)
		}
		if o.set.Has(r) {
			total += n
		} else if n != 0 {
			return nil, fmt.Errorf("fake: %d bytes for rank %d, which is not active", n, r)
		}
	}
	if total > g.w.slotBytes {
		return nil, fmt.Errorf("fake: %d bytes in a slot of %d", total, g.w.slotBytes)
	}
	parts := make([][]byte, g.w.n)
	off := 0
	if g.w.unaligned {
		off = 1
	}
	for r := range parts {
		if o.set.Has(r) {
			parts[r] = make([]byte, x.Sizes[r]+off)[off:]
			scribble(parts[r])
			x.Fill(r, parts[r])
			g.point(o.key.seq, point)
		}
	}
	return parts, nil
}

func scribble(b []byte) {
	for i := range b {
		b[i] = 0xff // floats are NaN, counts are huge
	}
}

type fakePair struct {
	g          *fakeGroup
	o          *op
	disp, comb *Exchange
	abandoned  bool
}

// wait until done has all, or the operation is lost, or ctx is over.
func (p *fakePair) wait(ctx context.Context, done func() bool) error {
	w := p.g.w
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cond.Broadcast()
	})
	defer stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if err := p.g.lost(p.o.key); err != nil {
			return err
		}
		if done() {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.cond.Wait()
	}
}

// take gives copies to x.Take and overwrites them; before that, garbage, as a reader may meet whose peer is gone.
func (p *fakePair) take(x *Exchange, from [][][]byte, half string) {
	parts := make([][]byte, p.g.w.n)
	each := func(f func(r int, part []byte) []byte) {
		for r := range parts {
			if p.o.set.Has(r) {
				parts[r] = f(r, from[r][p.g.rank])
			}
		}
	}
	copied := func(b []byte) []byte {
		if p.g.w.unaligned {
			return append([]byte{0}, b...)[1:]
		}
		return slices.Clone(b)
	}
	if p.o.key.seq%3 == 1 {
		each(func(r int, b []byte) []byte {
			b = copied(b)
			if r%2 == 0 {
				scribble(b[len(b)/2:])
			} else {
				scribble(b)
			}
			return b
		})
		x.Take(parts)
	}
	each(func(r int, b []byte) []byte {
		b = copied(b)
		if f := p.g.w.corrupt; f != nil {
			b = f(r, p.g.rank, half, b)
		}
		return b
	})
	x.Take(parts)
	for _, b := range parts {
		scribble(b)
	}
}

func (p *fakePair) Dispatched(ctx context.Context) error {
	p.g.point(p.o.key.seq, "dispatched.before")
	if err := p.wait(ctx, func() bool { return p.o.set == p.o.dispDone }); err != nil {
		return err
	}
	p.take(p.disp, p.o.disp, "dispatch")
	p.g.point(p.o.key.seq, "dispatched.after")
	return nil
}

func (p *fakePair) StartCombine(ctx context.Context, x *Exchange) error {
	p.g.point(p.o.key.seq, "combine.before")
	w := p.g.w
	w.mu.Lock()
	if err := p.g.lost(p.o.key); err != nil {
		w.mu.Unlock()
		return err
	}
	if !p.o.dispDone.Has(p.g.rank) || p.o.combDone.Has(p.g.rank) {
		w.mu.Unlock()
		return errors.New("fake: StartCombine out of order")
	}
	w.mu.Unlock()
	parts, err := p.g.fill(x, p.o, "fill.combine")
	if err != nil {
		return err
	}
	p.comb = x
	w.mu.Lock()
	p.o.comb[p.g.rank] = parts
	p.o.combDone.Add(p.g.rank)
	if cut, closed := w.cut[p.o.key.version]; !closed || p.o.key.seq < cut {
		for k := p.o.key; ; k.seq++ { // operations are decided in order
			o, before := w.ops[k], w.ops[opKey{k.version, k.seq - 1}]
			if o == nil || o.combDone != o.set || k.seq > w.start[k.version] && !before.decided {
				break
			}
			o.decided = true
		}
	}
	w.cond.Broadcast()
	w.mu.Unlock()
	p.g.point(p.o.key.seq, "combine.after")
	return nil
}

func (p *fakePair) Combined(ctx context.Context) (Result, error) {
	p.g.point(p.o.key.seq, "combined.before")
	if err := p.g.ordered(p.o.key); err != nil {
		return Result{}, err
	}
	if err := p.wait(ctx, func() bool { return p.o.decided }); err != nil {
		return Result{}, err
	}
	p.take(p.comb, p.o.comb, "combine")
	p.g.point(p.o.key.seq, "combined.after")
	return Result{Seq: p.o.key.seq, Epoch: p.o.key.version, Active: p.o.set}, nil
}

// ordered refuses to combine before an earlier operation of this rank is combined.
func (g *fakeGroup) ordered(k opKey) error {
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	if k.version == g.version && k.seq > g.w.start[k.version] && !g.w.ops[opKey{k.version, k.seq - 1}].combDone.Has(g.rank) {
		return errors.New("fake: combined out of order")
	}
	return nil
}

func (p *fakePair) Abandon() { p.abandoned = true }

// tester is a *testing.T or a *rapid.T.
type tester interface {
	Errorf(format string, args ...any)
}

// each runs f on the given ranks, each on a goroutine of its own, and waits. A killed rank just ends.
func (w *world) each(t tester, ranks []int, f func(ctx context.Context, g *fakeGroup)) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for _, r := range ranks {
		g := w.group(r)
		wg.Go(func() {
			defer func() {
				switch p := recover().(type) {
				case nil, killed:
				default:
					w.mu.Lock()
					w.kill(g.rank)
					w.mu.Unlock()
					t.Errorf("rank %d: %v\n%s", g.rank, p, debug.Stack())
				}
			}()
			f(ctx, g)
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		t.Errorf("a rank hung")
	}
}

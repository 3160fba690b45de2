package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/serry-project/serry/collectives"
)

// Exchange is one half of a Pair: what this rank gives to each member, and what it takes from each. Every active member
// runs it, also with nothing to give. What a rank gives must fit in the group's slots (Options.SlotBytes for each half).
type Exchange struct {
	// Version is that of the group for which Sizes were computed (0: any). If it is another by now, and no loss has to be
	// returned first, StartPair sends nothing and returns ErrMoved. StartCombine ignores it.
	Version uint64
	// Sizes[r] is the bytes for rank r (len: Size of the group). That of a rank that is not active is ignored. Parts begin
	// where the sizes before them end: multiples of 16 keep them aligned.
	Sizes []int
	// Fill writes the part for rank r into dst, straight into shared memory. It is called once for each active rank, in
	// rank order, before Start returns.
	Fill func(r int, dst []byte)
	// Take reads what the ranks gave, straight from where they have published it: parts[r] is rank r's for us, nil if it
	// is not active. It is called on the waiting goroutine once all have arrived; parts are valid during the call. If they
	// changed under its hands it is called again: the last call counts. An error says that the data makes no sense, and
	// fails the group for all.
	Take func(parts [][]byte) error
	// Digest must be equal on all ranks, else the group fails with ErrMismatch.
	Digest uint64
}

// Pair is a dispatch and its combine: one operation of the group, with one outcome. What Dispatched gave is provisional
// until Combined has returned. All survivors get success from Combined, or all get *RankLost for the pair.
type Pair struct {
	g         *Group
	w         *Work
	ver       *collectives.Version
	half      collectives.Op // the dispatch half; w.op is combine
	taken     bool
	combining bool
	pubbed    bool
}

// StartPair publishes the dispatch half; it waits for no peer, but for room in the slots. Raise groups with
// Options.Pairs only.
func (g *Group) StartPair(ctx context.Context, x *Exchange) (*Pair, error) {
	if !g.opts.Pairs || g.opts.Mode != Raise {
		return nil, fmt.Errorf("%w: dispatch needs a group with Options{Pairs: true, Mode: Raise}", ErrOutOfStep)
	}
	if g.aborted.Load() != nil {
		if err := g.refused(ctx); err != nil {
			return nil, err
		}
	}
	if err := g.acquire(ctx); err != nil {
		return nil, err
	}
	defer g.release()
	if err := g.settle(); err != nil {
		return nil, err
	}
	if x.Version != 0 && x.Version != g.seen.epoch {
		return nil, ErrMoved
	}
	p := g.pair()
	p.half.Call = p.exchange(0, x)
	p.half.Provisional = true
	if err := g.comm.Start(&p.half, g.seq+1, g.last); err != nil {
		return nil, err
	}
	g.seq++
	g.issued.Store(g.seq)
	p.ver = p.half.Ver
	w := p.w
	w.pair, w.started = p, 0
	w.op.Ver, w.op.Seq, w.op.Deadline = p.half.Ver, p.half.Seq, p.half.Deadline
	g.queue = append(g.queue, w)
	err := g.until(ctx, func() bool { return g.advance() }, func() bool { return p.half.Published() || w.done.Load() }, w)
	return p, p.end(ctx, err)
}

// pair is a new one, or one that is over.
func (g *Group) pair() *Pair {
	if n := len(g.pairs); n > 0 {
		p := g.pairs[n-1]
		g.pairs = g.pairs[:n-1]
		p.taken, p.combining, p.pubbed = false, false, false
		p.w.recycle()
		return p
	}
	return &Pair{g: g, w: &Work{g: g}}
}

// exchange is the call of a half, with sizes for all slots that the group can ever have.
func (p *Pair) exchange(half int, x *Exchange) collectives.Call {
	sizes, n := x.Sizes, len(p.g.slots)
	if len(sizes) < n {
		if p.w.parts[half] == nil {
			p.w.parts[half] = make([]int, n)
		}
		sizes = p.w.parts[half]
		clear(sizes[copy(sizes, x.Sizes):])
	}
	return collectives.Call{Kind: collectives.Exchange, InParts: sizes, Fill: x.Fill, Take: x.Take, Digest: x.Digest, Deadline: p.g.opts.Timeout}
}

// publish moves the half that has begun as far as it goes without its caller.
func (p *Pair) publish() bool {
	o := &p.half
	if p.combining {
		o = &p.w.op
	}
	if p.pubbed {
		return false
	}
	if p.g.comm.Step(o, false) == collectives.Progress {
		return true
	}
	p.pubbed = o.Sent()
	return p.pubbed
}

// Active is the set (slots of the world) and version that the pair runs with, fixed when it started.
func (p *Pair) Active() (Set, uint64) { return p.ver.Active, p.ver.Epoch }

// Dispatched waits until all active ranks have dispatched, and takes what is for us.
func (p *Pair) Dispatched(ctx context.Context) error {
	if p.combining || p.taken {
		return fmt.Errorf("%w: Dispatched was called before", ErrOutOfStep)
	}
	if err := p.g.acquire(ctx); err != nil {
		return err
	}
	defer p.g.release()
	return p.end(ctx, p.g.until(ctx, func() bool { return p.step(&p.half, true) }, func() bool { return p.taken || p.w.done.Load() }, p.w))
}

// step drives a half of which the caller waits for the end.
func (p *Pair) step(o *collectives.Op, head bool) bool {
	g := p.g
	moved := g.advance()
	if p.w.done.Load() {
		return true
	}
	switch g.comm.Step(o, head) {
	case collectives.Progress:
		return true
	case collectives.Done:
		if o == &p.half {
			p.taken = true
			o.End()
			return true
		}
		p.w.finish(nil)
		if len(g.queue) > 0 && g.queue[0] == p.w {
			g.pop()
		}
		return true
	case collectives.Moved:
		_ = g.notice()
		return true
	case collectives.Mismatch:
		if g.ended != nil {
			p.w.finish(g.ended)
			g.queue = slices.DeleteFunc(g.queue, func(w *Work) bool { return w == p.w })
			return true
		}
		g.mismatch(o.Err)
	}
	return moved
}

// StartCombine publishes the combine half. Dispatched must have returned.
func (p *Pair) StartCombine(ctx context.Context, x *Exchange) error {
	if !p.taken || p.combining {
		return fmt.Errorf("%w: combine before its dispatch was received, or twice", ErrOutOfStep)
	}
	g := p.g
	if err := g.acquire(ctx); err != nil {
		return err
	}
	defer g.release()
	if err := g.notice(); err != nil || p.w.done.Load() {
		return p.end(ctx, err)
	}
	p.w.op.Call, p.w.op.Phase = p.exchange(1, x), 1
	if err := g.comm.Start(&p.w.op, p.half.Seq, p.ver); err != nil {
		return err
	}
	p.combining, p.pubbed = true, false
	return p.end(ctx, g.until(ctx, func() bool { return g.advance() }, func() bool { return p.w.op.Published() || p.w.done.Load() }, p.w))
}

// Combined waits until all active ranks have combined and the outcome is decided, and takes what is for us. When it has
// returned without an error the Pair is over, and must not be used any more.
func (p *Pair) Combined(ctx context.Context) (Result, error) {
	if !p.combining && !p.w.done.Load() {
		return Result{}, fmt.Errorf("%w: Combined before StartCombine", ErrOutOfStep)
	}
	g := p.g
	if err := g.acquire(ctx); err != nil {
		return Result{}, err
	}
	defer g.release()
	if !p.w.done.Load() && (len(g.queue) == 0 || g.queue[0] != p.w) {
		if err := g.notice(); err == nil && !p.w.done.Load() {
			return Result{}, fmt.Errorf("%w: operation %d must be combined before operation %d", ErrOutOfStep, g.queue[0].op.Seq, p.w.op.Seq)
		}
	}
	err := g.until(ctx, func() bool { return p.step(&p.w.op, true) }, func() bool { return p.w.done.Load() }, p.w)
	res := p.w.res
	if err = p.end(ctx, err); err == nil {
		p.ver, p.half.Ver, p.w.op.Ver = nil, nil, nil // the memory of its dead
		g.pairs = append(g.pairs, p)
	}
	return res, err
}

func (p *Pair) what() string {
	if p.combining {
		return "combine"
	}
	return "dispatch"
}

// end turns what ended a wait into what the caller gets.
func (p *Pair) end(ctx context.Context, err error) error {
	if p.w.done.Load() {
		return p.g.report(p.w)
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		g := p.g
		g.failed = fmt.Errorf("%w: rank %d gave up %s %d: %w", ErrClosed, g.rank, p.what(), p.half.Seq, err)
		g.drop(g.failed)
		g.post(fmt.Sprintf("in %s %d: %v", p.what(), p.half.Seq, err))
		return g.failed
	}
	return err
}

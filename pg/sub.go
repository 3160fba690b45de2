package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
)

// proposalBytes is what each rank says of a group that is to be made: {digest of slots and options (8), its clock (8)}.
const proposalBytes = 16

// birth is how a group came to be.
type birth struct {
	id    uint64
	born  uint64 // its place in the order of creation (World.Groups)
	epoch uint64 // of the parent's version in which the operation that made it completed
	since uint64 // the epoch here when this process had not taken part in that: nobody can have made it yet
}

// Sub makes a group of some of g's slots (of the world, in any order, each once; nil: all of g's). It is an operation of g:
// every active member of g calls it with the same arguments, also one that will not be in it (it gets nil, nil). Close the
// group when it is not needed any more, also after it has failed: its memory is this process's arena (Config.ArenaBytes).
//
// Errors are those of an operation of g; ErrMismatch: the ranks gave other slots or options, and no group was made. If one
// of the members has no memory for it, or gives up (ctx) while the others make it, the group is failed for good on all of
// them.
func (g *Group) Sub(ctx context.Context, slots []int, opts Options) (*Group, error) {
	if slots == nil {
		slots = g.slots
		if g.id == worldID {
			slots = g.Slots()
		}
	}
	slots = slices.Clone(slots)
	slices.Sort(slots)
	bad := func(f string, a ...any) error {
		return &collectives.ErrBadCall{Kind: collectives.AllGather, Why: "new group: " + fmt.Sprintf(f, a...)}
	}
	for i, s := range slots {
		if !slices.Contains(g.slots, s) {
			return nil, bad("slot %d is not in the parent %v", s, g.slots)
		}
		if i > 0 && slots[i-1] == s {
			return nil, bad("slot %d is named twice", s)
		}
	}
	if err := opts.check(); err != nil {
		return nil, bad("%v", err)
	}
	opts = opts.withDefaults(256 << 10)
	b, p, err := g.agree(ctx, slots, opts)
	if err != nil || !slices.Contains(slots, g.w.slot) {
		return nil, err
	}
	return g.create(ctx, b, slots, opts, p)
}

// agree is the operation that makes a group.
func (g *Group) agree(ctx context.Context, slots []int, opts Options) (b birth, p proposed, err error) {
	d := uint64(0)
	for _, s := range slots {
		d = wire.Hash(d, uint64(s))
	}
	for _, x := range []uint64{uint64(opts.Mode), uint64(opts.Timeout), uint64(opts.SlotBytes), uint64(opts.Depth), uint64(opts.lanes()), uint64(bit(opts.ManualResume))} {
		d = wire.Hash(d, x)
	}
	in := make([]byte, proposalBytes)
	binary.LittleEndian.PutUint64(in, d)
	binary.LittleEndian.PutUint64(in[8:], g.w.tick(0))
	parts := make([]int, len(g.slots))
	for i := range parts {
		parts[i] = proposalBytes
	}
	out := make([]byte, proposalBytes*len(parts))
	p = g.propose(ctx, &collectives.Call{Kind: collectives.AllGather, DType: dtype.U8, In: in, Out: out, OutParts: parts})
	b = birth{id: g.childID(p.seq, p.epoch), epoch: p.epoch, since: p.since}
	if p.err != nil {
		if p.alone && slices.Contains(slots, g.w.slot) && g.id != worldID { // in the world that is the loss of this rank
			g.forsake(b, slots, p.err)
		}
		return b, p, p.err
	}
	faultpoint.Hit(faultpoint.NewGroup)
	for r, s := range g.slots {
		if !p.active.Has(s) {
			continue
		}
		x := out[r*proposalBytes:]
		if binary.LittleEndian.Uint64(x) != d {
			return b, p, fmt.Errorf("%w: rank %d makes a group of other slots or with other Options than rank %d (slots %v, %+v): give the same on all", ErrMismatch, r, g.rank, slots, opts)
		}
		b.born = max(b.born, binary.LittleEndian.Uint64(x[8:])+1)
	}
	g.w.tick(b.born)
	return b, p, nil
}

// childID names the group that operation seq makes. Nobody has to complete it for that, so that one who gave it up can say
// what it will not be in. In a Raise group a number comes again after a loss, but an operation stays in the version in
// which it was issued; in a Continue group it may be redone in a later one, but its number does not come again.
func (g *Group) childID(seq, epoch uint64) uint64 {
	if g.opts.Mode != Raise {
		epoch = 0
	}
	le := binary.LittleEndian
	h := wire.Hash(wire.Hash(0, le.Uint64(g.w.identity.world[:])), le.Uint64(g.w.identity.world[8:]))
	h = wire.Hash(wire.Hash(wire.Hash(h, g.id), epoch), seq) &^ (1 << 63)
	if h <= worldID {
		h += worldID + 1
	}
	return h
}

// proposed is how the operation that makes a group ended.
type proposed struct {
	seq, epoch uint64 // 0: it was not issued
	since      uint64
	active     Set
	ver        *collectives.Version
	err        error
	alone      bool // it ended so here, whatever it did for the others
}

// propose is doIn for the operation that makes a group.
func (g *Group) propose(ctx context.Context, call *collectives.Call) (p proposed) {
	if g.aborted.Load() != nil {
		if p.err = g.refused(ctx); p.err != nil {
			return p
		}
	}
	if p.err = g.acquire(ctx); p.err != nil {
		return p
	}
	defer g.release()
	p.since = g.w.Epoch()
	w, err := g.issue(call, nil)
	if err != nil {
		p.err = err
		return p
	}
	p.seq, p.epoch = w.op.Seq, w.op.Ver.Epoch
	err = g.drive(ctx, w)
	switch {
	case !w.done.Load():
		p.alone, p.epoch = true, w.op.Ver.Epoch
		g.failed = fmt.Errorf("%w: rank %d gave up making a group (operation %d): %w", ErrClosed, g.rank, p.seq, err)
		g.drop(g.failed)
		g.post(fmt.Sprintf("making a group (operation %d): %v", p.seq, err))
		p.err = g.failed
	case w.err != nil:
		p.alone, p.err = w.err == g.failed, g.report(w)
	default:
		p.epoch, p.active, p.ver = w.res.Epoch, w.res.Active, w.op.Ver
		w.recycle()
		g.spare = append(g.spare, w)
	}
	return p
}

// group is what the machine is told.
func (b *birth) group(slots []int) fault.Group {
	fg := fault.Group{ID: b.id, Version: b.epoch}
	for _, s := range slots {
		fg.Slots.Add(s)
	}
	return fg
}

// forsake fails a group that the others may make, or have made, and this process does not.
func (g *Group) forsake(b birth, slots []int, why error) {
	fg, w := b.group(slots), g.w
	w.agent.Do(func() { w.unmade(fg, b.epoch, why) })
}

// create registers the group with the machine and makes its memory, on the loop, so that no view comes between. Views
// since the operation that made it may have cut it already: others made it earlier.
func (g *Group) create(ctx context.Context, b birth, slots []int, opts Options, p proposed) (*Group, error) {
	w := g.w
	fg := b.group(slots)
	fg.Active = fg.Slots.And(p.active)
	var ms []collectives.Member
	for _, m := range g.comm.Members(p.ver) {
		if r := slices.Index(slots, m.Slot); r >= 0 {
			m.Rank = r
			ms = append(ms, m)
		}
	}
	w.arena.Prepare(opts.shape(len(slots))) // here, not on the loop: it takes its time
	var n *Group
	var err error
	var state atomic.Int32 // 1: the loop is done, or 2: we do not wait any more
	ch := make(chan struct{})
	w.agent.Do(func() {
		defer close(ch)
		if state.Load() == 2 {
			err = fmt.Errorf("rank %d gave up", g.rank)
		} else if missed := w.missed(b.since); missed > 0 {
			err = fmt.Errorf("rank %d was too slow: %d views came while it made the group, of which it remembers the last %d", g.rank, missed, keepPast)
		} else if n, err = w.makeGroup(b.id, slots, opts, b.epoch, ms); err == nil && !state.CompareAndSwap(0, 1) {
			err = fmt.Errorf("rank %d gave up", g.rank)
			n.comm.Release(false)
		}
		if err != nil {
			w.unmade(fg, b.epoch, err)
			return
		}
		w.mu.Lock()
		w.enlist(n, b.born)
		for i := range w.past {
			in := &w.past[i]
			if in.View.Epoch <= b.epoch {
				continue
			}
			for _, c := range in.Cuts {
				if c.Group == b.id {
					n.comm.Install(in.View.Epoch, c.Seq, w.membersOf(slots, &in.View), c.Fail)
				}
			}
			if c, ms := n.remaining(in); ms != nil {
				n.comm.Install(in.View.Epoch, c.Seq, ms, c.Fail)
			}
		}
		w.mu.Unlock()
		w.agent.Step(fault.Created{Group: fg, Epoch: b.epoch})
		w.replay(n)
	})
	var end error
	if w.ground.Await(ctx, loopAnswers, ch, w.isOver); !isClosed(ch) {
		if end = w.overErr(); end == nil {
			end = ctx.Err()
		}
		if end == nil {
			end = fmt.Errorf("the loop does not answer in %v", loopAnswers)
		}
	}
	if end != nil && state.CompareAndSwap(0, 2) {
		return nil, during(fmt.Sprintf("new group %x", b.id), end)
	}
	for !isClosed(ch) {
		w.ground.Await(context.Background(), 0, ch)
	}
	if err != nil {
		return nil, during(fmt.Sprintf("new group %x", b.id), err)
	}
	return n, nil
}

// loopAnswers is how long the loop may take to make a group.
const loopAnswers = 10 * time.Second

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// makeGroup is newGroup. If there is no room, that may be because groups that all have closed were not yet forgotten.
func (w *World) makeGroup(id uint64, slots []int, opts Options, epoch uint64, ms []collectives.Member) (*Group, error) {
	n, err := newGroup(w, id, slots, opts, epoch, 0, ms)
	if err != nil {
		w.tidy()
		n, err = newGroup(w, id, slots, opts, epoch, 0, ms)
	}
	return n, err
}

// unmade fails for good, on all its members alike, a group that the others have and this process has not; it runs on the
// loop. Until that is agreed the group counts as one in which this process has returned from nothing.
func (w *World) unmade(fg fault.Group, epoch uint64, why error) {
	w.mu.Lock()
	w.gone.add(fg.ID)
	failed := slices.ContainsFunc(w.past, func(in fault.Install) bool { return failsIn(&in, fg.ID) })
	w.mu.Unlock()
	w.early = slices.DeleteFunc(w.early, func(h heldFrame) bool { return h.f.Group == fg.ID })
	if failed {
		return
	}
	if w.without == nil {
		w.without = map[uint64]struct{}{}
	}
	w.without[fg.ID] = struct{}{}
	w.agent.Step(fault.Created{Group: fg, Epoch: epoch})
	w.agent.Step(fault.Abort{Group: fg.ID, Reason: "it could not be made there: " + bare(why)})
}

func failsIn(in *fault.Install, group uint64) bool {
	return slices.ContainsFunc(in.Cuts, func(c fault.Cut) bool { return c.Group == group && c.Fail != "" })
}

// closeWait is how long Close waits until those of other hosts have returned from it too.
const closeWait = 50 * time.Millisecond

// Close gives a subgroup up, in order: it is an operation of the group, after which nobody uses it any more. Its memory
// is free once all members have returned from it. If it cannot wait for them, for the end of ctx say, the group fails for
// good on all its members.
func (g *Group) Close(ctx context.Context) error {
	if g.id == worldID {
		return fmt.Errorf("serry: the world is left or closed, not its group")
	}
	if g.retired.Load() {
		return fmt.Errorf("%w: group %x", ErrClosed, g.id)
	}
	_, err := g.Barrier(ctx)
	for lost := (*RankLost)(nil); errors.As(err, &lost); { // alike on all: those who are left close it
		if _, _, err = g.Resume(ctx); err == nil {
			_, err = g.Barrier(ctx)
		}
	}
	g.stop()
	if err != nil { // nobody may wait for this rank, or use its memory when it is given back
		g.w.agent.Post(fault.Abort{Group: g.id, Reason: fmt.Sprintf("rank %d could not close it: %s", g.rank, bare(err))})
	}
	g.inOrder.Store(err == nil)
	g.retired.Store(true)
	g.w.agent.Do(func() {
		g.comm.Tell()
		g.w.tidyAt = g.w.ground.Now()
	})
	if err == nil && g.comm.Remote() { // so that a group made next finds its memory free
		for end := g.w.ground.Now() + closeWait; !g.comm.Finished() && ctx.Err() == nil && g.w.ground.Now() < end; {
			g.w.ground.Await(ctx, 200*time.Microsecond)
		}
	}
	return err
}

// stop ends the progress goroutine.
func (g *Group) stop() {
	if g.closed.CompareAndSwap(false, true) {
		close(g.quit)
		g.comm.Wake()
		g.p2p.wake()
		if g.try() {
			g.wakeOff()
			g.release()
		}
	}
}

package pg

import (
	"context"
	"crypto/rand"
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

// proposalBytes is what each rank says of a group that is to be made: {digest of slots and options (8), random id (8)}.
const proposalBytes = 16

// Sub makes a group of some of g's slots (of the world, in any order, each once; nil: all of g's). It is an operation of g:
// every active member of g calls it with the same arguments, also one that will not be in it (it gets nil, nil). Close the
// group when it is not needed any more, also after it has failed: its memory is this process's arena (Config.ArenaBytes).
//
// Errors are those of an operation of g; ErrMismatch: the ranks gave other slots or options, and no group was made. If one
// of the members has no memory for it, the group is failed for good on all of them.
func (g *Group) Sub(ctx context.Context, slots []int, opts Options) (*Group, error) {
	if slots == nil {
		slots = g.slots
		if g.id == worldID {
			slots = g.Slots()
		}
	}
	slots = slices.Clone(slots)
	slices.Sort(slots)
	opts = opts.withDefaults(256 << 10)
	for i, s := range slots {
		if !slices.Contains(g.slots, s) {
			return nil, &collectives.ErrBadCall{Kind: collectives.AllGather, Why: fmt.Sprintf("new group: slot %d is not in the parent %v", s, g.slots)}
		}
		if i > 0 && slots[i-1] == s {
			return nil, &collectives.ErrBadCall{Kind: collectives.AllGather, Why: fmt.Sprintf("new group: slot %d is named twice", s)}
		}
	}
	d := uint64(0)
	for _, s := range slots {
		d = wire.Hash(d, uint64(s))
	}
	for _, x := range []uint64{uint64(opts.Mode), uint64(opts.Timeout), uint64(opts.SlotBytes), uint64(opts.Depth), uint64(opts.lanes()), uint64(bit(opts.ManualResume))} {
		d = wire.Hash(d, x)
	}
	in := make([]byte, proposalBytes)
	binary.LittleEndian.PutUint64(in, d)
	_, _ = rand.Read(in[8:])
	in[8] |= 2 // neither 0 nor the world's
	in[15] &= 0x7f
	parts := make([]int, len(g.slots))
	for i := range parts {
		parts[i] = proposalBytes
	}
	out := make([]byte, proposalBytes*len(parts))
	res, ver, err := g.doIn(ctx, &collectives.Call{Kind: collectives.AllGather, DType: dtype.U8, In: in, Out: out, OutParts: parts}, nil)
	if err != nil {
		return nil, err
	}
	faultpoint.Hit(faultpoint.NewGroup)
	id := uint64(0)
	for r, s := range g.slots {
		if !res.Active.Has(s) {
			continue
		}
		p := out[r*proposalBytes:]
		if id == 0 {
			id = binary.LittleEndian.Uint64(p[8:])
		}
		if binary.LittleEndian.Uint64(p) != d {
			return nil, fmt.Errorf("%w: rank %d makes a group of other slots or with other Options than rank %d (slots %v, %+v): give the same on all", ErrMismatch, r, g.rank, slots, opts)
		}
	}
	if !slices.Contains(slots, g.w.slot) {
		return nil, nil
	}
	return g.create(ctx, id, slots, opts, res, ver)
}

// create registers the group with the machine and makes its memory, on the loop, so that no view comes between. Views
// since the operation that made it may have cut it already: others made it earlier.
func (g *Group) create(ctx context.Context, id uint64, slots []int, opts Options, res Result, ver *collectives.Version) (*Group, error) {
	w := g.w
	fg := fault.Group{ID: id, Version: res.Epoch}
	for _, s := range slots {
		fg.Slots.Add(s)
	}
	fg.Active = fg.Slots.And(res.Active)
	var ms []collectives.Member
	for _, m := range g.comm.Members(ver) {
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
		} else if n, err = w.makeGroup(id, slots, opts, res.Epoch, ms); err == nil && !state.CompareAndSwap(0, 1) {
			err = fmt.Errorf("rank %d gave up", g.rank)
			n.comm.Release(false)
		}
		if err != nil {
			w.unmade(fg, res.Epoch, err)
			return
		}
		w.mu.Lock()
		w.groups[id] = n
		w.order = append(w.order, id)
		for i := range w.past {
			in := &w.past[i]
			if in.View.Epoch <= res.Epoch {
				continue
			}
			for _, c := range in.Cuts {
				if c.Group == id {
					n.comm.Install(in.View.Epoch, c.Seq, w.membersOf(slots, &in.View), c.Fail)
				}
			}
			if c, ms := n.remaining(in); ms != nil {
				n.comm.Install(in.View.Epoch, c.Seq, ms, c.Fail)
			}
		}
		w.mu.Unlock()
		w.agent.Step(fault.Created{Group: fg, Epoch: res.Epoch})
		w.replay(n)
	})
	var end error
	select {
	case <-ch:
	case <-time.After(10 * time.Second):
		end = fmt.Errorf("the loop does not answer in 10 s")
	case <-w.isOver:
		end = w.overErr()
	case <-ctx.Done():
		end = ctx.Err()
	}
	if end != nil && state.CompareAndSwap(0, 2) {
		return nil, during(fmt.Sprintf("new group %x", id), end)
	}
	<-ch
	if err != nil {
		return nil, during(fmt.Sprintf("new group %x", id), err)
	}
	return n, nil
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
		g.w.tidyAt = g.w.mesh.Now()
	})
	if err == nil && g.comm.Remote() { // so that a group made next finds its memory free
		for end := time.Now().Add(closeWait); !g.comm.Finished() && ctx.Err() == nil && time.Now().Before(end); {
			time.Sleep(200 * time.Microsecond)
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

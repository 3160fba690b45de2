package pg

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
)

// proposal is what each rank says of a group that is to be made: {digest of slots and options, random id, epoch}.
const proposalBytes = 16

// Sub makes a group of some of g's slots. It is an operation of g: every active member of g calls it with the same
// arguments, also one that will not be in it (it gets nil). slots nil: all of g's.
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
	for _, x := range []uint64{uint64(opts.Mode), uint64(opts.Timeout), uint64(opts.SlotBytes), uint64(opts.Depth), uint64(opts.lanes())} {
		d = wire.Hash(d, x)
	}
	in := make([]byte, proposalBytes)
	binary.LittleEndian.PutUint64(in, d)
	_, _ = rand.Read(in[8:])
	in[8] |= 2 // neither 0 nor the world's
	parts := make([]int, len(g.slots))
	for i := range parts {
		parts[i] = proposalBytes
	}
	out := make([]byte, proposalBytes*len(parts))
	res, ver, err := g.doIn(ctx, &collectives.Call{Kind: collectives.AllGather, DType: dtype.U8, In: in, Out: out, OutParts: parts})
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
			return nil, fmt.Errorf("%w: rank %d makes a group of other slots or with other options than rank %d (slots %v)", ErrMismatch, r, g.rank, slots)
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
	type made struct {
		g   *Group
		err error
	}
	ch := make(chan made, 1)
	w.agent.Do(func() {
		n, err := newGroup(w, id, slots, opts, res.Epoch, 0, ms)
		if err != nil {
			ch <- made{nil, err}
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
		}
		w.mu.Unlock()
		w.agent.Step(fault.Created{Group: fg, Epoch: res.Epoch})
		w.replay(n)
		ch <- made{n, nil}
	})
	select {
	case m := <-ch:
		return m.g, m.err
	case <-time.After(10 * time.Second):
		return nil, fmt.Errorf("serry: making group %x: the loop does not answer", id)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close gives a subgroup up, in order: it is an operation of the group, after which nobody uses it any more. Its memory
// is free once all members have returned from it.
func (g *Group) Close(ctx context.Context) error {
	if g.id == worldID {
		return fmt.Errorf("serry: the world is left or closed, not its group")
	}
	_, err := g.Barrier(ctx)
	for lost := (*RankLost)(nil); errors.As(err, &lost); { // alike on all: those who are left close it
		if _, _, err = g.Resume(ctx); err == nil {
			_, err = g.Barrier(ctx)
		}
	}
	g.stop()
	g.retired.Store(true)
	g.w.agent.Do(func() { g.w.tidyAt = g.w.mesh.Now() })
	return err
}

// stop ends the progress goroutine.
func (g *Group) stop() {
	if g.closed.CompareAndSwap(false, true) {
		close(g.quit)
		g.comm.Wake()
	}
}

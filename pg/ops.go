package pg

import (
	"context"
	"fmt"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
)

// Operations: each is collective, and every active rank issues it at the same place of its order, with equal dtype and
// lengths (else *GroupFailed with ErrMismatch). Buffers are the caller's again when it returns; on an error the output holds
// nothing that can be used. Errors: see Group.

// Do runs an operation that the named methods do not cover. Its buffers are described in collectives.Call.
func (g *Group) Do(ctx context.Context, call *collectives.Call) (Result, error) {
	return g.do(ctx, call)
}

// Barrier returns when every active rank has entered it.
func (g *Group) Barrier(ctx context.Context) (Result, error) {
	return g.do(ctx, &collectives.Call{Kind: collectives.Barrier})
}

// AllReduce reduces the elements of in over the active ranks, in the fixed tree order of the ranks, into out on every
// rank. in and out have equal length and dtype and may be the same memory.
func (g *Group) AllReduce(ctx context.Context, out, in Buffer, op ReduceOp) (Result, error) {
	if err := sameType(collectives.AllReduce, out, in); err != nil {
		return Result{}, err
	}
	return g.do(ctx, &collectives.Call{Kind: collectives.AllReduce, DType: in.DType, Reduce: op, In: in.Data, Out: out.Data})
}

// Broadcast copies root's buffer to every rank; root is a rank of the group. If it is lost, the others get
// *collectives.ErrSourceLost (Continue) or *RankLost (Raise), alike.
func (g *Group) Broadcast(ctx context.Context, buf Buffer, root int) (Result, error) {
	return g.do(ctx, &collectives.Call{Kind: collectives.Broadcast, DType: buf.DType, Root: root, In: buf.Data, Out: buf.Data})
}

// AllGather collects every rank's in, in rank order, in out of every rank. counts[r] is the number of elements of rank r,
// equal on all ranks; nil: all have len(in). The place of a rank that is not active is zero.
func (g *Group) AllGather(ctx context.Context, out, in Buffer, counts []int) (Result, error) {
	if err := sameType(collectives.AllGather, out, in); err != nil {
		return Result{}, err
	}
	if err := g.counts(collectives.AllGather, counts); err != nil {
		return Result{}, err
	}
	res, _, err := g.doIn(ctx, &collectives.Call{Kind: collectives.AllGather, DType: in.DType, In: in.Data, Out: out.Data}, &split{out: counts, eachOut: len(in.Data)})
	return res, err
}

// AllToAll gives sendCounts[r] elements of in to rank r and takes recvCounts[r] from it, both in rank order; nil: equal
// parts. What a rank gives must be what the other takes. The place of a rank that is not active is zero.
func (g *Group) AllToAll(ctx context.Context, out, in Buffer, recvCounts, sendCounts []int) (Result, error) {
	if err := sameType(collectives.AllToAll, out, in); err != nil {
		return Result{}, err
	}
	if err := g.counts(collectives.AllToAll, sendCounts); err != nil {
		return Result{}, err
	}
	if err := g.counts(collectives.AllToAll, recvCounts); err != nil {
		return Result{}, err
	}
	size := g.Size()
	res, _, err := g.doIn(ctx, &collectives.Call{Kind: collectives.AllToAll, DType: in.DType, In: in.Data, Out: out.Data},
		&split{in: sendCounts, out: recvCounts, eachIn: len(in.Data) / size, eachOut: len(out.Data) / size})
	return res, err
}

// split is how the buffers of a call are parted: in elements by rank, or (nil) into as many bytes each.
type split struct {
	in, out         []int
	eachIn, eachOut int
}

// part fills a call's parts in from what the Work keeps for that.
func (w *Work) part(s *split) {
	w.op.OutParts = w.g.parts(&w.parts[1], s.out, s.eachOut, w.op.DType)
	if w.op.Kind == collectives.AllToAll {
		w.op.InParts = w.g.parts(&w.parts[0], s.in, s.eachIn, w.op.DType)
	}
}

func (g *Group) counts(k collectives.Kind, counts []int) error {
	if size := g.Size(); counts != nil && len(counts) != size {
		return &collectives.ErrBadCall{Kind: k, Why: fmt.Sprintf("%d counts given, the group has %d ranks", len(counts), size)}
	}
	return nil
}

// parts turns element counts into bytes for all slots that the group can ever have.
func (g *Group) parts(scratch *[]int, counts []int, each int, dt dtype.DType) []int {
	if len(*scratch) != len(g.slots) {
		*scratch = make([]int, len(g.slots))
	}
	p := *scratch
	clear(p)
	for r := range min(g.Size(), len(p)) {
		switch {
		case counts == nil:
			p[r] = each
		case r < len(counts): // a rank that has come since gets nothing
			p[r] = counts[r] * dt.Size()
		}
	}
	return p
}

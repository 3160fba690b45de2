package pg

import (
	"context"
	"fmt"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
)

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

// Broadcast copies root's buffer to every rank.
func (g *Group) Broadcast(ctx context.Context, buf Buffer, root int) (Result, error) {
	return g.do(ctx, &collectives.Call{Kind: collectives.Broadcast, DType: buf.DType, Root: root, In: buf.Data, Out: buf.Data})
}

// AllGather collects every rank's in, in rank order, in out of every rank. counts[r] is the number of elements of rank r,
// equal on all ranks; nil: all have len(in). The place of a rank that is not active is zero.
func (g *Group) AllGather(ctx context.Context, out, in Buffer, counts []int) (Result, error) {
	if err := sameType(collectives.AllGather, out, in); err != nil {
		return Result{}, err
	}
	parts, err := g.parts(collectives.AllGather, counts, len(in.Data), in.DType)
	if err != nil {
		return Result{}, err
	}
	return g.do(ctx, &collectives.Call{Kind: collectives.AllGather, DType: in.DType, In: in.Data, Out: out.Data, OutParts: parts})
}

// AllToAll gives sendCounts[r] elements of in to rank r and takes recvCounts[r] from it, both in rank order; nil: equal
// parts. What a rank gives must be what the other takes. The place of a rank that is not active is zero.
func (g *Group) AllToAll(ctx context.Context, out, in Buffer, recvCounts, sendCounts []int) (Result, error) {
	if err := sameType(collectives.AllToAll, out, in); err != nil {
		return Result{}, err
	}
	ip, err := g.parts(collectives.AllToAll, sendCounts, len(in.Data)/g.Size(), in.DType)
	if err != nil {
		return Result{}, err
	}
	op, err := g.parts(collectives.AllToAll, recvCounts, len(out.Data)/g.Size(), out.DType)
	if err != nil {
		return Result{}, err
	}
	return g.do(ctx, &collectives.Call{Kind: collectives.AllToAll, DType: in.DType, In: in.Data, Out: out.Data, InParts: ip, OutParts: op})
}

// parts turns element counts into bytes for all slots that the group can ever have.
func (g *Group) parts(k collectives.Kind, counts []int, each int, dt dtype.DType) ([]int, error) {
	size := g.Size()
	if counts != nil && len(counts) != size {
		return nil, &collectives.ErrBadCall{Kind: k, Why: fmt.Sprintf("%d counts given, the group has %d ranks", len(counts), size)}
	}
	p := make([]int, len(g.slots))
	for r := range size {
		p[r] = each
		if counts != nil {
			p[r] = counts[r] * dt.Size()
		}
	}
	return p, nil
}

package pg

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
)

// Work is an operation that Start has issued. Wait for it, or ask whether it is Done; its buffers belong to it until then.
type Work struct {
	g       *Group
	op      collectives.Op
	pair    *Pair
	started time.Duration
	err     error
	res     Result
	async   bool // by Start: nobody asks for its Version afterwards
	kind    collectives.Kind
	seq     uint64
	done    atomic.Bool
	parts   [2][]int // scratch for those of a call: in, out
}

func (w *Work) phase() uint8 {
	if w.pair != nil && w.pair.combining {
		return 1
	}
	return 0
}

// finish ends the operation, and its waits in other goroutines; who calls it has the turn.
func (w *Work) finish(err error) {
	if w.done.Load() {
		return
	}
	w.err = err
	if v := w.op.Ver; v != nil && err == nil {
		w.res = Result{Seq: w.op.Seq, Epoch: v.Epoch, Active: v.Active}
	}
	w.op.End()
	if w.async {
		w.op.Ver = nil // with it goes the memory of its dead
	}
	w.done.Store(true)
	if w.g.wants.Load() > 0 {
		w.g.tell(w)
	}
}

func (w *Work) recycle() {
	w.pair, w.started, w.err, w.res, w.op.Ver = nil, 0, nil, Result{}, nil // with a Version goes the memory of its dead
	w.done.Store(false)
}

// Done says that the operation has ended, well or not, without waiting.
func (w *Work) Done() bool { return w.done.Load() }

// Wait waits until the operation has ended, and drives the group meanwhile, unless another goroutine does. If ctx ends
// first, only the waiting ends. Errors of the operation are those of a blocking one (Group); they stay. Several goroutines
// may wait for the same Work.
func (w *Work) Wait(ctx context.Context) (Result, error) {
	g := w.g
	if g == nil {
		return w.res, w.err
	}
	err := w.wait(ctx)
	if w.done.Load() {
		if _, ok := w.err.(*RankLost); !ok || g.opts.ManualResume {
			return w.res, w.err
		}
		if err = g.acquire(ctx); err == nil { // the loss is returned by this call: the group goes on
			defer g.release()
			return w.res, g.report(w)
		}
		if g.w.overErr() != nil {
			return w.res, w.err
		}
	}
	return Result{}, during(fmt.Sprintf("waiting for %v %d", w.kind, w.seq), err)
}

func (w *Work) wait(ctx context.Context) (err error) {
	g := w.g
	if w.done.Load() {
		return nil
	}
	held := g.take()
	if !held {
		if held, err = g.await(ctx, needEnd, w); !held {
			return err
		}
	}
	defer func() {
		if held {
			g.release()
		}
	}()
	held, err = g.steps(ctx, func() bool { return g.advance() }, w.done.Load, w)
	return err
}

// Start issues an operation and returns, without waiting for peers. Its buffers are described in collectives.Call, and
// belong to the Work until that is done.
//
// Any number may be outstanding; those beyond the first Options.Depth have no bytes in flight. If another goroutine is in
// an operation of the group, Start waits until that has ended the step that it is in (see Group). Only if that does not end
// in Options.Timeout, because a Fill or Take does not return, the error wraps context.DeadlineExceeded, and nothing was
// issued. ErrClosed, ErrEvicted, ErrNoQuorum: the world is over. *collectives.ErrBadCall: the call makes no sense, and
// nothing was issued. For what else happened to the group the Work fails, not Start.
func (g *Group) Start(call *collectives.Call) (*Work, error) {
	if err := g.acquireIn(g.opts.Timeout); err != nil {
		return nil, err
	}
	defer g.release()
	w := &Work{g: g, async: true}
	w.op.Call = *call
	if err := g.notice(); err != nil {
		w.finish(err)
		return w, nil
	}
	if e := g.lost(); e != nil {
		w.finish(e)
		return w, nil
	}
	if g.ended != nil {
		w.finish(g.ended)
		return w, nil
	}
	if a := g.aborted.Load(); a != nil {
		w.finish(a)
		return w, nil
	}
	if err := g.begin(w); err != nil {
		return nil, err
	}
	w.kind, w.seq = call.Kind, w.op.Seq // what its op says may end with it
	g.advance()
	g.progressOnce.Do(func() { g.w.ground.Go(g.progress) })
	poke(g.worker)
	return w, nil
}

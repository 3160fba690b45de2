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
	done    atomic.Bool
	parts   [2][]int // scratch for those of a call: in, out
}

func (w *Work) phase() uint8 {
	if w.pair != nil && w.pair.combining {
		return 1
	}
	return 0
}

func (w *Work) finish(err error) {
	if w.done.Load() {
		return
	}
	w.err = err
	if v := w.op.Ver; v != nil && err == nil {
		w.res = Result{Seq: w.op.Seq, Epoch: v.Epoch, Active: v.Active}
	}
	w.op.End()
	w.done.Store(true)
}

func (w *Work) recycle() {
	w.pair, w.started, w.err, w.res, w.op.Ver = nil, 0, nil, Result{}, nil // with a Version goes the memory of its dead
	w.done.Store(false)
}

// Done says that the operation has ended, well or not, without waiting.
func (w *Work) Done() bool { return w.done.Load() }

// Wait waits until the operation has ended, and drives the group meanwhile. If ctx ends first, only the waiting ends.
// Errors of the operation are those of a blocking one (Group); they stay.
func (w *Work) Wait(ctx context.Context) (Result, error) {
	if w.g == nil {
		return w.res, w.err
	}
	g := w.g
	if err := g.acquire(ctx); err != nil {
		return Result{}, err
	}
	defer g.release()
	if !w.done.Load() {
		if err := g.drive(ctx, w); err != nil && !w.done.Load() {
			return Result{}, during(fmt.Sprintf("waiting for %v %d", w.op.Kind, w.op.Seq), err)
		}
	}
	w.op.Ver = nil
	return w.res, g.report(w)
}

// Start issues an operation and returns, without waiting for peers. Its buffers are described in collectives.Call, and
// belong to the Work until that is done.
//
// If another goroutine is in an operation of the group, Start waits for that to end, at most Options.Timeout: then the
// error wraps context.DeadlineExceeded, and nothing was issued. As the other ranks issue it, try again, or Abort, which
// also ends such a wait. ErrClosed, ErrEvicted, ErrNoQuorum: the world is over. *collectives.ErrBadCall: the call makes no
// sense, and nothing was issued. For what else happened to the group the Work fails, not Start.
func (g *Group) Start(call *collectives.Call) (*Work, error) {
	if err := g.acquireIn(g.opts.Timeout); err != nil {
		return nil, err
	}
	defer g.release()
	w := &Work{g: g}
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
	if err := g.begin(w); err != nil {
		return nil, err
	}
	g.advance()
	g.progressOnce.Do(func() { go g.progress() })
	poke(g.worker)
	return w, nil
}

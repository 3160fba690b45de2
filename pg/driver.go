package pg

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/device/host"
)

// turns hands a group from one driver to the next. Whoever gives the word up wakes one of the callers that wait, or the
// progress goroutine if there is something left to drive.
type turns struct {
	driver atomic.Int32  // 1: somebody drives
	wants  atomic.Int32  // callers that wait
	parked atomic.Bool   // the progress goroutine waits
	caller chan struct{} // wakes one caller
	worker chan struct{} // wakes the progress goroutine
}

func (t *turns) init() { t.caller, t.worker = make(chan struct{}, 1), make(chan struct{}, 1) }

func (t *turns) try() bool { return t.driver.CompareAndSwap(0, 1) }

// acquire makes the caller the one that drives the group. It waits until ctx or the world is over, or the calls before it
// have ended: each does in its operation's deadline.
func (g *Group) acquire(ctx context.Context) error {
	if g.try() {
		return nil
	}
	return g.await(ctx)
}

// acquireIn is acquire for a caller without a context.
func (g *Group) acquireIn(d time.Duration) error {
	if g.try() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	err := g.await(ctx)
	if err != nil && ctx.Err() != nil && g.w.overErr() == nil {
		return fmt.Errorf("serry: nothing was issued: another call is in an operation of group %x since %v: %w", g.id, d, err)
	}
	return err
}

func (g *Group) await(ctx context.Context) error {
	for range 10 {
		host.SchedYield()
		if g.try() {
			return nil
		}
	}
	g.wants.Add(1)
	for {
		if g.try() {
			g.wants.Add(-1)
			return nil
		}
		err := g.w.overErr()
		select {
		case <-g.caller:
		case <-ctx.Done():
			err = ctx.Err()
		case <-g.w.isOver:
			err = g.w.overErr()
		}
		if err != nil {
			g.wants.Add(-1)
			g.handOn(true) // the turn may have been ours
			return err
		}
	}
}

// release lets the next one drive.
func (g *Group) release() {
	left := len(g.queue) > 0
	g.driver.Store(0)
	g.handOn(left)
}

func (t *turns) handOn(left bool) {
	switch {
	case t.wants.Load() > 0:
		poke(t.caller)
	case left && t.parked.Load():
		poke(t.worker)
	}
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// progress drives what callers have issued and do not wait for. It stays away while a caller drives.
func (g *Group) progress() {
	defer g.w.guard()
	for idle := true; ; {
		if idle && !g.park() {
			return
		}
		if g.wants.Load() > 0 || !g.try() {
			g.parked.Store(true)
			// Who gives the word up from here on wakes us.
			if g.wants.Load() > 0 || !g.try() {
				ok := g.park()
				g.parked.Store(false)
				if !ok {
					return
				}
				idle = false
				continue
			}
			g.parked.Store(false)
		}
		moved := g.advance()
		idle = len(g.queue) == 0
		if !idle {
			g.overdue(g.w.mesh.Now(), g.queue[0])
		}
		g.release()
		if !moved && !idle {
			g.comm.Sleep(time.Millisecond, func() bool { return g.wants.Load() > 0 || g.driver.Load() != 0 })
		}
	}
}

// park waits for work; it returns false when the group is over.
func (g *Group) park() bool {
	select {
	case <-g.worker:
		return true
	case <-g.quit:
		return false
	}
}

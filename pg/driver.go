package pg

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// turns hands a group from one driver to the next. Who drives steps the operations of all callers, and tells each whose
// operation has ended. It gives its turn to a caller that needs one at once, between two of its steps: so nobody who only
// issues something waits for a peer.
type turns struct {
	driver atomic.Int32  // 1: somebody drives; and 2 for each caller in line with needTurn
	wants  atomic.Int32  // callers in line
	others atomic.Int32  // of these, those with needPair
	asleep atomic.Bool   // who drives sleeps, or is about to
	parked atomic.Bool   // the progress goroutine waits
	worker chan struct{} // wakes the progress goroutine

	mu   sync.Mutex
	line []*caller // oldest first
	free []*caller
}

// need is for what a caller waits in line.
type need uint8

const (
	needTurn need = iota // to be the one that drives, as soon as possible
	needPair             // as well, but not at once: nobody else steps its pair
	needEnd              // for the end of its operation, whoever drives
)

// caller is one in line.
type caller struct {
	need need
	w    *Work         // its end ends the waiting
	over atomic.Bool   // it has come
	ch   chan struct{} // wakes it
}

// turnFor is how long a driver keeps its turn while another has a pair to step.
const turnFor = time.Millisecond

func (t *turns) init() { t.worker = make(chan struct{}, 1) }

// try takes the turn if nobody has it.
func (t *turns) try() bool {
	for {
		v := t.driver.Load()
		if v&1 != 0 {
			return false
		}
		if t.driver.CompareAndSwap(v, v|1) {
			return true
		}
	}
}

// take is try for one that does not stand in line: it lets those go first who need a turn.
func (t *turns) take() bool { return t.driver.CompareAndSwap(0, 1) }

// urgent says that a caller needs a turn.
func (t *turns) urgent() bool { return t.driver.Load() > 1 }

// acquire makes the caller the one that drives the group. It waits for at most a step of another one, or until ctx or the
// world is over.
func (g *Group) acquire(ctx context.Context) error {
	if g.take() {
		return nil
	}
	return g.awaitTurn(ctx)
}

//go:noinline
func (g *Group) awaitTurn(ctx context.Context) error {
	_, err := g.await(ctx, needTurn, nil)
	return err
}

// acquireIn is acquire for a caller without a context.
func (g *Group) acquireIn(d time.Duration) error {
	if g.take() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	err := g.awaitTurn(ctx)
	if err != nil && ctx.Err() != nil && g.w.overErr() == nil {
		return fmt.Errorf("serry: nothing was issued: another call is in an operation of group %x since %v: %w", g.id, d, err)
	}
	return err
}

// await waits for the turn, or for the end of w: then the turn is not taken.
func (g *Group) await(ctx context.Context, n need, w *Work) (held bool, err error) {
	for range 10 {
		g.w.ground.Yield()
		if w != nil && w.done.Load() {
			return false, nil
		}
		if g.take() {
			return true, nil
		}
	}
	c := g.enter(n, w)
	for {
		if c.over.Load() || w != nil && w.done.Load() {
			g.leave(c, false)
			return false, nil
		}
		if g.try() {
			g.leave(c, true)
			return true, nil
		}
		if err = g.w.overErr(); err == nil {
			err = ctx.Err()
		}
		if err != nil {
			g.leave(c, false)
			return false, err
		}
		g.w.ground.Await(ctx, 0, c.ch, g.w.isOver)
	}
}

// wanted says that who drives should hand its turn over. turn is since when it has it, from the first question on.
func (g *Group) wanted(turn *time.Duration) bool {
	if g.urgent() {
		return true
	}
	if g.others.Load() == 0 {
		return false
	}
	now := g.w.ground.Now()
	if *turn == 0 {
		*turn = now
	}
	return now-*turn >= turnFor
}

// handOver gives the turn to another caller and waits until it is back, ctx is over, or w has ended (over).
func (g *Group) handOver(ctx context.Context, w *Work) (held, over bool, err error) {
	n := needEnd
	if w.pair != nil {
		n = needPair
	}
	c := g.enter(n, w)
	g.release()
	for end := (<-chan struct{})(g.w.isOver); ; {
		g.w.ground.Await(ctx, 0, c.ch, end)
		err = ctx.Err()
		if end != nil && isClosed(end) { // the next step finds it
			end = nil
			g.hurry(c)
		}
		held = err == nil && !c.over.Load() && g.try()
		if over = c.over.Load(); held || over || err != nil {
			g.leave(c, held)
			return held, over, err
		}
	}
}

// retake waits for the turn, whatever happens: a step of another one is bounded.
func (g *Group) retake() {
	if g.take() {
		return
	}
	c := g.enter(needTurn, nil)
	for !g.try() {
		g.w.ground.Await(context.Background(), 0, c.ch)
	}
	g.leave(c, true)
}

// enter puts a caller in line.
func (g *Group) enter(n need, w *Work) *caller {
	t := &g.turns
	t.mu.Lock()
	var c *caller
	if k := len(t.free); k > 0 {
		c, t.free = t.free[k-1], t.free[:k-1]
	} else {
		c = &caller{ch: make(chan struct{}, 1)}
	}
	c.need, c.w = n, w
	c.over.Store(false)
	t.line = append(t.line, c)
	t.wants.Add(1)
	t.count(n, 1)
	t.mu.Unlock()
	if n != needEnd && t.asleep.Load() {
		g.comm.Wake()
	}
	return c
}

func (t *turns) count(n need, d int32) {
	switch n {
	case needTurn:
		t.driver.Add(2 * d)
	case needPair:
		t.others.Add(d)
	}
}

// hurry makes a caller in line one that needs a turn.
func (g *Group) hurry(c *caller) {
	t := &g.turns
	t.mu.Lock()
	t.count(c.need, -1)
	c.need = needTurn
	t.count(c.need, 1)
	poke(c.ch)
	t.mu.Unlock()
	if t.asleep.Load() {
		g.comm.Wake()
	}
}

// leave takes a caller out of the line. If it does not hold the turn, that may have been its own.
func (t *turns) leave(c *caller, held bool) {
	t.mu.Lock()
	t.line = slices.DeleteFunc(t.line, func(x *caller) bool { return x == c })
	t.wants.Add(-1)
	t.count(c.need, -1)
	select {
	case <-c.ch:
	default:
	}
	c.w = nil
	t.free = append(t.free, c)
	t.mu.Unlock()
	if !held {
		t.handOn(true)
	}
}

// tell wakes the callers in line who wait for the end of w.
func (t *turns) tell(w *Work) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.line {
		if c.w == w {
			c.over.Store(true)
			poke(c.ch)
		}
	}
}

// release lets the next one drive.
func (g *Group) release() {
	left := len(g.queue) > 0
	g.driver.Add(-1)
	if left || g.wants.Load() > 0 {
		g.handOn(left)
	}
}

// handOn wakes the next caller: the oldest of those with the most urgent need; or the progress goroutine, if something is
// left to drive.
func (t *turns) handOn(left bool) {
	if t.wants.Load() > 0 && t.next() {
		return
	}
	if left && t.parked.Load() {
		poke(t.worker)
	}
}

func (t *turns) next() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for n := needTurn; n <= needEnd; n++ {
		for _, c := range t.line {
			if c.need == n {
				poke(c.ch)
				return true
			}
		}
	}
	return false
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
		moved := g.serve()
		idle = len(g.queue) == 0
		g.release()
		if !moved && !idle {
			g.comm.Sleep(time.Millisecond, func() bool { return g.wants.Load() > 0 || g.driver.Load() != 0 })
		}
	}
}

// serve takes what nobody waits for on by a step.
func (g *Group) serve() (moved bool) {
	moved = g.advance()
	if len(g.queue) > 0 {
		g.overdue(g.w.ground.Now(), g.queue[0])
	}
	return moved
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

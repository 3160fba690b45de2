package pg

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/faultpoint"
)

// MaxAttach is how much a member can attach for a newcomer at a Boundary.
const MaxAttach = 16 << 20

// leaveFailed is how long Leave waits for a group that is failed for good: who gave up in it completes nothing any more.
const leaveFailed = time.Second

// boundaryHold is what the machine has said about Boundaries.
type boundaryHold struct {
	on atomic.Bool // somebody waits to come in
	// standing counts the callers that wait in a Boundary: whom we hold is not late.
	standing atomic.Int32
	mu       sync.Mutex
	at       uint64 // the Boundary to stop in; 0: the next one
	done     uint64 // newcomers have entered at this one
	came     []int  // their slots
	ch       chan struct{}
}

func (h *boundaryHold) set(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	if h.ch != nil {
		close(h.ch)
		h.ch = nil
	}
}

func (h *boundaryHold) wake() { h.set(func() {}) }

func (h *boundaryHold) install(at uint64, came []int) {
	h.set(func() { h.done, h.came, h.at = at, came, 0; h.on.Store(false) })
}

// entered is who came in at Boundary n.
func (h *boundaryHold) entered(n uint64) []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done != n {
		return nil
	}
	return h.came
}

// Passed says what a Boundary came to, alike on all members.
type Passed struct {
	Count  uint64 // Boundaries entered, this one included; a newcomer's World.Joined().Boundary continues it
	Joined []int  // slots of the newcomers that entered here
}

// state is what a caller in Boundary n has to do: go on, or wait for the channel; stand: it is the one.
func (h *boundaryHold) state(n uint64) (wait <-chan struct{}, stand bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.on.Load() || (h.at != 0 && n < h.at) {
		return nil, false
	}
	if h.ch == nil {
		h.ch = make(chan struct{})
	}
	return h.ch, h.at != 0 && n >= h.at
}

// Entered implements agent.Host.
func (h worldHost) Entered() uint64 { return h.entered.Load() }

// Hold implements agent.Host.
func (h worldHost) Hold(count uint64) {
	h.hold.set(func() { h.hold.at = count; h.hold.on.Store(true) })
}

// Release implements agent.Host.
func (h worldHost) Release() { h.hold.set(func() { h.hold.at = 0; h.hold.on.Store(false) }) }

// Boundary is where newcomers enter: every member calls it at the same places of its program, once in a step say. When
// nobody waits to come in it costs a counter. Otherwise everything that this process has issued is completed, the members
// agree, and the group's Active set and version change before it returns. attach (or nil) gives the bytes that a newcomer
// gets, the step number say; it is called only if one enters.
//
// A newcomer whose Join has returned stands in the Boundary at which it entered: it goes on as the members do after that
// one. So if it calls Boundary before its first operation, because that is how the step begins, the call is that Boundary:
// it returns at once what it returned to the others.
//
// It does not report a RankLost: the next operation does.
//
// What attach gives is at most MaxAttach bytes.
func (w *World) Boundary(ctx context.Context, attach func() []byte) (Passed, error) {
	if w.stands() {
		n := w.entered.Load()
		return Passed{n, w.hold.entered(n)}, w.overErr()
	}
	n := w.entered.Add(1)
	faultpoint.Hit(faultpoint.BoundaryEnter)
	if !w.hold.on.Load() {
		return Passed{Count: n}, w.overErr()
	}
	quiet := false
	for {
		if err := w.overErr(); err != nil {
			return Passed{Count: n}, err
		}
		wait, stand := w.hold.state(n)
		if wait == nil {
			return Passed{n, w.hold.entered(n)}, nil
		}
		if stand && !quiet {
			losses, err := w.drain(ctx)
			if err != nil {
				return Passed{Count: n}, err
			}
			quiet = true
			faultpoint.Hit(faultpoint.BoundaryStop)
			var b []byte
			if attach != nil {
				b = attach()
			}
			if len(b) > MaxAttach {
				return Passed{Count: n}, fmt.Errorf("serry: Boundary %d: attach gave %d bytes for the newcomer, at most %d can be carried", n, len(b), MaxAttach)
			}
			w.agent.Do(func() { w.quiet(n, losses, b) })
		}
		if !stand {
			quiet = false
		}
		begin := w.ground.Now()
		w.hold.standing.Add(1)
		w.ground.Await(ctx, nagEvery, wait)
		w.hold.standing.Add(-1)
		if err := ctx.Err(); err != nil {
			return Passed{Count: n}, fmt.Errorf("serry: waiting in Boundary %d for a newcomer to be admitted: %w", n, err)
		}
		if w.ground.Now()-begin >= nagEvery {
			w.log.Warn("stands in a Boundary for a newcomer: do all members call Boundary at the same places?", "boundary", n)
		}
	}
}

// stands says, once, that this process has issued nothing since the Boundary at which it entered.
func (w *World) stands() bool {
	if w.standing == nil {
		return false
	}
	was := w.standing
	w.standing = nil
	gs := w.all()
	for _, g := range gs {
		if from, ok := was[g.id]; !ok || g.issued.Load() != from || g.p2p.used() {
			return false
		}
	}
	return len(gs) == len(was)
}

// used says that something was sent.
func (p *p2p) used() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.flows, func(f flow) bool { return f.out.sent > 0 })
}

// drain completes everything that this process has issued, and returns the losses that its next calls will return.
func (w *World) drain(ctx context.Context) (map[uint64][]*RankLost, error) {
	losses := map[uint64][]*RankLost{}
	for _, g := range w.Groups() {
		if err := g.acquire(ctx); err != nil {
			return nil, err
		}
		var err error
		for err == nil && len(g.queue) > 0 {
			last := g.queue[len(g.queue)-1]
			if last.pair != nil {
				err = fmt.Errorf("%w: Boundary while dispatch %d of group %x is not combined", ErrOutOfStep, last.op.Seq, g.id)
				break
			}
			if e := g.drive(ctx, last); e != nil && !last.done.Load() {
				err = e
			}
		}
		losses[g.id] = g.unreported()
		g.release()
		if err != nil {
			return nil, err
		}
	}
	return losses, nil
}

// quiet tells the machine, on the loop, that the caller stands in Boundary n with everything complete.
func (w *World) quiet(n uint64, losses map[uint64][]*RankLost, attach []byte) {
	ev := fault.Quiet{Count: n, Attach: w.encodeAttach(losses, attach)}
	for _, g := range w.Groups() {
		seq := g.comm.Done()
		ev.Groups = append(ev.Groups, fault.GroupDone{Group: g.id, Issued: seq, Done: []fault.Done{{Slot: w.slot, Seq: seq}}})
	}
	w.agent.Step(ev)
}

// Leave takes this process out of the world in order: everything that it issued completes first, the others get what they
// still need of it, and go on without it. It must not be called while an operation is under way. If ctx ends before the
// others have what they need, or before they agree, this process is a member still.
func (w *World) Leave(ctx context.Context) error {
	if err := w.overErr(); err != nil {
		return err
	}
	if _, err := w.drain(ctx); err != nil {
		return err
	}
	for _, g := range w.all() {
		g.comm.Tell()
	}
	if err := w.acknowledged(ctx); err != nil {
		return during("leaving", err)
	}
	w.agent.Post(fault.Leave{})
	for !isClosed(w.left) {
		if err := ctx.Err(); err != nil {
			return during("leaving: the others do not agree", err)
		}
		w.ground.Await(ctx, 0, w.left)
	}
	w.ground.Await(context.Background(), time.Millisecond) // the last frames are on their way
	return w.Close()
}

// acknowledged waits until all members have completed what this process has, in every group.
func (w *World) acknowledged(ctx context.Context) error {
	begin := w.ground.Now()
	for _, g := range w.all() {
		for d := 100 * time.Microsecond; w.group(g.id) != nil && !g.comm.Finished(); d = min(2*d, 5*time.Millisecond) {
			if g.comm.Current().Fail != "" && w.ground.Now()-begin > leaveFailed {
				break
			}
			w.ground.Await(ctx, d, w.isOver)
			if err := w.overErr(); err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("not all members have completed what this rank has, up to operation %d of group %x: %w", g.comm.Done(), g.id, err)
			}
		}
	}
	return nil
}

// Abort gives up at once, from any goroutine: of a subgroup, it fails it for good on all its members; of the world it is
// this process's loss. From its return on this process issues nothing in the group.
func (g *Group) Abort(reason string) {
	if g.id == worldID {
		g.w.agent.Post(fault.Abort{Group: worldID, Reason: reason})
		g.w.end(fmt.Errorf("%w: aborted: %s", ErrClosed, reason))
		return
	}
	g.abort(reason)
}

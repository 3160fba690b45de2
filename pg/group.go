package pg

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/fault"
)

// Set is a set of slots of the world.
type Set = fault.Set

// Mode says what a loss does to the operations after the cut.
type Mode uint8

// The modes.
const (
	Continue Mode = iota // they are redone over the survivors (inference)
	Raise                // they fail with RankLost, alike on all; the call after that resumes (training)
)

func (m Mode) String() string {
	if m == Raise {
		return "raise"
	}
	return "continue"
}

// Options of a group, equal on all its members. The zero value of a field means its default.
type Options struct {
	Mode         Mode
	Timeout      time.Duration // deadline of an operation (default 30 s): how late a rank may be
	SlotBytes    int           // shared memory for one contribution (default 1 MiB in the world, 256 KiB in others)
	Depth        int           // operations that may have bytes in flight (default 4)
	Pairs        bool          // the group runs dispatch and combine: its slots have two halves
	ManualResume bool          // Raise: go on only after Resume
}

func (o Options) withDefaults(slot int) Options {
	if o.Timeout <= 0 {
		o.Timeout = 30 * time.Second
	}
	if o.SlotBytes <= 0 {
		o.SlotBytes = slot
	}
	o.SlotBytes = (max(o.SlotBytes, 4096) + 8191) &^ 8191
	if o.Depth <= 0 {
		o.Depth = 4
	}
	return o
}

func (o Options) lanes() int {
	if o.Pairs {
		return 2
	}
	return 1
}

// shape is that of a group of size ranks.
func (o Options) shape(size int) collectives.Shape {
	return collectives.Shape{Size: size, SlotBytes: o.SlotBytes, Depth: o.Depth, Lanes: o.lanes()}
}

// Result says how an operation ended: its place, and the version and set that it used, equal on all survivors.
type Result struct {
	Seq    uint64
	Epoch  uint64
	Active Set // slots of the world
}

// Group runs operations among its ranks. Rank i is the i-th of its slots, ascending, and never moves. Operations are
// issued in the same order on all ranks; methods may be called from any goroutine, but two goroutines that race have no
// order.
//
// Every operation has a deadline (Options.Timeout), which limits how late a rank may be: when it is over, the rank that
// everybody waits for is proposed for exclusion. Cancelling the context of a blocking operation aborts the group, unless
// it has issued nothing yet.
//
// An operation is issued at once, also while others of this process are under way: it waits for no peer, but for the other
// goroutine to end the step that it is in (a copy, a reduction, a call of Fill or Take).
//
// Errors of operations: *RankLost (Raise), alike on all survivors; *GroupFailed (ErrFailed, ErrMismatch, ErrDeadlock),
// alike on all members, for good: Close such a group, or its memory stays; ErrClosed, ErrEvicted, ErrNoQuorum: this
// process is out of the group or the world; *collectives.ErrBadCall: nothing was issued.
type Group struct {
	w     *World
	id    uint64
	rank  int
	slots []int
	opts  Options
	comm  *collectives.Comm
	size  atomic.Int64 // of the world: grows

	turns

	// The driver's own.
	seq     uint64
	queue   []*Work
	spare   []*Work
	pairs   []*Pair              // that are over
	seen    note                 // what was taken notice of: operations begin in it
	news    []note               // what came after it and was not yet taken notice of
	last    *collectives.Version // the newest of them
	pending []*RankLost          // losses that were not yet returned to anybody, oldest first
	ended   error                // no operation is issued any more; those before the cut still complete
	failed  error                // nothing completes any more
	blamed  time.Duration        // when we last reported an overdue operation
	failing bool
	ctxDone <-chan struct{} // of the context whose end wakes who sleeps here
	ctxStop func() bool

	issued  atomic.Uint64
	waiting struct{ seq, epoch, phase atomic.Uint64 } // what the driver waits for; seq 0: nothing
	aborted atomic.Pointer[GroupFailed]               // by Abort here, agreed or not
	closed  atomic.Bool
	retired atomic.Bool // closed here
	inOrder atomic.Bool // and by all, as an operation

	progressOnce sync.Once
	quit         chan struct{}

	p2p p2p
}

func newGroup(w *World, id uint64, slots []int, opts Options, epoch, done uint64, members []collectives.Member) (*Group, error) {
	g := &Group{w: w, id: id, slots: slots, opts: opts, rank: -1, seq: done, quit: make(chan struct{})}
	for i, s := range slots {
		if s == w.slot {
			g.rank = i
		}
	}
	comm, err := collectives.New(collectives.Config{
		Group: id, Rank: g.rank, Slots: slots, Arena: w.arena, Words: w.words,
		Shape:  opts.shape(len(slots)),
		Retain: w.cfg.Retain,
	}, epoch, done, members)
	if err != nil {
		return nil, err
	}
	g.comm, g.last = comm, comm.Current()
	g.seen = noteOf(g.last)
	g.issued.Store(done)
	g.turns.init()
	g.p2p.init(g.last, len(slots))
	return g, nil
}

// ID is equal on all members, and no other group's.
func (g *Group) ID() uint64 { return g.id }

// Rank is this process's.
func (g *Group) Rank() int { return g.rank }

// Size is the number of ranks, active or not. In the world it grows at a Boundary, up to Capacity.
func (g *Group) Size() int {
	if g.id == worldID {
		return int(g.size.Load())
	}
	return len(g.slots)
}

// Slots are the world's slots of the ranks, ascending.
func (g *Group) Slots() []int { return g.slots[:g.Size()] }

// Options are the group's, with the defaults filled in.
func (g *Group) Options() Options { return g.opts }

// Active is the set of the last version, as slots of the world, and that version's epoch.
func (g *Group) Active() (Set, uint64) {
	v := g.comm.Current()
	return v.Active, v.Epoch
}

// IsActive says whether a rank is in the last version.
func (g *Group) IsActive(rank int) bool {
	v := g.comm.Current()
	return v.Ranks.Has(rank)
}

func (g *Group) get() *Work {
	if n := len(g.spare); n > 0 {
		w := g.spare[n-1]
		g.spare = g.spare[:n-1]
		return w
	}
	return &Work{g: g}
}

// do runs one operation to its end on the calling goroutine.
func (g *Group) do(ctx context.Context, call *collectives.Call) (Result, error) {
	res, _, err := g.doIn(ctx, call, nil)
	return res, err
}

// doIn is do, and says in which version the operation was.
func (g *Group) doIn(ctx context.Context, call *collectives.Call, s *split) (Result, *collectives.Version, error) {
	if g.aborted.Load() != nil {
		if err := g.refused(ctx); err != nil {
			return Result{}, nil, err
		}
	}
	if err := g.acquire(ctx); err != nil {
		return Result{}, nil, err
	}
	defer g.release()
	w, err := g.issue(call, s)
	if err != nil {
		return Result{}, nil, err
	}
	held, err := g.steps(ctx, func() bool { return g.advance() }, func() bool { return w.done.Load() }, w)
	if !held {
		g.retake()
	}
	if !w.done.Load() {
		// The context is over: this rank gives up, and says so to all. Nothing touches the caller's buffers any more,
		// because nobody drives the group again.
		g.failed = fmt.Errorf("%w: rank %d gave up %v %d: %w", ErrClosed, g.rank, call.Kind, w.op.Seq, err)
		g.drop(g.failed)
		g.post(fmt.Sprintf("in %v %d: %v", call.Kind, w.op.Seq, err))
		return Result{}, nil, g.failed
	}
	if w.err != nil {
		return w.res, nil, g.report(w)
	}
	res, ver := w.res, w.op.Ver
	w.recycle()
	g.spare = append(g.spare, w)
	return res, ver, nil
}

// issue puts an operation into the order. It does not wait.
func (g *Group) issue(call *collectives.Call, s *split) (*Work, error) {
	if err := g.settle(); err != nil {
		return nil, err
	}
	for _, x := range g.queue {
		if x.pair != nil && x.err == nil {
			return nil, fmt.Errorf("%w: %v while a dispatch (operation %d) waits for its combine", ErrOutOfStep, call.Kind, x.op.Seq)
		}
	}
	w := g.get()
	w.op.Call = *call
	if s != nil {
		w.part(s)
	}
	if err := g.begin(w); err != nil {
		w.op.End()
		w.recycle()
		g.spare = append(g.spare, w)
		return nil, err
	}
	return w, nil
}

func (g *Group) begin(w *Work) error {
	if w.op.Deadline <= 0 {
		w.op.Deadline = g.opts.Timeout
	}
	w.op.Keep = g.opts.Mode == Continue
	if err := g.comm.Start(&w.op, g.seq+1, g.last); err != nil {
		return err
	}
	g.seq++
	g.issued.Store(g.seq)
	w.started = 0
	g.queue = append(g.queue, w)
	return nil
}

// cutOff fails what was issued after the cut.
func (g *Group) cutOff(cut uint64, err error) {
	keep := g.queue[:0]
	for _, w := range g.queue {
		if w.op.Seq <= cut {
			keep = append(keep, w)
		} else {
			w.finish(err)
		}
	}
	clear(g.queue[len(keep):])
	g.queue = keep
}

func (g *Group) drop(err error) {
	for _, w := range g.queue {
		w.finish(err)
	}
	clear(g.queue)
	g.queue = g.queue[:0]
}

// advance steps everything that may have bytes in flight.
func (g *Group) advance() (moved bool) {
	if g.notice() != nil {
		return true
	}
	for i := 0; i < min(len(g.queue), g.opts.Depth); i++ {
		w := g.queue[i]
		if w.pair != nil {
			if w.pair.publish() {
				moved = true
			}
			continue
		}
		switch g.comm.Step(&w.op, i == 0) {
		case collectives.Progress:
			moved = true
		case collectives.Done:
			w.finish(nil)
			g.pop()
			return true
		case collectives.Failed:
			w.finish(w.op.Err)
			g.pop()
			return true
		case collectives.Moved:
			if g.notice() == nil && i < len(g.queue) && g.queue[i] == w {
				g.comm.Restart(&w.op)
			}
			return true
		case collectives.Mismatch:
			if g.ended != nil { // it was decided, and fits only others
				w.finish(g.ended)
				g.pop()
				return true
			}
			g.mismatch(w.op.Err)
		}
	}
	return moved
}

func (g *Group) pop() {
	g.finished()
	copy(g.queue, g.queue[1:])
	g.queue[len(g.queue)-1] = nil
	g.queue = g.queue[:len(g.queue)-1]
}

// mismatch asks for the group to be failed for good, once.
func (g *Group) mismatch(err error) {
	if !g.failing {
		g.failing = true
		g.post(mismatchReason + err.Error())
	}
}

func (g *Group) post(reason string) { g.w.agent.Post(fault.Abort{Group: g.id, Reason: reason}) }

// abort fails the group for good on all members, which takes an agreement; here nothing is issued any more from now on.
func (g *Group) abort(reason string) {
	g.aborted.CompareAndSwap(nil, &GroupFailed{g.id, g.comm.Current().Epoch, fmt.Sprintf("aborted by rank %d: %s", g.w.slot, reason)})
	g.post(reason)
}

// refused waits, in a group that was aborted here, until that is agreed: so that the error is the same as the others'.
// Where it is not in time, it returns that of abort.
func (g *Group) refused(ctx context.Context) error {
	for begin := g.w.ground.Now(); !g.comm.Failed(); {
		switch {
		case g.w.overErr() != nil || g.closed.Load():
			return nil // the next step says that
		case ctx.Err() != nil:
			return ctx.Err()
		case g.w.ground.Now()-begin > g.opts.Timeout:
			return g.aborted.Load()
		}
		g.w.ground.Await(ctx, abortPoll)
	}
	return nil
}

const (
	spinSteps   = 2000
	yieldFor    = 200 * time.Microsecond
	sleepAtMost = 100 * time.Millisecond
	askAgain    = 200 * time.Millisecond
	abortPoll   = 200 * time.Microsecond
)

// drive advances until w is done, or the context is over: that is the error.
func (g *Group) drive(ctx context.Context, w *Work) error {
	return g.until(ctx, func() bool { return g.advance() }, func() bool { return w.done.Load() }, w)
}

// until is steps for a caller that goes on with the turn, whatever has happened.
func (g *Group) until(ctx context.Context, step, done func() bool, w *Work) error {
	held, err := g.steps(ctx, step, done, w)
	if !held {
		g.retake()
	}
	return err
}

// steps steps until done, waiting in three stages: spin while the host's ranks fit on its cores, yield for a bounded
// time, then sleep on the group's generation word. Meanwhile others may have the turn, and w may end in theirs: then the
// turn is not held any more. The error is that of ctx.
func (g *Group) steps(ctx context.Context, step, done func() bool, w *Work) (held bool, err error) {
	var since, turn time.Duration
	for n := 0; ; n++ {
		moved := step()
		if done() {
			break
		}
		if g.wants.Load() != 0 && g.wanted(&turn) {
			g.waiting.seq.Store(0)
			if held, over, err := g.handOver(ctx, w); over || err != nil {
				return held, err
			}
			since, turn = 0, 0
			continue
		}
		if moved {
			n, since = 0, 0
			continue
		}
		if g.w.canSpin.Load() && n < spinSteps {
			g.w.ground.Spin()
			continue
		}
		now := g.w.ground.Now()
		if since == 0 {
			since = now
			g.waiting.epoch.Store(w.op.Ver.Epoch)
			g.waiting.phase.Store(uint64(w.phase()))
			g.waiting.seq.Store(w.op.Seq)
			if err := ctx.Err(); err != nil {
				g.waiting.seq.Store(0)
				return true, err
			}
		}
		g.overdue(now, w)
		if now-since < yieldFor {
			g.w.ground.Yield()
			continue
		}
		g.wakeOn(ctx)
		if err := ctx.Err(); err != nil {
			g.waiting.seq.Store(0)
			return true, err
		}
		g.asleep.Store(true) // who comes from here on wakes us
		d := sleepAtMost
		if g.others.Load() > 0 {
			d = turnFor
		}
		g.comm.Sleep(d, func() bool { return step() || done() || ctx.Err() != nil || g.urgent() })
		g.asleep.Store(false)
	}
	if g.waiting.seq.Load() != 0 {
		g.waiting.seq.Store(0)
	}
	return true, nil
}

// wakeOn makes the end of ctx wake who drives. It stays so: most calls have the same context as the one before.
func (g *Group) wakeOn(ctx context.Context) {
	if d := ctx.Done(); d != g.ctxDone {
		g.wakeOff()
		if d != nil {
			g.ctxDone, g.ctxStop = d, context.AfterFunc(ctx, func() {
				if g.driver.Load() != 0 {
					g.comm.Wake()
				}
			})
		}
	}
}

func (g *Group) wakeOff() {
	if g.ctxStop != nil {
		g.ctxStop()
	}
	g.ctxDone, g.ctxStop = nil, nil
}

// overdue reports the head of the queue when its deadline is over, and again as long as it is.
func (g *Group) overdue(now time.Duration, w *Work) {
	if len(g.queue) == 0 {
		return
	}
	h := g.queue[0]
	if w.pair != nil {
		h = w
	}
	if h.started == 0 {
		h.started = now
	}
	if now-h.started < h.op.Deadline || now-g.blamed < askAgain {
		return
	}
	g.blamed = now
	epoch, seq, phase := h.op.Ver.Epoch, h.op.Seq, h.phase()
	// On the loop, which installs views: an operation that a view has moved on meanwhile is nobody's fault.
	g.w.agent.Do(func() {
		if missing := g.comm.Missing(epoch, seq, phase); !missing.Empty() {
			g.w.agent.Step(fault.Overdue{Group: g.id, Seq: seq, Missing: missing})
		}
	})
}

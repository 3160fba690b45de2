package pg

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
)

// p2p is the sends and receives of a group. They are local: outside of the group's order, its deadlines' blame and its
// cuts. In a Raise group a message belongs to the version in which it was sent; one of a later version than the receiver's
// waits until the receiver has resumed too.
//
// Messages have no numbers. What orders them is the link, which keeps the order of all frames from one process to another,
// and sending, which lets one message at a time go to a rank; the receiver appends each to the queue of its (rank, tag) as
// it begins, and Recv takes the first of a queue. Header.Seq, Completed and Flags are the window's (window.go): in a part
// of a message Flags is 0 and Seq says how many bytes were sent with it, which numbers nothing.
type p2p struct {
	at      atomic.Pointer[p2pPlace]
	sending []chan struct{} // by rank, one at a time: the fragments of a message follow each other

	mu    sync.Mutex
	in    map[p2pKey][]*message
	min   uint64 // what was sent in earlier versions is dropped (Raise)
	ch    chan struct{}
	flows []flow // by rank
	waits []p2pWait
	calls uint64
}

// p2pPlace is the version that sends and receives are in: the last, or the one before a loss that was not returned to
// anybody.
type p2pPlace struct {
	epoch uint64
	ver   *collectives.Version // nil if err is not: it would hold the memory of the dead
	err   error                // what comes next
}

// pass is the next version; it returns false if the place is before it for good, or until Resume.
func (p *p2pPlace) pass(g *Group, t note) bool {
	switch {
	case t.fail != "":
		p.ver, p.err = nil, &GroupFailed{g.id, t.epoch, t.fail}
	case t.loss != nil:
		p.ver, p.err = nil, t.loss
	default:
		p.epoch = t.epoch
	}
	return p.err == nil
}

// p2pWait is a call that waits for another rank, as an edge of the wait-for graph.
type p2pWait struct {
	seq  uint64 // see p2pSeq
	rank int
}

type p2pKey struct {
	rank int
	tag  uint32
}

type message struct {
	data    []byte // as far as it has come
	total   int
	inc     uint32
	version uint64
}

func (m *message) whole() bool { return len(m.data) == m.total }

func (p *p2p) init(v *collectives.Version, ranks int) {
	p.at.Store(&p2pPlace{epoch: v.Epoch, ver: v})
	p.sending, p.in, p.flows = make([]chan struct{}, ranks), map[p2pKey][]*message{}, make([]flow, ranks)
	for i := range p.sending {
		p.sending[i] = make(chan struct{}, 1)
	}
}

// wait adds a call that waits for a rank, until done.
func (p *p2p) wait(rank int, tag uint32, send bool) (seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	seq = waitSeq(p.calls, tag, send)
	p.waits = append(p.waits, p2pWait{seq, rank})
	return seq
}

func (p *p2p) done(seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waits = slices.DeleteFunc(p.waits, func(w p2pWait) bool { return w.seq == seq })
}

// waiting is the oldest of the calls that wait.
func (p *p2p) waiting() (w p2pWait, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waits) == 0 {
		return w, false
	}
	return p.waits[0], true
}

func (p *p2p) wake() {
	p.mu.Lock()
	p.wakeLocked()
	p.mu.Unlock()
}

func (p *p2p) wakeLocked() {
	if p.ch != nil {
		close(p.ch)
		p.ch = nil
	}
}

// changed is closed when a message or room may have come. The caller holds p.mu.
func (p *p2p) changed() <-chan struct{} {
	if p.ch == nil {
		p.ch = make(chan struct{})
	}
	return p.ch
}

// resume drops what was not received of versions before min, and goes on from there.
func (p *p2p) resume(min uint64, at *p2pPlace) {
	p.mu.Lock()
	p.at.Store(at)
	p.min = min
	for k, q := range p.in {
		q = slices.DeleteFunc(q, func(m *message) bool {
			if m.version >= p.min {
				return false
			}
			p.flows[k.rank].in.gone(m)
			return true
		})
		if p.in[k] = q; len(q) == 0 {
			delete(p.in, k)
		}
	}
	p.mu.Unlock()
	p.wake()
}

// take returns the next whole message of a version that has begun here, or a channel that is closed when there may be one.
// One that has not length bytes stays.
func (p *p2p) take(k p2pKey, epoch uint64, length int) (*message, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.in[k]
	if len(q) == 0 || !q[0].whole() || q[0].version > epoch {
		return nil, p.changed()
	}
	m := q[0]
	if m.total == length {
		q[0] = nil // else the array holds its bytes
		if p.in[k] = q[1:]; len(q) == 1 {
			delete(p.in, k)
		}
		p.flows[k.rank].in.gone(m)
	}
	return m, nil
}

// p2pEpoch is the version that sends and receives are in. The error is that of a group that is over, or (Raise) of a loss
// that is not resumed from.
func (g *Group) p2pEpoch() (uint64, error) {
	for {
		p := g.p2p.at.Load()
		if p.err != nil {
			return p.epoch, p.err
		}
		v := p.ver.Next()
		if v == nil {
			return p.epoch, nil
		}
		n := &p2pPlace{epoch: p.epoch, ver: v}
		n.pass(g, g.note(v))
		g.p2p.at.CompareAndSwap(p, n)
	}
}

// Send gives buf (any dtype; its bytes travel) to rank to, which takes it with Recv under the same tag. It returns when buf
// may be reused, which says nothing about its arrival. Messages to one rank under one tag arrive in the order sent.
//
// Of what rank to has not received yet, at most Window bytes are under way from this rank in the group, whatever the tags:
// a Send beyond it waits until the other has received enough. So a rank that sends more than Window before it receives
// needs a peer that receives; what that never receives keeps its room, in a Raise group until the next loss. Send waits at
// most Options.Timeout in all, for its turn (one Send to a rank at a time), for the window, and for room in the link.
//
// Errors: ctx's, or context.DeadlineExceeded after Options.Timeout: the message was not sent, and nothing happens to the
// group. *RankLost: rank to is not active, or (Raise) a loss has not been returned by an operation yet. ErrFailed,
// ErrClosed, ErrEvicted: the group or the world is over.
func (g *Group) Send(ctx context.Context, buf Buffer, to int, tag uint32) error {
	c := p2pCall{g: g, send: true, rank: to, tag: tag}
	dst, err := g.other("send to", to)
	if err != nil {
		return err
	}
	c.begin = g.w.ground.Now()
	one := g.p2p.sending[to]
	select {
	case one <- struct{}{}:
	default:
		if err := c.turn(ctx, one); err != nil {
			return during(c.String(), err)
		}
		if !g.has(dst) {
			<-one
			return g.lostRank(to, "while sending to it")
		}
	}
	defer func() { <-one }()
	defer c.end()
	return c.transmit(ctx, &dst, buf.Data)
}

// Recv takes the next message of rank from under tag into buf, which must have its length in bytes: else the message
// stays, and the error says how long it is. What a rank sent before it was lost can still be received, in a Raise group
// until the loss is returned, and before what its replacement sends. Of the processes that a rank has had at most Window
// bytes are kept: when another one sends its first message, those of the oldest are dropped, all that one process has sent
// or nothing.
//
// It waits at most Options.Timeout. Errors are those of Send; *RankLost: nothing more comes from that rank.
func (g *Group) Recv(ctx context.Context, buf Buffer, from int, tag uint32) error {
	c := p2pCall{g: g, rank: from, tag: tag}
	if _, err := g.other("receive from", from); err != nil {
		return err
	}
	c.begin = g.w.ground.Now()
	defer c.end()
	for {
		epoch, over := g.p2pEpoch()
		if g.opts.Mode == Continue {
			epoch = ^uint64(0)
		}
		m, ch := g.p2p.take(p2pKey{from, tag}, epoch, len(buf.Data))
		if m != nil {
			if m.total != len(buf.Data) {
				return during(c.String(), fmt.Errorf("it sent %d bytes, the buffer has %d", m.total, len(buf.Data)))
			}
			copy(buf.Data, m.data)
			g.credit(from)
			return nil
		}
		if over != nil {
			return over
		}
		if !g.IsActive(from) {
			return g.lostRank(from, "nothing more comes from it")
		}
		if err := c.pause(ctx, ch, g.opts.Timeout, "nothing came"); err != nil {
			return err
		}
	}
}

// p2pCall is a Send or a Recv under way.
type p2pCall struct {
	g     *Group
	send  bool
	rank  int
	tag   uint32
	begin time.Duration
	edge  uint64 // of the wait-for graph; 0: it has not waited yet
}

func (c *p2pCall) String() string {
	if c.send {
		return fmt.Sprintf("send to rank %d, tag %d", c.rank, c.tag)
	}
	return fmt.Sprintf("receive from rank %d, tag %d", c.rank, c.tag)
}

// pause waits for the channel, at most d and not beyond the call's deadline; what: how the error then begins.
func (c *p2pCall) pause(ctx context.Context, ch <-chan struct{}, d time.Duration, what string) error {
	g := c.g
	if err := g.overErr(); err != nil {
		return during(c.String(), err)
	}
	left := g.opts.Timeout - (g.w.ground.Now() - c.begin)
	if left <= 0 {
		return during(c.String(), fmt.Errorf("%s in %v: %w", what, g.opts.Timeout, context.DeadlineExceeded))
	}
	if c.edge == 0 {
		c.edge = g.p2p.wait(c.rank, c.tag, c.send)
	}
	if ch == nil {
		g.w.ground.Await(ctx, min(d, left))
	} else {
		g.w.ground.Await(ctx, min(d, left), ch)
	}
	if err := ctx.Err(); err != nil {
		return during(c.String(), err)
	}
	return nil
}

func (c *p2pCall) end() {
	if c.edge != 0 {
		c.g.p2p.done(c.edge)
	}
}

// turn waits until the sends to the rank before this one are done.
func (c *p2pCall) turn(ctx context.Context, one chan struct{}) error {
	t := time.NewTimer(c.g.opts.Timeout)
	defer t.Stop()
	select {
	case one <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.g.w.isOver:
		return c.g.w.overErr()
	case <-t.C:
		return fmt.Errorf("the sends before it are not done in %v: %w", c.g.opts.Timeout, context.DeadlineExceeded)
	}
}

// has says that the last version has this member, not another process in its place.
func (g *Group) has(m collectives.Member) bool {
	return slices.ContainsFunc(g.comm.Members(g.comm.Current()), func(x collectives.Member) bool { return x.Rank == m.Rank && x.Inc == m.Inc })
}

func (g *Group) lostRank(rank int, why string) error {
	return &RankLost{Lost: []int{rank}, Slots: []int{g.slots[rank]}, Epoch: g.comm.Current().Epoch, Why: why}
}

func (g *Group) other(what string, rank int) (m collectives.Member, err error) {
	if rank < 0 || rank >= g.Size() || rank == g.rank {
		return m, fmt.Errorf("serry: %s rank %d: this is rank %d of %d", what, rank, g.rank, g.Size())
	}
	if err := g.overErr(); err != nil {
		return m, err
	}
	if a := g.aborted.Load(); a != nil {
		if _, err := g.p2pEpoch(); err != nil {
			return m, err
		}
		return m, a
	}
	for _, m := range g.comm.Members(g.comm.Current()) {
		if m.Rank == rank {
			return m, nil
		}
	}
	return m, g.lostRank(rank, "it is not active")
}

// overErr is why nothing can be called any more in the group; nil if something can.
func (g *Group) overErr() error {
	if err := g.w.overErr(); err != nil {
		return err
	}
	if g.closed.Load() {
		return fmt.Errorf("%w: group %x", ErrClosed, g.id)
	}
	return nil
}

type heldFrame struct {
	from fault.ID
	f    device.Frame
}

// held keeps a frame of a group that we do not have yet: a peer has made it a moment earlier. There is no limit but those
// that the group's depth and Window set: the same bytes would be kept if we had the group.
func (w *World) held(from fault.ID, f *device.Frame) {
	w.mu.Lock()
	had := slices.Contains(w.gone.ids, f.Group)
	w.mu.Unlock()
	if had {
		return
	}
	c := *f
	c.Payload = append([]byte(nil), f.Payload...)
	w.early = append(w.early, heldFrame{from, c})
}

// forgotten is the groups that this process has forgotten last: a frame of one comes late, not early.
type forgotten struct {
	ids  []uint64
	next int
}

const keepForgotten = 1024

func (x *forgotten) add(id uint64) {
	if len(x.ids) < keepForgotten {
		x.ids = append(x.ids, id)
		return
	}
	x.ids[x.next] = id
	x.next = (x.next + 1) % keepForgotten
}

// replay gives a new group the frames that came before it.
func (w *World) replay(g *Group) {
	rest := w.early[:0]
	for i := range w.early {
		if w.early[i].f.Group == g.id {
			g.frame(w.early[i].from, &w.early[i].f)
		} else {
			rest = append(rest, w.early[i])
		}
	}
	clear(w.early[len(rest):])
	w.early = rest
}

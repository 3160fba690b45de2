package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/wire"
)

// p2p is the sends and receives of a group: a sequence for each (peer, tag). They are local: outside of the group's
// order, its deadlines' blame and its cuts. In a Raise group a message belongs to the version in which it was sent; one
// of a later version than the receiver's waits until the receiver has resumed too.
type p2p struct {
	at      atomic.Pointer[p2pPlace]
	sending []chan struct{} // by rank, one at a time: the fragments of a message follow each other

	mu    sync.Mutex
	in    map[p2pKey][]*message
	min   uint64 // what was sent in earlier versions is dropped (Raise)
	ch    chan struct{}
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

// p2pWait is a call that waits for another rank, as an edge of the wait-for graph. Its sequence is above all operations',
// and no other call's.
type p2pWait struct {
	seq  uint64
	rank int
}

const p2pSeq = 1 << 62

type p2pKey struct {
	rank int
	tag  uint32
}

type message struct {
	data    []byte
	total   int
	inc     uint32
	version uint64
}

func (p *p2p) init(v *collectives.Version, ranks int) {
	p.at.Store(&p2pPlace{epoch: v.Epoch, ver: v})
	p.sending, p.in = make([]chan struct{}, ranks), map[p2pKey][]*message{}
	for i := range p.sending {
		p.sending[i] = make(chan struct{}, 1)
	}
}

// waits for a rank, until done is called.
func (p *p2p) wait(rank int) (seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	seq = p2pSeq | p.calls
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
	if p.ch != nil {
		close(p.ch)
		p.ch = nil
	}
	p.mu.Unlock()
}

// resume drops what was not received of versions before min, and goes on from there.
func (p *p2p) resume(min uint64, at *p2pPlace) {
	p.mu.Lock()
	p.at.Store(at)
	p.min = min
	for k, q := range p.in {
		if q = slices.DeleteFunc(q, func(m *message) bool { return m.version < p.min }); len(q) == 0 {
			delete(p.in, k)
		} else {
			p.in[k] = q
		}
	}
	p.mu.Unlock()
	p.wake()
}

// deposit takes a frame of kind KindP2P; it runs on the loop.
func (p *p2p) deposit(rank int, f *device.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.Version < p.min || f.Total > 1<<40 {
		return
	}
	k := p2pKey{rank, f.Tag}
	q := p.in[k]
	if f.Offset == 0 {
		if n := len(q); n > 0 && len(q[n-1].data) < q[n-1].total {
			q = q[:n-1] // of a process that died, or gave up, in the middle of it
		}
		q = append(q, &message{total: int(f.Total), inc: f.Inc, version: f.Version, data: make([]byte, 0, min(int(f.Total), 4<<20))})
		p.in[k] = q
	}
	if len(q) == 0 {
		return
	}
	m := q[len(q)-1]
	if m.inc != f.Inc || int(f.Offset) != len(m.data) {
		return
	}
	m.data = append(m.data, f.Payload...)
	if len(m.data) == m.total && p.ch != nil {
		close(p.ch)
		p.ch = nil
	}
}

// take returns the next whole message of a version that has begun here, or a channel that is closed when there may be one.
// One that has not length bytes stays.
func (p *p2p) take(k p2pKey, epoch uint64, length int) (*message, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.in[k]; len(q) > 0 && len(q[0].data) == q[0].total && q[0].version <= epoch {
		if q[0].total != length {
			return q[0], nil
		}
		if p.in[k] = q[1:]; len(q) == 1 {
			delete(p.in, k)
		}
		return q[0], nil
	}
	if p.ch == nil {
		p.ch = make(chan struct{})
	}
	return nil, p.ch
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

// Send gives buf to rank to, under tag. It returns when buf may be reused, which says nothing about its arrival. It waits
// for room on the way, at most Options.Timeout.
func (g *Group) Send(ctx context.Context, buf Buffer, to int, tag uint32) error {
	what := func() string { return fmt.Sprintf("send to rank %d, tag %d", to, tag) }
	dst, err := g.other("send to", to)
	if err != nil {
		return err
	}
	begin := g.w.mesh.Now()
	one := g.p2p.sending[to]
	select {
	case one <- struct{}{}:
	default:
		if err := g.turnToSend(ctx, one); err != nil {
			return during(what(), err)
		}
	}
	defer func() { <-one }()
	epoch, err := g.p2pEpoch()
	if err != nil {
		return err
	}
	total := len(buf.Data)
	wait := uint64(0)
	defer func() {
		if wait != 0 {
			g.p2p.done(wait)
		}
	}()
	for off := 0; ; {
		var f device.Frame
		n := min(total-off, wire.MaxPayload)
		f.Kind, f.Tag, f.Group, f.Version = wire.KindP2P, tag, g.id, epoch
		f.Offset, f.Total, f.Length = uint64(off), uint64(total), uint32(n)
		f.Payload = buf.Data[off : off+n]
		err := dst.Send(&f)
		if err == nil {
			if off += n; off >= total {
				return nil
			}
			continue
		}
		if !errors.Is(err, device.ErrFull) && !errors.Is(err, device.ErrLost) {
			return during(what(), err)
		}
		// No room; or the link is lost, of which a new view will tell more.
		if wait == 0 {
			wait = g.p2p.wait(to)
		}
		if _, over := g.p2pEpoch(); over != nil {
			return over
		}
		if !g.has(dst) {
			return g.lostRank(to, "while sending to it")
		}
		if g.w.mesh.Now()-begin >= g.opts.Timeout {
			return during(what(), fmt.Errorf("not sent in %v: %w: %w", g.opts.Timeout, context.DeadlineExceeded, err))
		}
		if err := g.pause(ctx, nil, time.Millisecond); err != nil {
			return during(what(), err)
		}
	}
}

// turnToSend waits until the sends before this one are done.
func (g *Group) turnToSend(ctx context.Context, one chan struct{}) error {
	t := time.NewTimer(g.opts.Timeout)
	defer t.Stop()
	select {
	case one <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-g.w.isOver:
		return g.w.overErr()
	case <-t.C:
		return fmt.Errorf("the sends before it are not done in %v: %w", g.opts.Timeout, context.DeadlineExceeded)
	}
}

// has says that the last version has this member, not another process in its place.
func (g *Group) has(m collectives.Member) bool {
	return slices.ContainsFunc(g.comm.Members(g.comm.Current()), func(x collectives.Member) bool { return x.Rank == m.Rank && x.Inc == m.Inc })
}

func (g *Group) lostRank(rank int, why string) error {
	return &RankLost{Lost: []int{rank}, Slots: []int{g.slots[rank]}, Epoch: g.comm.Current().Epoch, Why: why}
}

// Recv takes the next message of rank from under tag into buf, which must have its length: else the message stays.
func (g *Group) Recv(ctx context.Context, buf Buffer, from int, tag uint32) error {
	what := func() string { return fmt.Sprintf("receive from rank %d, tag %d", from, tag) }
	if _, err := g.other("receive from", from); err != nil {
		return err
	}
	begin := g.w.mesh.Now()
	wait := uint64(0)
	defer func() {
		if wait != 0 {
			g.p2p.done(wait)
		}
	}()
	for {
		epoch, over := g.p2pEpoch()
		if g.opts.Mode == Continue {
			epoch = ^uint64(0)
		}
		m, ch := g.p2p.take(p2pKey{from, tag}, epoch, len(buf.Data))
		if m != nil {
			if m.total != len(buf.Data) {
				return during(what(), fmt.Errorf("it sent %d bytes, the buffer has %d", m.total, len(buf.Data)))
			}
			copy(buf.Data, m.data)
			return nil
		}
		if over != nil {
			return over
		}
		if !g.IsActive(from) {
			return g.lostRank(from, "nothing more comes from it")
		}
		left := g.opts.Timeout - (g.w.mesh.Now() - begin)
		if left <= 0 {
			return during(what(), fmt.Errorf("nothing came in %v: %w", g.opts.Timeout, context.DeadlineExceeded))
		}
		if wait == 0 {
			wait = g.p2p.wait(from)
		}
		if err := g.pause(ctx, ch, left); err != nil {
			return during(what(), err)
		}
	}
}

// pause waits for the channel, at most d.
func (g *Group) pause(ctx context.Context, ch <-chan struct{}, d time.Duration) error {
	if err := g.w.overErr(); err != nil {
		return err
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ch:
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

func (g *Group) other(what string, rank int) (m collectives.Member, err error) {
	if rank < 0 || rank >= g.Size() || rank == g.rank {
		return m, fmt.Errorf("serry: %s rank %d: this is rank %d of %d", what, rank, g.rank, g.Size())
	}
	if err := g.w.overErr(); err != nil {
		return m, err
	}
	for _, m := range g.comm.Members(g.comm.Current()) {
		if m.Rank == rank {
			return m, nil
		}
	}
	return m, g.lostRank(rank, "it is not active")
}

type heldFrame struct {
	from fault.ID
	f    device.Frame
}

// held keeps a frame of a group that we do not have yet: a peer has made it a moment earlier. There is no limit but the
// one that the group's depth sets: the same bytes would be kept if we had the group.
func (w *World) held(from fault.ID, f *device.Frame) {
	w.mu.Lock()
	_, had := w.gone[f.Group]
	w.mu.Unlock()
	if had {
		return
	}
	c := *f
	c.Payload = append([]byte(nil), f.Payload...)
	w.early = append(w.early, heldFrame{from, c})
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

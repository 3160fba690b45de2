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
	ver     atomic.Pointer[collectives.Version] // with no loss before it that was not returned to anybody
	sending []sync.Mutex                        // by rank: the fragments of a message follow each other

	mu  sync.Mutex
	in  map[p2pKey][]*message
	min uint64 // what was sent in earlier versions is dropped (Raise)
	ch  chan struct{}
}

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
	p.ver.Store(v)
	p.sending, p.in = make([]sync.Mutex, ranks), map[p2pKey][]*message{}
}

func (p *p2p) wake() {
	p.mu.Lock()
	if p.ch != nil {
		close(p.ch)
		p.ch = nil
	}
	p.mu.Unlock()
}

// resume drops what was not received of versions before v, and goes on in v.
func (p *p2p) resume(v *collectives.Version) {
	p.mu.Lock()
	p.ver.Store(v)
	p.min = v.Epoch
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
func (p *p2p) take(k p2pKey, epoch uint64) (*message, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.in[k]; len(q) > 0 && len(q[0].data) == q[0].total && q[0].version <= epoch {
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
		v := g.p2p.ver.Load()
		n := v.Next()
		switch {
		case n == nil:
			return v.Epoch, nil
		case n.Fail != "":
			return v.Epoch, &GroupFailed{g.id, n.Epoch, n.Fail}
		case len(n.Lost) > 0 && g.opts.Mode == Raise:
			return v.Epoch, g.rankLost(n)
		}
		g.p2p.ver.CompareAndSwap(v, n)
	}
}

// Send gives buf to rank to, under tag. It returns when buf may be reused, which says nothing about its arrival.
func (g *Group) Send(ctx context.Context, buf Buffer, to int, tag uint32) error {
	dst, err := g.other("send to", to)
	if err != nil {
		return err
	}
	g.p2p.sending[to].Lock()
	defer g.p2p.sending[to].Unlock()
	total := len(buf.Data)
	epoch, err := g.p2pEpoch()
	if err != nil {
		return err
	}
	for off := 0; ; {
		var f device.Frame
		n := min(total-off, wire.MaxPayload)
		f.Kind, f.Tag, f.Group, f.Version = wire.KindP2P, tag, g.id, epoch
		f.Offset, f.Total, f.Length = uint64(off), uint64(total), uint32(n)
		f.Payload = buf.Data[off : off+n]
		err := dst(&f)
		if errors.Is(err, device.ErrFull) {
			if err := g.pause(ctx, nil, time.Millisecond); err != nil {
				return fmt.Errorf("serry: send to rank %d: %w", to, err)
			}
			if _, err := g.p2pEpoch(); err != nil {
				return err
			}
			if !g.IsActive(to) {
				return &RankLost{Lost: []int{to}, Slots: []int{g.slots[to]}, Epoch: g.comm.Current().Epoch, Why: "while sending to it"}
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("serry: send to rank %d: %w", to, err)
		}
		if off += n; off >= total {
			return nil
		}
	}
}

// Recv takes the next message of rank from under tag into buf, which must have its length.
func (g *Group) Recv(ctx context.Context, buf Buffer, from int, tag uint32) error {
	if _, err := g.other("receive from", from); err != nil {
		return err
	}
	begin := g.w.mesh.Now()
	for {
		epoch, over := g.p2pEpoch()
		if g.opts.Mode == Continue {
			epoch = ^uint64(0)
		}
		m, ch := g.p2p.take(p2pKey{from, tag}, epoch)
		if m != nil {
			if m.total != len(buf.Data) {
				return fmt.Errorf("serry: receive from rank %d, tag %d: it sent %d bytes, the buffer has %d", from, tag, m.total, len(buf.Data))
			}
			copy(buf.Data, m.data)
			return nil
		}
		if over != nil {
			return over
		}
		if !g.IsActive(from) {
			return &RankLost{Lost: []int{from}, Slots: []int{g.slots[from]}, Epoch: g.comm.Current().Epoch, Why: "nothing more comes from it"}
		}
		left := g.opts.Timeout - (g.w.mesh.Now() - begin)
		if left <= 0 {
			return fmt.Errorf("serry: receive from rank %d, tag %d: nothing came in %v: %w", from, tag, g.opts.Timeout, context.DeadlineExceeded)
		}
		if err := g.pause(ctx, ch, left); err != nil {
			return fmt.Errorf("serry: receive from rank %d, tag %d: %w", from, tag, err)
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

func (g *Group) other(what string, rank int) (func(*device.Frame) error, error) {
	if rank < 0 || rank >= g.Size() || rank == g.rank {
		return nil, fmt.Errorf("serry: %s rank %d: this is rank %d of %d", what, rank, g.rank, g.Size())
	}
	if err := g.w.overErr(); err != nil {
		return nil, err
	}
	for _, m := range g.comm.Members(g.comm.Current()) {
		if m.Rank == rank {
			return m.Send, nil
		}
	}
	return nil, &RankLost{Lost: []int{rank}, Slots: []int{g.slots[rank]}, Epoch: g.comm.Current().Epoch, Why: "it is not active"}
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

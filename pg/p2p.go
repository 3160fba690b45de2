package pg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/wire"
)

// p2p is the sends and receives of a group: a sequence for each (peer, tag). They are local: outside of the group's
// order, its deadlines' blame and its cuts.
type p2p struct {
	mu    sync.Mutex
	sent  map[p2pKey]uint64
	in    map[p2pKey][]*message
	epoch uint64 // what was sent in earlier versions is dropped (Raise)
	ch    chan struct{}
}

type p2pKey struct {
	rank int
	tag  uint32
}

type message struct {
	data  []byte
	total int
	inc   uint32
}

func (p *p2p) init() { p.sent, p.in = map[p2pKey]uint64{}, map[p2pKey][]*message{} }

func (p *p2p) wake() {
	p.mu.Lock()
	if p.ch != nil {
		close(p.ch)
		p.ch = nil
	}
	p.mu.Unlock()
}

// reset drops what was not received and begins the sequences again.
func (p *p2p) reset(epoch uint64) {
	p.mu.Lock()
	clear(p.sent)
	clear(p.in)
	p.epoch = epoch
	p.mu.Unlock()
	p.wake()
}

// deposit takes a frame of kind KindP2P; it runs on the loop.
func (p *p2p) deposit(rank int, f *device.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.Version < p.epoch || f.Total > 1<<40 {
		return
	}
	k := p2pKey{rank, f.Tag}
	q := p.in[k]
	if f.Offset == 0 {
		if n := len(q); n > 0 && len(q[n-1].data) < q[n-1].total {
			q = q[:n-1] // of a process that died in the middle of it
		}
		q = append(q, &message{total: int(f.Total), inc: f.Inc, data: make([]byte, 0, min(int(f.Total), 4<<20))})
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

// Send gives buf to rank to, under tag. It returns when buf may be reused, which says nothing about its arrival.
func (g *Group) Send(ctx context.Context, buf Buffer, to int, tag uint32) error {
	dst, err := g.other("send to", to)
	if err != nil {
		return err
	}
	total := len(buf.Data)
	for off := 0; ; {
		var f device.Frame
		n := min(total-off, wire.MaxPayload)
		f.Kind, f.Tag, f.Group = wire.KindP2P, tag, g.id
		f.Version = g.comm.Current().Epoch
		f.Offset, f.Total, f.Length = uint64(off), uint64(total), uint32(n)
		f.Payload = buf.Data[off : off+n]
		err := dst(&f)
		if errors.Is(err, device.ErrFull) {
			if err := g.pause(ctx, nil, time.Millisecond); err != nil {
				return fmt.Errorf("serry: send to rank %d: %w", to, err)
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
	k := p2pKey{from, tag}
	begin := g.w.mesh.Now()
	for {
		g.p2p.mu.Lock()
		if q := g.p2p.in[k]; len(q) > 0 && len(q[0].data) == q[0].total {
			m := q[0]
			g.p2p.in[k] = q[1:]
			g.p2p.mu.Unlock()
			if m.total != len(buf.Data) {
				return fmt.Errorf("serry: receive from rank %d, tag %d: it sent %d bytes, the buffer has %d", from, tag, m.total, len(buf.Data))
			}
			copy(buf.Data, m.data)
			return nil
		}
		if g.p2p.ch == nil {
			g.p2p.ch = make(chan struct{})
		}
		ch := g.p2p.ch
		g.p2p.mu.Unlock()
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
	if v := g.comm.Current(); v.Fail != "" {
		return &GroupFailed{g.id, v.Epoch, v.Fail}
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

package pg

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// Window is how many bytes of messages a rank holds at most, of one process and group, before it receives them (see
// Group.Send), and as many of all the dead ones before that process (see Group.Recv). A message of any size may go when
// none is held. Each counts for 256 bytes more than it has.
const Window = 16 << 20

const (
	messageCost = 256
	maxMessage  = 1 << 40 // more than any memory: it does not come from this code
)

// The window between two processes. The sender counts what it has sent, and says so with each message; the receiver knows
// what it holds of that. The difference is what it has received or dropped, and the sender hears of it: at each quarter of
// the window, or at once after it has asked, which it does when it must wait. All counts run from the first message of one
// process to the other: a frame more or less changes nothing, and with another incarnation they begin anew.

// Flags of a frame of KindP2P; none of them: a part of a message, and Seq is what was sent with it.
const (
	p2pCredit = 1 // Completed: of what was sent, so much is not held any more
	p2pAsk    = 2 // Seq: what was sent; Completed: what we know of the credit; asks for more
	p2pCancel = 3 // Seq: what was sent; the rest of the last message does not come
)

// flow is what a rank keeps of another one, in both directions.
type flow struct {
	out outflow
	in  inflow
}

type outflow struct {
	inc   uint32 // of the receiver
	sent  uint64
	taken uint64 // of that, what the receiver has said that it does not hold any more
	asked uint64 // sent+taken when it was asked last: once for each
	torn  bool   // the last message was given up in the middle, and the receiver does not know
}

type inflow struct {
	inc   uint32   // of the sender
	sent  uint64   // as it said last
	held  uint64   // of that; sent-held is the credit
	dead  uint64   // held of the incarnations before
	told  uint64   // the credit that it has heard of
	asked bool     // it waits for more
	due   bool     // a link had no room to tell it
	open  *message // what has begun to come, and is not whole
	key   p2pKey   // of open
}

func cost(m *message) uint64 { return uint64(m.total) + messageCost }

// gone is a message that is held no more.
func (in *inflow) gone(m *message) {
	if m.inc == in.inc {
		in.held -= cost(m)
	} else {
		in.dead -= cost(m)
	}
	if m == in.open {
		in.open = nil
	}
}

// reserve takes room for a message, and returns what was sent with it; or a channel to wait for, and a frame that asks the
// receiver, unless it was asked before.
func (p *p2p) reserve(rank int, n uint64) (sent uint64, wait <-chan struct{}, ask *device.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := &p.flows[rank].out
	if under := out.sent - out.taken; under == 0 || under+n <= Window {
		out.sent += n
		return out.sent, nil, nil
	}
	if out.asked != out.sent+out.taken {
		ask = &device.Frame{}
		ask.Flags, ask.Seq, ask.Completed = p2pAsk, out.sent, out.taken
	}
	return 0, p.changed(), ask
}

// transmit sends a message to the end, or gives it up.
func (c *p2pCall) transmit(ctx context.Context, dst *collectives.Member, data []byte) error {
	g, p := c.g, &c.g.p2p
	out := &p.flows[c.rank].out // the counts of p.mu; inc and torn of who sends
	if out.inc != dst.Inc {
		p.mu.Lock()
		*out = outflow{inc: dst.Inc}
		p.mu.Unlock()
	}
	if out.torn {
		if err := c.put(ctx, dst, c.cancel()); err != nil {
			return err
		}
		out.torn = false
	}
	n := uint64(len(data)) + messageCost
	sent, epoch, err := c.room(ctx, dst, n)
	if err != nil {
		return err
	}
	for off := 0; ; {
		var f device.Frame
		k := min(len(data)-off, wire.MaxPayload)
		f.Tag, f.Version, f.Seq = c.tag, epoch, sent
		f.Offset, f.Total, f.Length = uint64(off), uint64(len(data)), uint32(k)
		f.Payload = data[off : off+k]
		if err := c.put(ctx, dst, &f); err != nil {
			if off == 0 {
				p.mu.Lock()
				out.sent -= n
				p.mu.Unlock()
			} else {
				out.torn = g.send(dst, c.cancel()) != nil
			}
			return err
		}
		if off += k; off >= len(data) {
			return nil
		}
	}
}

// room waits until the window has room, and returns what was sent with the message and the version that it belongs to.
func (c *p2pCall) room(ctx context.Context, dst *collectives.Member, n uint64) (sent, epoch uint64, err error) {
	g, p := c.g, &c.g.p2p
	for {
		if epoch, err = g.p2pEpoch(); err != nil {
			return 0, 0, err
		}
		sent, wait, ask := p.reserve(c.rank, n)
		if wait == nil {
			return sent, epoch, nil
		}
		if !g.has(*dst) {
			return 0, 0, g.lostRank(c.rank, "while sending to it")
		}
		if ask != nil {
			if err := c.put(ctx, dst, ask); err != nil {
				return 0, 0, err
			}
			p.mu.Lock()
			p.flows[c.rank].out.asked = ask.Seq + ask.Completed
			p.mu.Unlock()
		}
		if err := c.pause(ctx, wait, g.opts.Timeout, fmt.Sprintf("rank %d has not received what was sent before", c.rank)); err != nil {
			return 0, 0, err
		}
	}
}

func (c *p2pCall) cancel() *device.Frame {
	p := &c.g.p2p
	p.mu.Lock()
	defer p.mu.Unlock()
	var f device.Frame
	f.Flags, f.Seq = p2pCancel, p.flows[c.rank].out.sent
	return &f
}

// put sends a frame, and waits for room in the link, or for the view that says that the link is lost.
func (c *p2pCall) put(ctx context.Context, dst *collectives.Member, f *device.Frame) error {
	g := c.g
	for {
		err := g.send(dst, f)
		if err == nil {
			return nil
		}
		if !errors.Is(err, device.ErrFull) && !errors.Is(err, device.ErrLost) {
			return during(c.String(), err)
		}
		if _, over := g.p2pEpoch(); over != nil {
			return over
		}
		if !g.has(*dst) {
			return g.lostRank(c.rank, "while sending to it")
		}
		if err := c.pause(ctx, nil, time.Millisecond, fmt.Sprintf("not sent (%v)", err)); err != nil {
			return err
		}
	}
}

func (g *Group) send(dst *collectives.Member, f *device.Frame) error {
	f.Kind, f.Group = wire.KindP2P, g.id
	return dst.Send(f)
}

// p2pFrame takes a frame of KindP2P; it runs on the loop.
func (g *Group) p2pFrame(rank int, f *device.Frame) {
	g.p2p.frame(rank, f)
	g.credit(rank)
}

func (p *p2p) frame(rank int, f *device.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.Flags == p2pCredit {
		out := &p.flows[rank].out
		if f.Inc == out.inc && f.Completed > out.taken && f.Completed <= out.sent {
			out.taken = f.Completed
			p.wakeLocked()
		}
		return
	}
	in := &p.flows[rank].in
	switch {
	case f.Inc < in.inc:
		return // of one that was replaced
	case f.Inc > in.inc:
		p.drop(in)
		*in = inflow{inc: f.Inc, dead: in.dead + in.held}
		p.bury(rank)
	}
	if f.Offset == 0 {
		p.drop(in) // given up in the middle
		in.sent = f.Seq
	}
	switch f.Flags {
	case p2pAsk:
		in.asked, in.told = true, f.Completed
	case 0:
		p.part(in, p2pKey{rank, f.Tag}, f)
	}
}

// part takes a part of a message.
func (p *p2p) part(in *inflow, k p2pKey, f *device.Frame) {
	m := in.open
	if f.Offset == 0 {
		if f.Version < p.min || f.Total > maxMessage {
			return
		}
		m = &message{total: int(f.Total), inc: f.Inc, version: f.Version, data: make([]byte, 0, min(int(f.Total), Window))}
		p.in[k] = append(p.in[k], m)
		in.open, in.key = m, k
		in.held += cost(m)
	}
	if m == nil || int(f.Offset) != len(m.data) {
		return
	}
	m.data = append(m.data, f.Payload...)
	if m.whole() {
		in.open = nil
		p.wakeLocked()
	}
}

// bury drops the messages of the oldest incarnations of a rank, until those of the dead are Window at most. All of one go
// together: a receiver that misses some cannot tell that from a death that came earlier.
func (p *p2p) bury(rank int) {
	in := &p.flows[rank].in
	for in.dead > Window {
		oldest := in.inc
		for k, q := range p.in {
			if k.rank == rank {
				oldest = min(oldest, q[0].inc) // in order
			}
		}
		if oldest == in.inc {
			return
		}
		for k, q := range p.in {
			if k.rank != rank {
				continue
			}
			q = slices.DeleteFunc(q, func(m *message) bool {
				if m.inc == oldest {
					in.gone(m)
				}
				return m.inc == oldest
			})
			if p.in[k] = q; len(q) == 0 {
				delete(p.in, k)
			}
		}
	}
}

// drop forgets a message of which the rest does not come.
func (p *p2p) drop(in *inflow) {
	m := in.open
	if m == nil {
		return
	}
	k := in.key
	p.in[k] = slices.DeleteFunc(p.in[k], func(x *message) bool { return x == m })
	if len(p.in[k]) == 0 {
		delete(p.in, k)
	}
	in.gone(m)
}

// credit tells a rank what of its messages is held no more, if it is time.
func (g *Group) credit(rank int) {
	p := &g.p2p
	p.mu.Lock()
	in := &p.flows[rank].in
	taken := in.sent - in.held
	if more := taken - in.told; !in.due && (more == 0 || !in.asked && more < Window/4) {
		p.mu.Unlock()
		return
	}
	in.told, in.asked, in.due = taken, false, false
	inc := in.inc
	p.mu.Unlock()
	var f device.Frame
	f.Flags, f.Completed = p2pCredit, taken
	for _, m := range g.comm.Members(g.comm.Current()) {
		if m.Rank != rank || m.Inc != inc {
			continue
		}
		if err := g.send(&m, &f); errors.Is(err, device.ErrFull) {
			p.mu.Lock()
			in.due = in.due || in.inc == inc
			p.mu.Unlock()
			if !g.w.owes.Swap(true) {
				g.w.ground.Post()
			}
		}
	}
}

func (g *Group) creditAll() {
	for r := range g.p2p.flows {
		g.credit(r)
	}
}

// p2pSeq marks the sequence of a call that waits in Send or Recv, above those of all operations: then whether it sends (1
// bit), a count that no other waiting call has (29), and its tag (32).
const p2pSeq = 1 << 62

func waitSeq(call uint64, tag uint32, send bool) uint64 {
	seq := p2pSeq | call&(1<<29-1)<<32 | uint64(tag)
	if send {
		seq |= 1 << 61
	}
	return seq
}

var waitInP2P = regexp.MustCompile(`\bop (\d{19})\b`)

// plain says a wait in Send or Recv in words, in a reason that the machine made, which knows only sequences.
func plain(reason string) string {
	return waitInP2P.ReplaceAllStringFunc(reason, func(s string) string {
		seq, err := strconv.ParseUint(s[len("op "):], 10, 64)
		switch {
		case err != nil || seq < p2pSeq:
			return s
		case seq&(1<<61) != 0:
			return fmt.Sprintf("in a send with tag %d", uint32(seq))
		}
		return fmt.Sprintf("in a receive with tag %d", uint32(seq))
	})
}

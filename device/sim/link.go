package sim

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// Link is one end of a simulated connection. Misuse that a real link would only suffer from (a header that does not
// parse, Poll inside of Poll) panics, and a payload that is kept after fn has returned is overwritten.
type Link struct {
	net        *Network
	node, peer int
	out, in    *direction
	ended      bool  // closed, or its node has crashed
	err        error // final
	polling    bool
	frame      device.Frame // what fn gets
	ready      chan struct{}
}

var _ device.Link = (*Link)(nil)

// parcel is a frame on its way, or the end of the stream.
type parcel struct {
	header         wire.Header
	payload        []byte // from the pool
	depart, arrive time.Duration
	end            bool
}

func (p *parcel) size() int { return wire.Size + len(p.payload) }

// credit is bytes that the peer has polled, and when the sender learns of it.
type credit struct {
	at    time.Duration
	bytes int
}

// direction is one of a link's two ways. The network's mutex guards it.
type direction struct {
	from, to *Link
	back     *direction
	params   Params
	chance   *rand.Rand
	order    int

	queue   ring[parcel] // under way
	inbox   ring[parcel] // arrived, not polled
	credits ring[credit]
	bytes   int           // sent, and not known to be polled
	full    bool          // the sender was told ErrFull and waits for credit
	dead    bool          // the receiving end is no more
	blocked bool          // by a partition
	free    time.Duration // when the sender's wire is free again
	last    time.Duration // arrival of the last one under way
	seq     uint64

	due   time.Duration // of its next event
	index int           // in Network.events, or -1
}

// date says when a parcel sent now leaves and arrives.
func (d *direction) date(p *parcel, now time.Duration) {
	d.free = max(d.free, now)
	if d.params.Bandwidth > 0 && !p.end {
		d.free += time.Duration(float64(p.size()) / float64(d.params.Bandwidth) * float64(time.Second))
	}
	p.depart = d.free
	p.arrive = p.depart + d.params.Latency + d.draw(d.params.Jitter)
	if d.params.Loss > 0 {
		for again := d.params.Retransmit; d.chance.Float64() < d.params.Loss; again *= 2 {
			p.arrive += again
		}
	}
	p.arrive = max(p.arrive, d.last)
	d.last = p.arrive
}

func (d *direction) draw(limit time.Duration) time.Duration {
	if limit <= 0 {
		return 0
	}
	return time.Duration(d.chance.Int64N(int64(limit) + 1))
}

// replay dates everything under way again, after a reconnect.
func (d *direction) replay(now time.Duration) {
	d.free = now + d.params.Reconnect + d.draw(d.params.Jitter)
	d.last = d.free
	for i := range d.queue.len() {
		d.date(d.queue.at(i), now)
	}
}

// truncate loses all that is under way but the first keep.
func (d *direction) truncate(keep int) {
	for d.queue.len() > keep {
		d.drop(d.queue.popBack())
	}
}

func (d *direction) drop(p parcel) {
	if p.end {
		return
	}
	d.bytes -= p.size()
	d.from.net.recycle(p.payload)
}

// next is when something happens in this direction.
func (d *direction) next() (due time.Duration, ok bool) {
	if !d.blocked && d.queue.len() > 0 {
		due, ok = d.queue.at(0).arrive, true
	}
	if d.full && !d.back.blocked && d.credits.len() > 0 {
		if at := d.credits.at(0).at; !ok || at < due {
			due, ok = at, true
		}
	}
	return due, ok
}

func (d *direction) deliver(now time.Duration) {
	for !d.blocked && d.queue.len() > 0 && d.queue.at(0).arrive <= now {
		d.inbox.push(d.queue.pop())
		d.to.signal()
	}
	d.reap(now)
}

// reap takes the credits that have come.
func (d *direction) reap(now time.Duration) {
	for !d.back.blocked && d.credits.len() > 0 && d.credits.at(0).at <= now {
		d.bytes -= d.credits.pop().bytes
		if d.full {
			d.full = false
			d.from.signal()
		}
	}
}

// polled tells the sender, as far away as it is, that so many bytes have been polled.
func (d *direction) polled(bytes int) {
	n := d.from.net
	c := credit{at: n.now + d.back.params.Latency, bytes: bytes}
	if k := d.credits.len(); k > 0 {
		last := d.credits.at(k - 1)
		if c.at <= last.at {
			last.bytes += bytes
			return
		}
	}
	d.credits.push(c)
	if d.full {
		n.schedule(d)
	}
}

// Send queues one frame.
func (l *Link) Send(f *device.Frame) error {
	n := l.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if int(f.Length) != len(f.Payload) {
		panic(fmt.Sprintf("sim: %v: header of a frame says %d bytes, its payload has %d", l, f.Length, len(f.Payload)))
	}
	n.tick()
	d := l.out
	d.reap(n.now)
	if d.bytes >= d.params.Backlog && f.Kind >= wire.KindData {
		d.full = true
		n.schedule(d)
		return device.ErrFull
	}
	// What is not on the wire does not arrive, and what a peer would refuse must not be sent.
	var p parcel
	f.Put(n.scratch[:], nil, false)
	if err := p.header.Parse(n.scratch[:]); err != nil {
		panic(fmt.Sprintf("sim: %v: %v", l, err))
	}
	if d.dead {
		return nil
	}
	d.seq++
	p.header.LinkSeq, p.header.LinkAck = d.seq, 0
	p.payload = n.buffer(len(f.Payload))
	copy(p.payload, f.Payload)
	d.bytes += p.size()
	d.date(&p, n.now)
	d.queue.push(p)
	if d.queue.len() == 1 {
		n.schedule(d)
	}
	return nil
}

// Poll hands over what Advance has delivered.
func (l *Link) Poll(fn func(*device.Frame)) (int, error) {
	n := l.net
	n.mu.Lock()
	if l.polling {
		n.mu.Unlock()
		panic(fmt.Sprintf("sim: %v: Poll inside of Poll", l))
	}
	if l.err != nil {
		n.mu.Unlock()
		return 0, l.err
	}
	n.tick()
	d := l.in
	count, bytes := 0, 0
	l.polling = true
	for d.inbox.len() > 0 && l.err == nil {
		p := d.inbox.pop()
		if p.end {
			l.err = fmt.Errorf("sim: node %d, seen by node %d: %w", l.peer, l.node, device.ErrLost)
			break
		}
		l.frame = device.Frame{Header: p.header, Payload: p.payload}
		n.mu.Unlock()
		fn(&l.frame)
		n.mu.Lock()
		l.frame = device.Frame{}
		count++
		bytes += p.size()
		n.recycle(p.payload)
	}
	l.polling = false
	if bytes > 0 && !d.dead {
		d.polled(bytes)
	}
	err := l.err
	n.mu.Unlock()
	return count, err
}

// Fd is -1: there is nothing to wait on but Ready.
func (l *Link) Fd() (int, bool) { return -1, false }

// Ready gets a value when there may be something to Poll, or to Send again after ErrFull.
func (l *Link) Ready() <-chan struct{} { return l.ready }

func (l *Link) signal() {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// Caps says what the link can do: nothing but frames.
func (l *Link) Caps() device.Caps { return device.Caps{Name: "sim"} }

func (l *Link) String() string { return fmt.Sprintf("link of node %d to node %d", l.node, l.peer) }

// Close ends it. What has left for the peer still arrives, before the peer sees the loss; what waits for bandwidth does
// not.
func (l *Link) Close() error {
	n := l.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.polling {
		panic(fmt.Sprintf("sim: %v: Close inside of Poll", l))
	}
	if l.ended {
		return nil
	}
	n.tick()
	keep := 0
	for keep < l.out.queue.len() && l.out.queue.at(keep).depart <= n.now {
		keep++
	}
	l.out.truncate(keep)
	l.end(fmt.Sprintf("sim: node %d, closed by node %d", l.peer, l.node))
	return nil
}

// end makes this end the past: the peer learns it after what is under way.
func (l *Link) end(why string) {
	n := l.net
	l.ended = true
	l.err = fmt.Errorf("%s: %w", why, device.ErrClosed)
	l.signal()
	l.in.truncate(0)
	for l.in.inbox.len() > 0 {
		l.in.drop(l.in.inbox.pop())
	}
	l.in.dead, l.in.full, l.in.bytes = true, false, 0
	l.in.credits = ring[credit]{}
	l.in.from.signal()
	n.schedule(l.in)
	peer := l.out.to
	if !peer.ended {
		if k := l.out.queue.len(); k > 0 {
			l.out.last = max(n.now, l.out.queue.at(k-1).arrive)
		} else {
			l.out.last = n.now
		}
		l.out.free = n.now
		end := parcel{end: true}
		l.out.date(&end, n.now)
		l.out.queue.push(end)
		n.schedule(l.out)
		return
	}
	l.out.full = false
	n.schedule(l.out)
	kept := n.links[:0]
	for _, x := range n.links {
		if x != l && x != peer {
			kept = append(kept, x)
		}
	}
	clear(n.links[len(kept):])
	n.links = kept
}

// buffer takes a payload buffer of size bytes from the pool.
func (n *Network) buffer(size int) []byte {
	if size == 0 {
		return nil
	}
	class := bits.Len(uint(size - 1))
	free := &n.pool[class]
	if k := len(*free); k > 0 {
		b := (*free)[k-1]
		*free = (*free)[:k-1]
		return b[:size]
	}
	return make([]byte, size, 1<<class)
}

// recycle takes a payload buffer back and spoils it for who kept it.
func (n *Network) recycle(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = 0xDB
	for done := 1; done < len(b); done *= 2 {
		copy(b[done:], b[:done])
	}
	class := bits.Len(uint(len(b) - 1))
	n.pool[class] = append(n.pool[class], b)
}

// Package stream is the part that the links over a byte stream share: a link that outlives its connection. Frames are
// numbered, kept until the peer has acknowledged them, and sent again over the next connection; what comes twice is
// dropped. Packages tcp and shm say which socket, and what else the two processes share.
package stream

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
)

// Options of a Link.
type Options struct {
	Caps    device.Caps
	Peer    string // whom errors name
	Sum     bool   // CRC32C over every frame, and none without it accepted
	Backlog int    // bytes that may wait for the connection (default 8 MiB); twice that may wait for acknowledgement
	Wake    func() // called, without a lock, when Send left bytes for Poll to write; nil: nobody asks
	Buffer  []byte // for receiving; it holds two of the largest frames that come (default: made when it is needed)
}

const (
	defaultBacklog = 8 << 20
	ackEvery       = 256 << 10 // received bytes after which an acknowledgement of its own is sent
	pollBudget     = 2 << 20   // received bytes after which Poll returns to its caller
	rawLimit       = 64 << 10  // a kernel call that copies more tells the scheduler
)

// Link implements device.Link. It starts without a connection; Attach gives it one.
type Link struct {
	o Options

	wmu     sync.Mutex // what goes out
	q       queue
	broken  bool // the current connection takes no more
	down    error
	final   error
	attachN int

	rmu  sync.Mutex // the frame that is being accepted, against Reset
	gen  uint64     // of the connection
	recv uint64     // last sequence delivered; written under rmu

	conn    atomic.Pointer[fd]
	pending atomic.Bool // bytes wait for Poll to write
	dead    atomic.Bool // final is set
	ackNow  atomic.Uint64
	in, out atomic.Int64

	rd      reader // Poll's own, as is what follows
	rdGen   uint64
	frame   device.Frame
	unacked int
}

// New returns a link without a connection.
func New(o Options) *Link {
	if o.Backlog <= 0 {
		o.Backlog = defaultBacklog
	}
	l := &Link{o: o, down: errors.New("not connected yet")}
	l.rd.sum, l.rd.buf, l.rd.size = o.Sum, o.Buffer, len(o.Buffer)
	if l.rd.size == 0 {
		l.rd.buf, l.rd.size = nil, bufSize
	}
	return l
}

// ErrStale says that a connection was overtaken by another one before it was attached. Nothing is lost by it.
var ErrStale = errors.New("another connection was set up meanwhile")

// Attach makes sock, a connected stream socket that the link owns from here on, the connection. gen is what Reset said
// before the peers told each other what they have; peerHas is the last sequence that the peer has received. Any error
// but ErrStale means that the exchange can not be continued, and is final.
func (l *Link) Attach(sock int, peerHas, gen uint64) error {
	_ = unix.SetNonblock(sock, true)
	return l.attach(&fd{n: sock}, peerHas, gen)
}

// AttachPipe is Attach for a connection that is no socket. Fd is of no use then.
func (l *Link) AttachPipe(p Pipe, peerHas, gen uint64) error {
	return l.attach(&fd{n: -1, pipe: p}, peerHas, gen)
}

func (l *Link) attach(c *fd, peerHas, gen uint64) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.final != nil {
		c.free()
		return l.final
	}
	l.rmu.Lock()
	defer l.rmu.Unlock()
	if gen != l.gen || l.conn.Load() != nil {
		c.free()
		return ErrStale
	}
	if !l.q.rewind(peerHas) {
		c.free()
		l.fail(fmt.Errorf("%w: %s has frames up to %d, but %d to %d are what can be sent", device.ErrLost, l.o.Peer, peerHas, l.q.acked+1, l.q.seq))
		return l.final
	}
	l.attachN++
	l.broken, l.down = false, nil
	l.conn.Store(c)
	l.flush()
	return nil
}

// Reset gives the connection up and returns the last sequence received, which stays true until an Attach with the same
// generation.
func (l *Link) Reset() (recv, gen uint64) {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	l.cut(errors.New("given up for a new connection"))
	l.rmu.Lock()
	defer l.rmu.Unlock()
	l.gen++
	return l.recv, l.gen
}

// cut drops the connection; wmu is held.
func (l *Link) cut(why error) {
	if c := l.conn.Swap(nil); c != nil {
		c.close()
		l.down = why
	}
}

// Down says why there is no connection; nil: there is one.
func (l *Link) Down() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.conn.Load() != nil {
		return nil
	}
	return l.down
}

// Err is the final error of the link, nil while it can go on.
func (l *Link) Err() error { return l.finalError() }

// Fail ends the link for good: err wraps device.ErrLost or device.ErrClosed.
func (l *Link) Fail(err error) {
	l.wmu.Lock()
	l.fail(err)
	l.wmu.Unlock()
}

func (l *Link) fail(err error) {
	if l.final == nil {
		l.final = err
		l.dead.Store(true)
	}
	l.cut(err)
	l.q.drop()
	l.pending.Store(false)
}

// Send implements device.Link.
func (l *Link) Send(f *device.Frame) error { return l.SendHeader(f.Header, f.Payload) }

// SendHeader is Send for a header that is the caller's own copy.
func (l *Link) SendHeader(h wire.Header, payload []byte) error {
	if len(payload) > wire.MaxPayload || int(h.Length) != len(payload) {
		return fmt.Errorf("stream: payload of %d bytes, header says %d, at most %d are allowed", len(payload), h.Length, wire.MaxPayload)
	}
	l.wmu.Lock()
	if l.final != nil {
		err := l.final
		l.wmu.Unlock()
		return err
	}
	if h.Kind >= wire.KindData && (l.q.unsent >= l.o.Backlog || l.q.retained >= 2*l.o.Backlog) {
		l.wmu.Unlock()
		return device.ErrFull
	}
	waiting := l.q.unsent > 0
	l.put(h, payload)
	if !waiting {
		l.flush()
	}
	wake := l.q.unsent > 0 && l.o.Wake != nil && l.conn.Load() != nil
	l.wmu.Unlock()
	if wake {
		l.o.Wake()
	}
	return nil
}

func (l *Link) put(h wire.Header, payload []byte) {
	h.LinkAck = l.ackNow.Load()
	l.q.add(&h, payload, l.o.Sum)
}

// Beat sends a frame of the link's own if nothing waits: a heartbeat, or an acknowledgement.
func (l *Link) Beat(kind wire.Kind, seq uint64) {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.final == nil && l.conn.Load() != nil && l.q.unsent == 0 {
		l.put(wire.Header{Kind: kind, Seq: seq}, nil)
		l.flush()
	}
}

// flush writes what the kernel takes; wmu is held.
func (l *Link) flush() {
	c := l.conn.Load()
	if c == nil || l.broken {
		l.pending.Store(false)
		return
	}
	if _, ok := c.use(); !ok {
		return
	}
	for {
		b := l.q.head()
		if b == nil {
			break
		}
		if faultpoint.Enabled && !l.o.Caps.SharesMemory && len(b) > wire.Size {
			if k, err := c.send(b[:len(b)/2]); err == nil {
				l.q.wrote(k)
				l.out.Add(int64(k))
				faultpoint.Hit(faultpoint.TCPFrameMid)
				b = l.q.head()
			}
		}
		k, err := c.send(b)
		if err != nil {
			if err != unix.EAGAIN && err != unix.ENOBUFS {
				// The receiving side finds out, after it has read what still came.
				l.broken = true
				c.closeWrite()
			}
			break
		}
		l.q.wrote(k)
		l.out.Add(int64(k))
	}
	c.done()
	l.pending.Store(l.q.unsent > 0 && !l.broken)
}

// Pending says whether bytes wait for the kernel to take them.
func (l *Link) Pending() bool { return l.pending.Load() }

// Fd implements device.Link; any goroutine may call it.
func (l *Link) Fd() (int, bool) {
	c := l.conn.Load()
	if c == nil {
		return -1, false
	}
	return c.n, l.pending.Load()
}

// WithFd calls fn with the descriptor, which stays open meanwhile; false: there is none.
func (l *Link) WithFd(fn func(fd int)) bool {
	c := l.conn.Load()
	if c == nil {
		return false
	}
	n, ok := c.use()
	if ok {
		fn(n)
		c.done()
	}
	return ok
}

// Poll implements device.Link. A lost connection is no error: Down tells.
func (l *Link) Poll(fn func(*device.Frame)) (int, error) {
	if l.pending.Load() {
		l.wmu.Lock()
		l.flush()
		l.wmu.Unlock()
	}
	l.rmu.Lock()
	gen, c := l.gen, l.conn.Load()
	l.rmu.Unlock()
	if c == nil {
		return 0, l.finalError()
	}
	if _, ok := c.use(); !ok {
		return 0, l.finalError()
	}
	if gen != l.rdGen {
		l.rd.reset()
		l.rdGen, l.unacked = gen, 0
	}
	got, total, why := 0, 0, error(nil)
	var ack uint64
	for total < pollBudget && why == nil {
		b := l.rd.room()
		if total < rawLimit && len(b) > rawLimit {
			b = b[:rawLimit]
		}
		k, err := c.recv(b)
		if err != nil {
			if err != unix.EAGAIN {
				why = fmt.Errorf("receive: %w", err)
			}
			break
		}
		if k == 0 {
			why = io.EOF
			break
		}
		l.rd.fed(k)
		total += k
		l.in.Add(int64(k))
		for {
			f := &l.frame
			ok, err := l.rd.next(f)
			if err != nil {
				why = err
				break
			}
			if !ok {
				break
			}
			fresh, err := l.accept(f, gen)
			if err != nil {
				why = err
				break
			}
			ack = max(ack, f.LinkAck)
			if fresh && f.Kind != wire.KindAck {
				got++
				fn(f)
			}
		}
		if k < len(b) {
			break // all there was, or the end, which the next call sees
		}
	}
	c.done()
	l.unacked += total
	if ack > 0 || why != nil {
		l.wmu.Lock()
		if l.final == nil && l.conn.Load() == c { // else somebody has replaced the connection meanwhile
			if !l.q.ack(ack) && why == nil {
				why = fmt.Errorf("frame %d is acknowledged, %d is the last that was written", ack, l.q.written())
			}
			if why != nil {
				l.cut(why)
			}
		}
		l.wmu.Unlock()
	}
	if l.unacked >= ackEvery && why == nil {
		l.unacked = 0
		l.Beat(wire.KindAck, 0)
	}
	return got, l.finalError()
}

// accept decides about one frame: it is new, it came twice, or the stream is broken.
func (l *Link) accept(f *device.Frame, gen uint64) (bool, error) {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	switch {
	case gen != l.gen:
		return false, errors.New("given up")
	case f.LinkSeq == 0 || f.LinkSeq > l.recv+1:
		return false, fmt.Errorf("frame %d follows frame %d", f.LinkSeq, l.recv)
	case f.LinkSeq <= l.recv:
		return false, nil
	}
	l.recv++
	l.ackNow.Store(l.recv)
	return true, nil
}

func (l *Link) finalError() error {
	if !l.dead.Load() {
		return nil
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.final
}

// Caps implements device.Link.
func (l *Link) Caps() device.Caps { return l.o.Caps }

// Close implements device.Link.
func (l *Link) Close() error {
	l.Fail(fmt.Errorf("%w: to %s", device.ErrClosed, l.o.Peer))
	return nil
}

// Bytes is what was received and sent over all connections, headers included.
func (l *Link) Bytes() (in, out int64) { return l.in.Load(), l.out.Load() }

// Attached says how many connections there have been.
func (l *Link) Attached() int {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.attachN
}

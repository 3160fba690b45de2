package sim

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/stream"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/pg"
)

// peer is another process as one sees it: the end of a link.
type peer struct {
	p, to  *proc
	link   *stream.Link
	conn   *conn
	side   int  // of the connection
	gone   bool // forgotten here
	dead   bool // Died was said
	silent bool
	dirty  bool          // the loop has to poll it
	since  time.Duration // nothing can come from it since then; -1: something can
	watch  uint64        // of the last watch: earlier ones are void
}

var _ pg.Peer = (*peer)(nil)

func (x *peer) Nonce() mesh.Nonce { return x.to.nonce }
func (x *peer) Name() string      { return x.to.String() }
func (x *peer) Dead() bool        { return x.dead }
func (x *peer) Silent() bool      { return x.silent }
func (x *peer) Forget() {
	if x.gone = true; x.link != nil {
		x.link.Fail(fmt.Errorf("%w: %v was dropped from the group", device.ErrClosed, x.to))
	}
}

// Arena is the other's memory, if processes of one host share it.
func (x *peer) Arena() []byte {
	if x.p.w.onlyTCP || x.to.host != x.p.host {
		return nil
	}
	return x.to.arena
}

// Board is readable on the same host, whatever carries the data.
func (x *peer) Board() []byte {
	if x.to.host != x.p.host {
		return nil
	}
	return x.to.board
}

// Send implements pg.Peer.
func (x *peer) Send(f *device.Frame) error {
	if x.p.dead {
		return device.ErrClosed
	}
	x.p.w.sending(x, f)
	if x.p.dead {
		return device.ErrClosed
	}
	return x.link.SendHeader(f.Header, f.Payload)
}

// conn is a connection: two directions of bytes.
type conn struct {
	w    *World
	ends [2]*peer
	dirs [2]direction // by the side that sends
	over bool
}

type direction struct {
	fly    []segment // under way
	buf    []byte    // arrived
	bytes  int       // of both
	last   time.Duration
	eof    bool // nothing more will come
	full   bool // its sender waits for room
	held   bool // something has arrived at a cut
	closed bool
}

type segment struct {
	b  []byte
	at time.Duration
}

// pipe is one side of a connection, as a link uses it.
type pipe struct {
	c    *conn
	side int
}

// Send implements stream.Pipe.
func (q pipe) Send(b []byte) (int, error) {
	c, d := q.c, &q.c.dirs[q.side]
	if c.over || d.closed || c.ends[q.side].p.dead {
		return 0, unix.ECONNRESET
	}
	w := c.w
	room := w.pipeBytes - d.bytes
	if room <= 0 {
		d.full = true
		return 0, unix.EAGAIN
	}
	n := min(len(b), room)
	from, to := c.ends[q.side].p, c.ends[1-q.side].p
	s := segment{append([]byte(nil), b[:n]...), w.now + w.latency(from, to)}
	if w.corrupt > 0 && from.host != to.host {
		w.corrupt--
		s.b[w.rnd.IntN(n)] ^= 1 << w.rnd.IntN(8)
	}
	s.at = max(s.at, d.last)
	d.last = s.at
	d.bytes += n
	d.fly = append(d.fly, s)
	w.after(s.at-w.now, func() { c.arrive(q.side) })
	return n, nil
}

// arrive delivers what is due, unless the way is cut.
func (c *conn) arrive(side int) {
	w, d := c.w, &c.dirs[side]
	from, to := c.ends[side].p, c.ends[1-side].p
	if c.over {
		return
	}
	if w.isCut(from.host, to.host) {
		d.held = true
		return
	}
	got := false
	for len(d.fly) > 0 && d.fly[0].at <= w.now {
		d.buf = append(d.buf, d.fly[0].b...)
		d.fly = d.fly[1:]
		got = true
	}
	if got || d.eof {
		c.ends[1-side].touch()
	}
}

// touch makes the loop look after a link.
func (x *peer) touch() {
	if !x.dirty {
		x.dirty = true
		x.p.dirty = append(x.p.dirty, x)
	}
	x.p.kick()
}

// Recv implements stream.Pipe.
func (q pipe) Recv(b []byte) (int, error) {
	d := &q.c.dirs[1-q.side]
	n := copy(b, d.buf)
	d.buf = d.buf[n:]
	d.bytes -= n
	switch {
	case n > 0:
		if d.full && d.bytes < q.c.w.pipeBytes {
			d.full = false
			q.c.ends[1-q.side].touch()
		}
		return n, nil
	case d.eof && len(d.fly) == 0 || q.c.over:
		return 0, nil
	}
	return 0, unix.EAGAIN
}

// CloseWrite and Close implement stream.Pipe.
func (q pipe) CloseWrite() {
	d := &q.c.dirs[q.side]
	d.closed, d.eof = true, true
	q.c.w.after(0, func() { q.c.arrive(q.side) })
}

func (q pipe) Close() {
	q.CloseWrite()
	q.c.w.after(q.c.w.between(0, time.Millisecond), func() { q.c.reset() })
}

// reset breaks a connection: what is under way is lost, of what has arrived nothing. Both sides find out.
func (c *conn) reset() {
	if c.over {
		return
	}
	c.over = true
	for side := range c.dirs {
		c.dirs[side].fly, c.dirs[side].eof = nil, true
		c.ends[side].touch()
	}
	c.w.reconnect(c.ends[0], c.ends[1])
}

// connect gives two links a connection, as a handshake does: each says what it has received.
func (w *World) connect(a, b *peer) {
	c := &conn{w: w, ends: [2]*peer{a, b}}
	hasA, genA := a.link.Reset()
	hasB, genB := b.link.Reset()
	a.conn, b.conn, a.side, b.side = c, c, 0, 1
	_ = a.link.AttachPipe(pipe{c, 0}, hasB, genA)
	_ = b.link.AttachPipe(pipe{c, 1}, hasA, genB)
	a.touch()
	b.touch()
}

// open says that two processes can shake hands now.
func (w *World) open(p, q *proc) bool {
	return !p.dead && !q.dead && !p.stopped && !q.stopped && !w.isCut(p.host, q.host) && !w.isCut(q.host, p.host)
}

// reconnect makes a new connection in the place of a broken one as soon as that is possible.
func (w *World) reconnect(a, b *peer) {
	w.after(w.between(200*time.Microsecond, 12*time.Millisecond), func() {
		switch {
		case a.p.dead || b.p.dead:
			return
		case a.gone && b.gone:
			return
		case !w.open(a.p, b.p):
			w.reconnect(a, b)
			return
		case a.gone:
			b.refused(a)
			return
		case b.gone:
			a.refused(b)
			return
		case a.link.Err() != nil || b.link.Err() != nil:
			return
		}
		w.count(Replay)
		w.connect(a, b)
	})
}

// refused: the other lives and has forgotten this process.
func (x *peer) refused(by *peer) {
	x.p.do(func() { x.p.seat.Agent.Refused(x, fmt.Errorf("%v has forgotten this process", by.p)) })
}

// meet links two processes that are not linked yet.
func (w *World) meet(p, q *proc) {
	a, b := w.newPeer(p, q), w.newPeer(q, p)
	p.peers[q.pid], q.peers[p.pid] = a, b
	p.linked, q.linked = append(p.linked, a), append(q.linked, b)
	w.connect(a, b)
	p.do(func() { p.seat.Agent.Linked(a) })
	q.do(func() { q.seat.Agent.Linked(b) })
}

func (w *World) newPeer(p, q *proc) *peer {
	x := &peer{p: p, to: q, since: -1}
	x.link = stream.New(stream.Options{
		Caps: device.Caps{Name: "sim", SharesMemory: p.host == q.host}, Peer: "peer", Sum: p.host != q.host, Backlog: 1 << 20,
		Buffer: w.lend(take(&w.pool.frames, w.frameBytes), 0), Wake: func() { x.touch() },
	})
	return x
}

// mute says that nothing of p reaches q now.
func (w *World) mute(p, q *proc) bool { return p.dead || p.stopped || w.isCut(p.host, q.host) }

// watchAll looks again at who can be heard, after something has changed.
func (w *World) watchAll() {
	w.minorities()
	for _, q := range w.procs {
		if q.dead {
			continue
		}
		for _, x := range q.linked {
			if x.to.host != q.host && !x.gone && !x.dead {
				w.watchOne(x)
			}
		}
	}
}

func (w *World) watchOne(x *peer) {
	switch mute := w.mute(x.to, x.p); {
	case mute && x.since < 0:
		x.since = w.now
		x.arm()
	case !mute && x.since >= 0:
		x.since = -1
		x.watch++
		if x.silent {
			n := x.watch
			w.after(w.between(time.Millisecond, 20*time.Millisecond), func() {
				x.p.do(func() {
					if x.watch == n && x.silent && !x.gone {
						x.silent = false
						x.p.seat.Agent.Heard(x)
					}
				})
			})
		}
	}
}

// arm waits for the heartbeat limit. Time in which the observer itself did not run counts for nobody.
func (x *peer) arm() {
	w := x.p.w
	x.watch++
	n := x.watch
	w.after(heartbeatLimit+w.between(0, heartbeatLimit/10), func() {
		if x.watch != n || x.p.dead || x.gone || x.silent || x.dead {
			return
		}
		if x.p.stopped || w.now-x.p.ran < heartbeatLimit {
			x.arm()
			return
		}
		x.p.do(func() {
			if x.watch == n && !x.silent && !x.gone && !x.dead {
				x.silent = true
				x.p.seat.Agent.Silent(x)
			}
		})
	})
}

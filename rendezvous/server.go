package rendezvous

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	helloTime    = 10 * time.Second // for a client to say what it is
	writeTime    = 30 * time.Second // for a client to take an answer
	waitsPerConn = 4096             // gets and waits of one connection that may be open at once
	turnsKept    = 1024             // clients without a connection whose last answer is kept
	torchSpace   = "/"              // torch's clients put this before each key, so ours do too
)

// Server is a store in memory that other processes reach. One port answers our clients and those of torch's TCPStore
// (torch 2.13), and both see the same keys. Nothing is kept on disk: when the server ends, so does the store. There is
// no password, and torch's protocol knows none: listen where only the group's hosts reach.
type Server struct {
	listener net.Listener
	table    *table
	id       identity
	log      *slog.Logger
	tasks    sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	conns   map[net.Conn]struct{}
	turns   map[identity]*turn
	without []identity // of turns, those whose client has no connection, oldest first; some have one again
}

// turn is the last add or cas of a client, kept so that it can be asked again over a new connection.
type turn struct {
	mu     sync.Mutex
	number uint64
	answer frame
	conns  int // guarded by Server.mu
}

// Listen starts a server on addr, "host:port"; port 0 takes a free one. Clients that misbehave are logged; a nil log
// drops that.
func Listen(ctx context.Context, addr string, log *slog.Logger) (*Server, error) {
	fail := func(err error, hint string) error {
		return &Error{Store: "tcp://" + addr, Op: "listen", Err: err, Hint: hint}
	}
	if err := checkAddr(addr, 0); err != nil {
		return nil, fail(fmt.Errorf("%w: %w", ErrBadURL, err), "write host:port")
	}
	host, port, _ := net.SplitHostPort(addr)
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	switch {
	case isInUse(err):
		return nil, fail(fmt.Errorf("port %s of %s is in use: %w", port, host, err),
			"another program, maybe a launcher from before, listens there: end it, choose another port, or port 0 for a free one")
	case err != nil:
		return nil, fail(err, "the address must be one of this host")
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		listener: l, table: newTable(), log: log,
		conns: map[net.Conn]struct{}{}, turns: map[identity]*turn{},
	}
	_, _ = rand.Read(s.id[:]) // never fails
	s.tasks.Go(s.accept)
	return s, nil
}

// Addr is the address that the server listens on, "host:port".
func (s *Server) Addr() string { return s.listener.Addr().String() }

// URL is what [Open] takes to reach the server.
func (s *Server) URL() string { return "tcp://" + s.Addr() }

// Store returns a handle for the process of the server, which needs no connection.
func (s *Server) Store() Store { return newLocal(s.URL(), s.table, torchSpace) }

// Close ends the server and its connections, and returns when they have ended.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	err := s.listener.Close()
	s.tasks.Wait()
	return err
}

func (s *Server) accept() {
	pause := time.Millisecond
	for {
		c, err := s.listener.Accept()
		if err != nil {
			s.mu.Lock()
			closed := s.closed
			s.mu.Unlock()
			if closed || errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.Warn("rendezvous: cannot accept a connection", "addr", s.Addr(), "err", err)
			time.Sleep(pause) // out of descriptors, say: some will be closed
			pause = min(2*pause, time.Second)
			continue
		}
		pause = time.Millisecond
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = c.Close()
			return
		}
		s.conns[c] = struct{}{}
		s.tasks.Go(func() { s.serve(c) })
		s.mu.Unlock()
	}
}

// serve answers one client until it leaves.
func (s *Server) serve(nc net.Conn) {
	c := &serverConn{server: s, conn: nc, in: bufio.NewReaderSize(nc, 16<<10), pending: map[uint32]func(){}}
	c.gone = make(chan struct{})
	err := c.serve()
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if err != nil && !closed && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		s.log.Warn("rendezvous: closed a connection", "peer", nc.RemoteAddr(), "err", err)
	}
	close(c.gone)
	_ = nc.Close()
	c.tasks.Wait()
	s.mu.Lock()
	delete(s.conns, nc)
	s.mu.Unlock()
}

// serverConn is the server's end of a connection in either protocol.
type serverConn struct {
	server *Server
	conn   net.Conn
	in     *bufio.Reader
	gone   chan struct{} // closed when the connection is over
	tasks  sync.WaitGroup

	out sync.Mutex // held to write; before mu

	mu       sync.Mutex
	pending  map[uint32]func() // gets and waits that are open, and how to end one
	lastWait uint32            // torch: the name of the latest in pending
}

func (c *serverConn) serve() error {
	if err := c.conn.SetReadDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	first, err := c.in.Peek(1)
	if err != nil {
		return err
	}
	switch first[0] {
	case wireMagic[0]:
		return c.serveOurs()
	case torchValidate:
		return c.serveTorch()
	}
	_, _ = c.in.Peek(16)
	b, _ := c.in.Peek(c.in.Buffered())
	return fmt.Errorf("it began with %q, which is neither our protocol nor torch's", b[:min(len(b), 16)])
}

func (c *serverConn) write(b []byte) error {
	c.out.Lock()
	defer c.out.Unlock()
	return c.writeLocked(b)
}

func (c *serverConn) writeLocked(b []byte) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return err
	}
	_, err := c.conn.Write(b)
	return err
}

// answer sends one; a failure shows at the next read, since the connection is closed.
func (c *serverConn) answer(b []byte) {
	if err := c.write(b); err != nil {
		_ = c.conn.Close()
	}
}

func (c *serverConn) serveOurs() error {
	var b [helloLen]byte
	if _, err := io.ReadFull(c.in, b[:]); err != nil {
		return unexpected(err)
	}
	h, err := parseHello(b[:])
	if err != nil {
		return err
	}
	if err := c.write(hello{version: wireVersion, id: c.server.id}.append(nil)); err != nil {
		return err
	}
	if h.version != wireVersion {
		return fmt.Errorf("it speaks version %d of our protocol, this is version %d", h.version, wireVersion)
	}
	if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	t := c.server.enter(h.id)
	defer c.server.leave(h.id, t)
	for {
		f, err := readFrame(c.in)
		if err != nil {
			return err
		}
		q, err := parseRequest(f.kind, f.body)
		if err != nil {
			return err
		}
		if f.kind == kindCancel {
			c.cancel(f.id)
			continue
		}
		c.handle(t, f, q)
	}
}

// handle does one request, or has it wait.
func (c *serverConn) handle(t *turn, f frame, q request) {
	reply := func(k kind, body []byte) { c.answer(frame{f.id, k, body}.append(nil)) }
	fail := func(err error) { reply(kindFailed, failedBody(err)) }
	for i, k := range q.keys {
		if err := checkKey(k); err != nil {
			fail(err)
			return
		}
		q.keys[i] = torchSpace + k
	}
	if err := checkValue(q.value); err != nil {
		fail(err)
		return
	}
	switch f.kind {
	case kindSet:
		if err := c.server.table.set(q.keys[0], q.value); err != nil {
			fail(err)
			return
		}
		reply(kindDone, nil)
	case kindAdd, kindCAS:
		a := c.server.takeTurn(t, f.kind, q)
		reply(a.kind, a.body)
	case kindGet, kindWait:
		done := func() bool {
			if f.kind == kindWait {
				reply(kindDone, nil)
				return true
			}
			v, ok := c.server.table.get(q.keys[0])
			if ok {
				reply(kindValue, v)
			}
			return ok // else it was deleted since
		}
		if !c.wait(f.id, q.keys, done) {
			fail(fmt.Errorf("%w: more than %d waits on one connection", ErrFull, waitsPerConn))
		}
	}
}

// wait calls done once all keys are there, and again if done says that they were not; now if they are, later if not. It
// refuses a connection that has too many waits open.
func (c *serverConn) wait(id uint32, keys []string, done func() bool) bool {
	ready, giveUp := c.server.table.watch(keys, false)
	select {
	case <-ready:
		if done() {
			return true
		}
		ready, giveUp = c.server.table.watch(keys, false)
	default:
	}
	end := make(chan struct{})
	c.mu.Lock()
	if len(c.pending) >= waitsPerConn {
		c.mu.Unlock()
		giveUp()
		return false
	}
	c.pending[id] = sync.OnceFunc(func() { close(end) })
	c.mu.Unlock()
	c.tasks.Go(func() {
		defer func() {
			giveUp()
			c.mu.Lock()
			delete(c.pending, id)
			c.mu.Unlock()
		}()
		for {
			select {
			case <-ready:
				if done() {
					return
				}
				ready, giveUp = c.server.table.watch(keys, false)
			case <-end:
				return
			case <-c.gone:
				return
			}
		}
	})
	return true
}

func (c *serverConn) cancel(id uint32) {
	c.mu.Lock()
	end := c.pending[id]
	c.mu.Unlock()
	if end != nil {
		end()
	}
}

// takeTurn does an add or cas, unless this turn was taken already: then it repeats the answer.
func (s *Server) takeTurn(t *turn, k kind, q request) frame {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.turn == t.number && q.turn > 0 {
		return t.answer
	}
	if q.turn <= t.number {
		return frame{kind: kindFailed, body: failedBody(fmt.Errorf("%w: turn %d after %d", errBadFrame, q.turn, t.number))}
	}
	var a frame
	if k == kindAdd {
		n, err := s.table.add(q.keys[0], q.delta)
		a = sumFrame(n, err)
	} else {
		v, ok, err := s.table.compareAndSet(q.keys[0], q.expected, q.value)
		switch {
		case err != nil:
			a = frame{kind: kindFailed, body: failedBody(err)}
		case ok:
			a = frame{kind: kindValue, body: v}
		default:
			a = frame{kind: kindAbsent}
		}
	}
	t.number, t.answer = q.turn, a
	return a
}

// enter returns the turn of a client that has connected.
func (s *Server) enter(id identity) *turn {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.turns[id]
	if t == nil {
		t = &turn{}
		s.turns[id] = t
	}
	t.conns++
	return t
}

func (s *Server) leave(id identity, t *turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.conns--; t.conns > 0 {
		return
	}
	s.without = append(s.without, id)
	for len(s.without) > turnsKept {
		oldest := s.without[0]
		s.without = s.without[1:]
		if t := s.turns[oldest]; t != nil && t.conns == 0 {
			delete(s.turns, oldest)
		}
	}
}

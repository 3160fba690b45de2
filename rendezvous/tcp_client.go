package rendezvous

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// tcpStore is a client of our protocol. All calls share one connection, which is made again when it is lost.
type tcpStore struct {
	addr, url string
	id        identity
	life      context.Context // ends with Close
	end       context.CancelFunc
	tasks     sync.WaitGroup

	turns chan struct{} // holds one token: who has it may add or compare-and-set
	turn  uint64        // guarded by the token

	dialing chan struct{} // holds one token: who has it may connect
	mu      sync.Mutex
	closed  bool
	link    *link
	server  *identity // of the server that we first met
}

// DialTCP connects to the [Server] at addr, "host:port", in our own protocol.
func DialTCP(ctx context.Context, addr string) (Store, error) {
	s := &tcpStore{
		addr: addr, url: "tcp://" + addr,
		turns: make(chan struct{}, 1), dialing: make(chan struct{}, 1),
	}
	s.life, s.end = context.WithCancel(context.Background())
	s.turns <- struct{}{}
	s.dialing <- struct{}{}
	_, _ = rand.Read(s.id[:])
	if _, err := s.connected(ctx, OpenTimeout); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// connected returns a live link, after connecting for at most the time most if there is none.
func (s *tcpStore) connected(ctx context.Context, most time.Duration) (*link, error) {
	select {
	case <-s.dialing:
		defer func() { s.dialing <- struct{}{} }()
	case <-ctx.Done():
		return nil, &Error{Store: s.url, Op: "connect", Err: ctx.Err(), Hint: hintServer}
	case <-s.life.Done():
		return nil, ErrClosed
	}
	s.mu.Lock()
	l := s.link
	s.mu.Unlock()
	if l != nil && !l.isDead() {
		return l, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	conn, err := dial(ctx, s.url, s.addr, most, s.greet)
	if s.life.Err() != nil {
		if err == nil {
			_ = conn.Close()
		}
		return nil, ErrClosed
	}
	if err != nil {
		return nil, err
	}
	l = &link{conn: conn, dead: make(chan struct{}), pending: map[uint32]chan frame{}, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = conn.Close()
		return nil, ErrClosed
	}
	s.link = l
	s.tasks.Go(l.read)
	return l, nil
}

func (s *tcpStore) greet(conn net.Conn) error {
	if _, err := conn.Write(hello{version: wireVersion, id: s.id}.append(nil)); err != nil {
		return err
	}
	b := make([]byte, helloLen)
	if err := readGreeting(conn, b, []byte(wireMagic)); err != nil {
		return err
	}
	h, err := parseHello(b)
	if err != nil {
		return err
	}
	if h.version != wireVersion {
		return fmt.Errorf("%w that we understand: it speaks version %d of our protocol, this program version %d",
			ErrNotRendezvous, h.version, wireVersion)
	}
	if s.server == nil { // guarded by the token of dialing
		s.server = &h.id
	} else if *s.server != h.id {
		return ErrRestarted
	}
	return nil
}

// link is one connection.
type link struct {
	conn net.Conn
	turn chan struct{} // holds one token: who has it may write

	mu      sync.Mutex
	pending map[uint32]chan frame
	nextID  uint32
	err     error // why it died
	dead    chan struct{}
}

func (l *link) isDead() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

func (l *link) kill(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.isDead() {
		l.err = err
		close(l.dead)
		_ = l.conn.Close()
	}
}

// read hands out answers until the connection ends.
func (l *link) read() {
	for {
		f, err := readFrame(l.conn)
		if err != nil {
			l.kill(err)
			return
		}
		l.mu.Lock()
		if answer := l.pending[f.id]; answer != nil {
			answer <- f // has room for one
			delete(l.pending, f.id)
		} // else it was given up
		l.mu.Unlock()
	}
}

// write sends b whole, or kills the link.
func (l *link) write(ctx context.Context, b []byte) error {
	select {
	case <-l.turn:
		defer func() { l.turn <- struct{}{} }()
	case <-l.dead:
		return l.err
	case <-ctx.Done():
		return ctx.Err()
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = l.conn.SetWriteDeadline(past)
		close(fired)
	})
	n, err := l.conn.Write(b)
	if !stop() {
		<-fired
		_ = l.conn.SetWriteDeadline(time.Time{})
	}
	if err != nil && n > 0 || err != nil && ctx.Err() == nil {
		l.kill(err)
	}
	return err
}

// ask sends a request and waits for its answer. errLost is a link that died meanwhile.
func (l *link) ask(ctx context.Context, s *tcpStore, k kind, body []byte) (frame, error) {
	answer := make(chan frame, 1)
	l.mu.Lock()
	l.nextID++
	id := l.nextID
	l.pending[id] = answer
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.pending, id)
		l.mu.Unlock()
	}()
	if err := l.write(ctx, frame{id, k, body}.append(nil)); err != nil {
		if ctx.Err() != nil {
			return frame{}, ctx.Err()
		}
		return frame{}, fmt.Errorf("%w: %w", errLost, err)
	}
	select {
	case f := <-answer:
		return f, nil
	case <-l.dead:
		select {
		case f := <-answer: // it came, and then the link died
			return f, nil
		default:
		}
		return frame{}, fmt.Errorf("%w: %w", errLost, l.err)
	case <-s.life.Done():
		return frame{}, ErrClosed
	case <-ctx.Done():
		if k == kindGet || k == kindWait {
			s.tell(l, frame{id: id, kind: kindCancel})
		}
		return frame{}, ctx.Err()
	}
}

var errLost = errors.New("the connection was lost")

// tell sends what has no answer, without waiting for it.
func (s *tcpStore) tell(l *link, f frame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = l.write(ctx, f.append(nil))
	})
}

// call does one request, over a second connection if the first is lost.
func (s *tcpStore) call(ctx context.Context, op string, k kind, q request) (frame, error) {
	since, key := time.Now(), firstKey(q.keys)
	fail := func(err error) (frame, error) {
		var e *Error
		if errors.As(err, &e) { // of dial
			e.Op, e.Key = op, key
			return frame{}, e
		}
		e = &Error{Store: s.url, Op: op, Key: key, Err: err}
		if errors.Is(err, errLost) {
			e.Hint = hintServer
		}
		return frame{}, e
	}
	if err := s.check(ctx, q); err != nil {
		return fail(err)
	}
	body := q.append(nil, k)
	if len(body) > frameMax-frameMin {
		return fail(fmt.Errorf("%w: the keys of one call have %d bytes, at most %d", ErrTooLarge, len(body), frameMax))
	}
	for again := false; ; again = true {
		l, err := s.connected(ctx, reconnectTime)
		if err != nil {
			return fail(err)
		}
		f, err := l.ask(ctx, s, k, body)
		switch {
		case err == nil && f.kind == kindFailed:
			return fail(parseFailed(f.body))
		case err == nil:
			return f, nil
		case ctx.Err() != nil && (k == kindGet || k == kindWait):
			return frame{}, waitFailed(ctx, s.url, op, key, since)
		case ctx.Err() != nil:
			return fail(ctxError(ctx, "no answer", since, ErrUnknownOutcome))
		case !errors.Is(err, errLost) || again:
			return fail(err)
		}
	}
}

func (s *tcpStore) check(ctx context.Context, q request) error {
	if s.life.Err() != nil {
		return ErrClosed
	}
	for _, k := range q.keys {
		if err := checkKey(k); err != nil {
			return err
		}
	}
	if err := checkValue(q.value); err != nil {
		return err
	}
	if err := checkValue(q.expected); err != nil {
		return err
	}
	return ctx.Err()
}

// want checks the kind of an answer.
func (s *tcpStore) want(op, key string, f frame, kinds ...kind) error {
	for _, k := range kinds {
		if f.kind == k && (k != kindSum || len(f.body) == 8) {
			return nil
		}
	}
	return &Error{Store: s.url, Op: op, Key: key, Err: fmt.Errorf("%w: answer %d", errBadFrame, f.kind), Hint: hintOther}
}

func (s *tcpStore) Get(ctx context.Context, key string) ([]byte, error) {
	f, err := s.call(ctx, "get", kindGet, request{keys: []string{key}})
	if err == nil {
		err = s.want("get", key, f, kindValue)
	}
	if err != nil {
		return nil, err
	}
	return f.body, nil
}

func (s *tcpStore) Set(ctx context.Context, key string, value []byte) error {
	f, err := s.call(ctx, "set", kindSet, request{keys: []string{key}, value: value})
	if err != nil {
		return err
	}
	return s.want("set", key, f, kindDone)
}

func (s *tcpStore) Wait(ctx context.Context, keys ...string) error {
	f, err := s.call(ctx, "wait", kindWait, request{keys: keys})
	if err != nil {
		return err
	}
	return s.want("wait", firstKey(keys), f, kindDone)
}

// inTurn does an add or compare-and-set when no other of this client is on its way.
func (s *tcpStore) inTurn(ctx context.Context, op string, k kind, q request) (frame, error) {
	select {
	case <-s.turns:
		defer func() { s.turns <- struct{}{} }()
	case <-ctx.Done():
		return frame{}, &Error{Store: s.url, Op: op, Key: q.keys[0], Err: ctx.Err(), Hint: hintServer}
	}
	s.turn++
	q.turn = s.turn
	return s.call(ctx, op, k, q)
}

func (s *tcpStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	f, err := s.inTurn(ctx, "add", kindAdd, request{keys: []string{key}, delta: delta})
	if err == nil {
		err = s.want("add", key, f, kindSum)
	}
	if err != nil {
		return 0, err
	}
	return int64(binary.BigEndian.Uint64(f.body)), nil
}

func (s *tcpStore) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	f, err := s.inTurn(ctx, "compare-and-set", kindCAS, request{keys: []string{key}, expected: expected, value: desired})
	if err == nil {
		err = s.want("compare-and-set", key, f, kindValue, kindAbsent)
	}
	if err != nil || f.kind == kindAbsent {
		return nil, err
	}
	return f.body, nil
}

func (s *tcpStore) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.end()
	if s.link != nil {
		s.link.kill(ErrClosed)
	}
	s.mu.Unlock()
	s.tasks.Wait()
	return nil
}

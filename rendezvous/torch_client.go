package rendezvous

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

const (
	torchIdle  = 4           // connections kept for the next call
	torchStale = time.Second // an idle connection older than this is tried before an add or compare_set

	// A wait is asked again after these times: torch's older server does not wake those who wait for a key that
	// compare_set makes.
	torchAskMin = 50 * time.Millisecond
	torchAskMax = time.Second
)

// torchStore is a client of torch's protocol, which answers one query at a time: so each call in progress has a
// connection of its own.
type torchStore struct {
	addr, url string
	life      context.Context // ends with Close
	end       context.CancelFunc

	mu   sync.Mutex
	idle []*torchConn
}

type torchConn struct {
	net.Conn
	used time.Time
}

// DialTorch connects to the TCPStore of torch.distributed at addr, "host:port"; it may also be a [Server]. Keys are those
// that Python's TCPStore uses. Two things are less than over tcp://: an Add or CompareAndSet whose connection is lost
// before the answer fails with [ErrUnknownOutcome], and a server that was restarted is not noticed.
func DialTorch(ctx context.Context, addr string) (Store, error) {
	s := &torchStore{addr: addr, url: "torch://" + addr}
	s.life, s.end = context.WithCancel(context.Background())
	c, err := s.connect(ctx, OpenTimeout)
	if err != nil {
		s.end()
		return nil, err
	}
	s.keep(c)
	return s, nil
}

func (s *torchStore) connect(ctx context.Context, most time.Duration) (*torchConn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	conn, err := dial(ctx, s.url, s.addr, most, torchGreet)
	if err != nil {
		if s.life.Err() != nil {
			return nil, ErrClosed
		}
		return nil, err
	}
	return &torchConn{Conn: conn}, nil
}

// torchGreet says who we are and has the other side prove that it is a TCPStore.
func torchGreet(conn net.Conn) error {
	b := binary.LittleEndian.AppendUint32([]byte{torchValidate}, torchMagic)
	if _, err := conn.Write(b); err != nil {
		return err
	}
	return torchProve(conn)
}

func torchProve(conn net.Conn) error {
	ping := binary.LittleEndian.AppendUint32([]byte{torchPing}, rand.Uint32())
	if _, err := conn.Write(ping); err != nil {
		return err
	}
	return readGreeting(conn, make([]byte, 4), ping[1:])
}

// keep puts c aside for the next call.
func (s *torchStore) keep(c *torchConn) {
	c.used = time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.Err() != nil || len(s.idle) == torchIdle {
		_ = c.Close()
		return
	}
	s.idle = append(s.idle, c)
}

func (s *torchStore) takeIdle() *torchConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.idle) == 0 {
		return nil
	}
	c := s.idle[len(s.idle)-1]
	s.idle = s.idle[:len(s.idle)-1]
	return c
}

// query is one exchange with the server.
type query struct {
	op, key string
	once    bool // must not be sent twice
	do      func(c *torchConn) error
}

// call does q over an idle connection or a new one, and if a connection is lost, again over a new one.
func (s *torchStore) call(ctx context.Context, q query) error {
	since, patience := time.Now(), OpenTimeout
	c := s.takeIdle()
	for again := false; ; again = true {
		if c == nil {
			var err error
			if c, err = s.connect(ctx, patience); err != nil {
				return s.fail(q, err)
			}
		}
		patience = reconnectTime
		sent, err := s.exchange(ctx, c, q)
		if err == nil {
			s.keep(c)
			return nil
		}
		_ = c.Close() // which ends a wait at the server
		c = nil
		switch {
		case s.life.Err() != nil:
			return s.fail(q, ErrClosed)
		case ctx.Err() != nil && q.once:
			return s.fail(q, ctxError(ctx, "no answer", since, ErrUnknownOutcome))
		case ctx.Err() != nil:
			return waitFailed(ctx, s.url, q.op, q.key, since)
		case errors.Is(err, errTorchFrame):
			return s.fail(q, err)
		case sent && q.once:
			return s.fail(q, fmt.Errorf("%w (%w)", ErrUnknownOutcome, err))
		case again:
			return s.fail(q, fmt.Errorf("%w: %w", errLost, err))
		}
	}
}

// exchange reports whether q may have reached the server.
func (s *torchStore) exchange(ctx context.Context, c *torchConn, q query) (sent bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	release := guard(ctx, c)
	defer release()
	if q.once && !c.used.IsZero() && time.Since(c.used) > torchStale {
		if err := torchProve(c); err != nil {
			return false, err
		}
	}
	err = q.do(c)
	var unsent *unsentError
	return !errors.As(err, &unsent), err
}

// unsentError is a query that the server cannot have got whole.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error { return e.error }

func (c *torchConn) send(b []byte) error {
	if _, err := c.Write(b); err != nil {
		return &unsentError{err}
	}
	return nil
}

// reader reads an answer.
func (c *torchConn) reader() *torchReader { return &torchReader{r: c} }

func (s *torchStore) fail(q query, err error) error {
	var e *Error
	if errors.As(err, &e) { // of dial
		e.Op, e.Key = q.op, q.key
		return e
	}
	e = &Error{Store: s.url, Op: q.op, Key: q.key, Err: err}
	if errors.Is(err, errLost) || errors.Is(err, ErrUnknownOutcome) {
		e.Hint = hintServer
	}
	return e
}

func (s *torchStore) check(ctx context.Context, q query, value []byte, keys ...string) error {
	var err error
	if s.life.Err() != nil {
		err = ErrClosed
	}
	for _, k := range keys {
		if err == nil {
			err = checkKey(k)
		}
	}
	if err == nil {
		err = checkValue(value)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return s.fail(q, err)
	}
	return nil
}

func (s *torchStore) Get(ctx context.Context, key string) ([]byte, error) {
	var value []byte
	q := query{op: "get", key: key}
	if err := s.check(ctx, q, nil, key); err != nil {
		return nil, err
	}
	k := []string{torchSpace + key}
	q.do = func(c *torchConn) (err error) {
		if err = c.wait(k); err == nil {
			value, err = c.get(k[0])
		}
		return err
	}
	if err := s.call(ctx, q); err != nil {
		return nil, err
	}
	return value, nil
}

// wait returns when all keys are there.
func (c *torchConn) wait(keys []string) error {
	ask := torchKeys([]byte{torchWait}, keys)
	for pause := torchAskMin; ; pause = min(2*pause, torchAskMax) {
		if err := c.send(ask); err != nil {
			return err
		}
		there, err := c.waitFor(pause)
		if there || err != nil {
			return err
		}
	}
}

// waitFor returns whether the wait that was sent was answered within pause. If not, it is canceled.
func (c *torchConn) waitFor(pause time.Duration) (bool, error) {
	canceled := make(chan error, 1)
	timer := time.AfterFunc(pause, func() { canceled <- c.send([]byte{torchCancelWait}) })
	r := c.reader()
	first := r.u8()
	if timer.Stop() || r.err != nil {
		if r.err == nil && first != torchReady {
			return false, fmt.Errorf("%w: answer %d to a wait", errTorchFrame, first)
		}
		return true, r.err
	}
	if err := <-canceled; err != nil {
		return false, err
	}
	if first == torchNotReady {
		return false, nil
	}
	// The answer crossed the cancel, which is still to be answered.
	if second := r.u8(); r.err == nil && second != torchNotReady {
		return false, fmt.Errorf("%w: answer %d to a cancel", errTorchFrame, second)
	}
	return true, r.err
}

// get asks for a key that is there.
func (c *torchConn) get(key string) ([]byte, error) {
	if err := c.send(torchBytes([]byte{torchGet}, []byte(key))); err != nil {
		return nil, err
	}
	return c.value()
}

func (c *torchConn) value() ([]byte, error) {
	r := c.reader()
	v := r.bytes(torchMaxAnswer)
	return v, r.err
}

func (c *torchConn) check(key string) (bool, error) {
	if err := c.send(torchKeys([]byte{torchCheck}, []string{key})); err != nil {
		return false, err
	}
	r := c.reader()
	return r.u8() == torchReady, r.err
}

func (s *torchStore) Wait(ctx context.Context, keys ...string) error {
	q := query{op: "wait", key: firstKey(keys)}
	if err := s.check(ctx, q, nil, keys...); err != nil {
		return err
	}
	full, size := make([]string, len(keys)), 0
	for i, k := range keys {
		full[i] = torchSpace + k
		size += len(full[i])
	}
	if len(keys) > torchMaxKeys || size > torchMaxKeyBytes {
		return s.fail(q, fmt.Errorf("%w: too many keys in one call", ErrTooLarge))
	}
	q.do = func(c *torchConn) error { return c.wait(full) }
	return s.call(ctx, q)
}

func (s *torchStore) Set(ctx context.Context, key string, value []byte) error {
	q := query{op: "set", key: key}
	if err := s.check(ctx, q, value, key); err != nil {
		return err
	}
	b := torchBytes(torchBytes([]byte{torchSet}, []byte(torchSpace+key)), value)
	q.do = func(c *torchConn) error {
		if err := c.send(b); err != nil {
			return err
		}
		return torchProve(c) // a set has no answer of its own, and must have happened when we return
	}
	return s.call(ctx, q)
}

func (s *torchStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	var sum int64
	q := query{op: "add", key: key, once: true}
	if err := s.check(ctx, q, nil, key); err != nil {
		return 0, err
	}
	q.do = func(c *torchConn) error {
		if err := c.send(torchInt(torchBytes([]byte{torchAdd}, []byte(torchSpace+key)), delta)); err != nil {
			return err
		}
		r := c.reader()
		sum = int64(r.u64())
		return r.err
	}
	err := s.call(ctx, q)
	if errors.Is(err, ErrUnknownOutcome) && ctx.Err() == nil {
		if why := s.whyNotNumber(ctx, key); why != nil {
			return 0, s.fail(q, why)
		}
	}
	if err != nil {
		return 0, err
	}
	return sum, nil
}

// whyNotNumber looks whether a connection was lost because the value is not a number: torch's server closes it then.
func (s *torchStore) whyNotNumber(ctx context.Context, key string) error {
	value, ok, err := s.peek(ctx, "add", key)
	if err != nil || !ok {
		return nil
	}
	_, err = parseNumber(value)
	return err
}

// peek returns the value of key if there is one now.
func (s *torchStore) peek(ctx context.Context, op, key string) (value []byte, ok bool, err error) {
	err = s.call(ctx, query{op: op, key: key, do: func(c *torchConn) error {
		if ok, err = c.check(torchSpace + key); err == nil && ok {
			value, err = c.get(torchSpace + key)
		}
		return err
	}})
	return value, ok, err
}

func (s *torchStore) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	q := query{op: "compare-and-set", key: key, once: true}
	if err := s.check(ctx, q, desired, key); err != nil {
		return nil, err
	}
	if err := s.check(ctx, q, expected); err != nil {
		return nil, err
	}
	if len(expected) > 0 && bytes.Equal(expected, desired) {
		// Nothing can change, and the server's answer would not tell whether anything is there.
		value, ok, err := s.peek(ctx, q.op, key)
		if err != nil || !ok {
			return nil, err
		}
		return value, nil
	}
	var value []byte
	b := torchBytes([]byte{torchCompareSet}, []byte(torchSpace+key))
	b = torchBytes(torchBytes(b, expected), desired)
	q.do = func(c *torchConn) (err error) {
		if err = c.send(b); err == nil {
			value, err = c.value()
		}
		return err
	}
	if err := s.call(ctx, q); err != nil {
		return nil, err
	}
	if len(expected) > 0 && bytes.Equal(value, expected) {
		return nil, nil // had it been there, it would be desired now: so the server says that nothing is
	}
	return value, nil
}

func (s *torchStore) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	for _, c := range s.idle {
		_ = c.Close()
	}
	s.idle = nil
	return nil
}

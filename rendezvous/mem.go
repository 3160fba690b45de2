package rendezvous

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"time"
)

// named are the tables behind mem:// URLs; one is dropped when its last handle is closed.
var named = struct {
	sync.Mutex
	tables map[string]*namedTable
}{tables: map[string]*namedTable{}}

type namedTable struct {
	table *table
	refs  int
}

func openMem(name string) Store {
	named.Lock()
	defer named.Unlock()
	n := named.tables[name]
	if n == nil {
		n = &namedTable{table: newTable()}
		named.tables[name] = n
	}
	n.refs++
	s := newLocal("mem://"+name, n.table, "")
	s.onClose = func() {
		named.Lock()
		defer named.Unlock()
		if n.refs--; n.refs == 0 {
			delete(named.tables, name)
		}
	}
	return s
}

// NewMem returns a store in this process that nothing else can open.
func NewMem() Store { return newLocal("mem://", newTable(), "") }

// local is a Store on a table of this process.
type local struct {
	url     string
	table   *table
	space   string // put before each key
	closing chan struct{}
	once    sync.Once
	onClose func()
}

func newLocal(url string, t *table, space string) *local {
	return &local{url: url, table: t, space: space, closing: make(chan struct{})}
}

func (s *local) fail(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Store: s.url, Op: op, Key: key, Err: err}
}

// check is what each call does first.
func (s *local) check(ctx context.Context, keys ...string) error {
	select {
	case <-s.closing:
		return ErrClosed
	default:
	}
	for _, k := range keys {
		if err := checkKey(k); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (s *local) Get(ctx context.Context, key string) ([]byte, error) {
	for {
		if err := s.wait(ctx, "get", key); err != nil {
			return nil, err
		}
		if v, ok := s.table.get(s.space + key); ok {
			return append([]byte{}, v...), nil
		} // else a program of torch has deleted it since
	}
}

func (s *local) Wait(ctx context.Context, keys ...string) error {
	return s.wait(ctx, "wait", keys...)
}

func (s *local) wait(ctx context.Context, op string, keys ...string) error {
	if err := s.check(ctx, keys...); err != nil {
		return s.fail(op, firstKey(keys), err)
	}
	full := keys
	if s.space != "" {
		full = make([]string, len(keys))
		for i, k := range keys {
			full[i] = s.space + k
		}
	}
	ready, giveUp := s.table.watch(full, false)
	defer giveUp()
	since := time.Now()
	select {
	case <-ready:
		return nil
	case <-s.closing:
		return s.fail(op, firstKey(keys), ErrClosed)
	case <-ctx.Done():
		missing := firstKey(s.table.absent(full, false))
		return waitFailed(ctx, s.url, op, strings.TrimPrefix(missing, s.space), since)
	}
}

// waitFailed is the error of a wait that its context ended; missing is a key that is not there, as far as known.
func waitFailed(ctx context.Context, url, op, missing string, since time.Time) error {
	return &Error{Store: url, Op: op, Key: missing, Err: ctxError(ctx, "not there", since, nil), Hint: hintWait}
}

// firstKey names a list of keys in a message.
func firstKey(keys []string) string {
	if len(keys) == 0 {
		return ""
	}
	return keys[0]
}

func (s *local) Set(ctx context.Context, key string, value []byte) error {
	err := s.check(ctx, key)
	if err == nil {
		err = checkValue(value)
	}
	if err == nil {
		err = s.table.set(s.space+key, bytes.Clone(value))
	}
	return s.fail("set", key, err)
}

func (s *local) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := s.check(ctx, key); err != nil {
		return 0, s.fail("add", key, err)
	}
	n, err := s.table.add(s.space+key, delta)
	return n, s.fail("add", key, err)
}

func (s *local) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	err := s.check(ctx, key)
	if err == nil {
		err = checkValue(desired)
	}
	if err != nil {
		return nil, s.fail("compare-and-set", key, err)
	}
	v, ok, err := s.table.compareAndSet(s.space+key, expected, bytes.Clone(desired))
	if err != nil || !ok {
		return nil, s.fail("compare-and-set", key, err)
	}
	return append([]byte{}, v...), nil
}

func (s *local) Close() error {
	s.once.Do(func() {
		close(s.closing)
		if s.onClose != nil {
			s.onClose()
		}
	})
	return nil
}

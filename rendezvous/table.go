package rendezvous

import (
	"bytes"
	"fmt"
	"strconv"
	"sync"
)

// tableLimit bounds the bytes of keys and values that a store in memory holds, so that a program that fills it by
// mistake gets an error instead of taking the host down.
const tableLimit = 1 << 30

// keyCost is what an entry costs beside its bytes, roughly.
const keyCost = 128

// table is the content of a store in memory, and who waits for what. A stored slice is never written to again, so it may
// be sent without the lock.
type table struct {
	mu      sync.Mutex
	values  map[string][]byte
	queues  map[string][][]byte // torch's queues: a name space beside the values
	waiters map[string]map[*waiter]struct{}
	arrived map[string][]arrival // who waits in torch's barriers
	size    int64
	limit   int64
}

// arrival is one who waits in a barrier of torch until world have come.
type arrival struct {
	world int64
	ready chan struct{}
}

// waiter waits for keys; ready is closed when each of them has been there.
type waiter struct {
	missing map[string]struct{}
	ready   chan struct{}
	queues  bool // a queue that holds something counts, which is torch's notion
}

func newTable() *table {
	return &table{
		values:  map[string][]byte{},
		queues:  map[string][][]byte{},
		waiters: map[string]map[*waiter]struct{}{},
		arrived: map[string][]arrival{},
		limit:   tableLimit,
	}
}

func (t *table) get(key string) ([]byte, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok := t.values[key]
	return v, ok
}

// set takes ownership of value.
func (t *table) set(key string, value []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.put(key, value)
}

// put stores value and wakes who waits for key. t.mu is held.
func (t *table) put(key string, value []byte) error {
	old, had := t.values[key]
	grow := int64(len(value) - len(old))
	if !had {
		grow += int64(len(key)) + keyCost
	}
	if err := t.reserve(grow); err != nil {
		return err
	}
	t.values[key] = value
	if !had {
		t.wake(key, false)
	}
	return nil
}

func (t *table) reserve(grow int64) error {
	if grow > 0 && t.size+grow > t.limit {
		return fmt.Errorf("%w: it holds %d of %d bytes", ErrFull, t.size, t.limit)
	}
	t.size += grow
	return nil
}

func (t *table) wake(key string, queue bool) {
	for w := range t.waiters[key] {
		if queue && !w.queues {
			continue
		}
		delete(w.missing, key)
		delete(t.waiters[key], w)
		if len(w.missing) == 0 {
			close(w.ready)
		}
	}
	if len(t.waiters[key]) == 0 {
		delete(t.waiters, key)
	}
}

func (t *table) add(key string, delta int64) (int64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.addLocked(key, delta)
}

func (t *table) addLocked(key string, delta int64) (int64, error) {
	var n int64
	if old, ok := t.values[key]; ok {
		var err error
		if n, err = parseNumber(old); err != nil {
			return 0, err
		}
	}
	n += delta
	return n, t.put(key, strconv.AppendInt(nil, n, 10))
}

// parseNumber reads what Add stores.
func parseNumber(value []byte) (int64, error) {
	n, err := strconv.ParseInt(string(value), 10, 64)
	if err != nil {
		shown := value
		if len(shown) > 40 {
			shown = shown[:40]
		}
		return 0, fmt.Errorf("%w: %q", ErrNotNumber, shown)
	}
	return n, nil
}

// compareAndSet takes ownership of desired. It returns the value that is there afterwards, and whether there is one.
func (t *table) compareAndSet(key string, expected, desired []byte) ([]byte, bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	current, ok := t.values[key]
	if ok && !bytes.Equal(current, expected) {
		return current, true, nil
	}
	if !ok && len(expected) > 0 {
		return nil, false, nil
	}
	if err := t.put(key, desired); err != nil {
		return nil, false, err
	}
	return desired, true, nil
}

// watch returns a channel that is closed when each key has been there, and a function that gives up, which may be
// called at any time and more than once.
func (t *table) watch(keys []string, queues bool) (<-chan struct{}, func()) {
	w := &waiter{missing: map[string]struct{}{}, ready: make(chan struct{}), queues: queues}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		if !t.exists(k, queues) {
			w.missing[k] = struct{}{}
		}
	}
	if len(w.missing) == 0 {
		close(w.ready)
		return w.ready, func() {}
	}
	for k := range w.missing {
		if t.waiters[k] == nil {
			t.waiters[k] = map[*waiter]struct{}{}
		}
		t.waiters[k][w] = struct{}{}
	}
	return w.ready, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		for k := range w.missing {
			delete(t.waiters[k], w)
			if len(t.waiters[k]) == 0 {
				delete(t.waiters, k)
			}
		}
	}
}

func (t *table) exists(key string, queues bool) bool {
	_, ok := t.values[key]
	return ok || queues && len(t.queues[key]) > 0
}

// absent returns those of keys that are not there now.
func (t *table) absent(keys []string, queues bool) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var absent []string
	for _, k := range keys {
		if !t.exists(k, queues) {
			absent = append(absent, k)
		}
	}
	return absent
}

// The rest is what only torch's protocol asks for.

func (t *table) remove(key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok := t.values[key]
	if ok {
		t.size -= int64(len(v)+len(key)) + keyCost
		delete(t.values, key)
	}
	return ok
}

func (t *table) append(key string, value []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.values[key]
	if len(old)+len(value) > MaxValue {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(old)+len(value), MaxValue)
	}
	joined := make([]byte, 0, len(old)+len(value))
	return t.put(key, append(append(joined, old...), value...))
}

// arrive counts one more arrival under key and returns a channel that is closed when there are world or more.
func (t *table) arrive(key string, world int64) (<-chan struct{}, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := t.addLocked(key, 1)
	if err != nil {
		return nil, err
	}
	ready := make(chan struct{})
	waiting := t.arrived[key][:0]
	for _, a := range append(t.arrived[key], arrival{world, ready}) {
		if n >= a.world {
			close(a.ready)
		} else {
			waiting = append(waiting, a)
		}
	}
	if t.arrived[key] = waiting; len(waiting) == 0 {
		delete(t.arrived, key)
	}
	return ready, nil
}

// depart forgets who waited in a barrier and gave up; the arrival stays counted, as torch does.
func (t *table) depart(key string, ready <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, a := range t.arrived[key] {
		if a.ready == ready {
			t.arrived[key] = append(t.arrived[key][:i:i], t.arrived[key][i+1:]...)
			break
		}
	}
	if len(t.arrived[key]) == 0 {
		delete(t.arrived, key)
	}
}

func (t *table) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.values)
}

func (t *table) keys() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys := make([]string, 0, len(t.values))
	for k := range t.values {
		keys = append(keys, k)
	}
	return keys
}

// push takes ownership of value.
func (t *table) push(key string, value []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.reserve(int64(len(key)+len(value)) + keyCost); err != nil {
		return err
	}
	t.queues[key] = append(t.queues[key], value)
	t.wake(key, true)
	return nil
}

// pop returns the oldest value of the queue and how many it held before, 0 if it was empty.
func (t *table) pop(key string) ([]byte, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[key]
	if len(q) == 0 {
		return nil, 0
	}
	v := q[0]
	q[0] = nil
	t.size -= int64(len(key)+len(v)) + keyCost
	if t.queues[key] = q[1:]; len(q) == 1 {
		delete(t.queues, key)
	}
	return v, len(q)
}

func (t *table) queueLen(key string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.queues[key])
}

package rendezvous

import (
	"fmt"
	"time"
)

// serveTorch answers a client of torch until it leaves. Like torch's server it goes on reading while a wait is open.
func (c *serverConn) serveTorch() error {
	r := &torchReader{r: c.in}
	if q, magic := r.u8(), r.u32(); r.err != nil || q != torchValidate || magic != torchMagic {
		if r.err != nil {
			return r.err
		}
		return fmt.Errorf("%w: it began with %d and %#x", errTorchFrame, q, magic)
	}
	if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	for {
		query, err := c.in.ReadByte()
		if err != nil {
			return err
		}
		r.keys = 0
		if err := c.torchQuery(r, query); err != nil {
			return err
		}
	}
}

// torchQuery does one query. An error costs the connection, which is all that the protocol offers.
func (c *serverConn) torchQuery(r *torchReader, query byte) error {
	t := c.server.table
	switch query {
	case torchSet:
		key, value := r.key(), r.value()
		return c.torchDone(r, func() error { return t.set(key, value) })
	case torchAppend:
		key, value := r.key(), r.value()
		return c.torchDone(r, func() error { return t.append(key, value) })
	case torchQueuePush:
		key, value := r.key(), r.value()
		return c.torchDone(r, func() error { return t.push(key, value) })
	case torchMultiSet:
		for range r.count() {
			key, value := r.key(), r.value()
			if err := c.torchDone(r, func() error { return t.set(key, value) }); err != nil {
				return err
			}
		}
		return r.err
	case torchWait:
		keys := r.keyList()
		if r.err != nil {
			return r.err
		}
		return c.torchWait(t.watch(keys, true))
	case torchBarrier:
		key, world := r.key(), int64(r.u64())
		if r.err != nil {
			return r.err
		}
		ready, err := t.arrive(key, world)
		if err != nil {
			return fmt.Errorf("barrier %s: %w", quoteKey(key), err)
		}
		return c.torchWait(ready, func() { t.depart(key, ready) })
	case torchCancelWait:
		c.cancelAll()
		return c.write([]byte{torchNotReady})
	}
	b, err := c.torchAsk(r, query)
	if err != nil {
		return err
	}
	return c.write(b)
}

// torchDone does what has no answer, if its arguments were read well.
func (c *serverConn) torchDone(r *torchReader, do func() error) error {
	if r.err != nil {
		return r.err
	}
	return do()
}

// torchAsk does the queries that are answered at once, and returns the answer.
func (c *serverConn) torchAsk(r *torchReader, query byte) ([]byte, error) {
	t := c.server.table
	var b []byte
	switch query {
	case torchPing:
		return r.fixed(make([]byte, 4)), r.err
	case torchNumKeys:
		return torchInt(nil, int64(t.len())), nil
	case torchListKeys:
		return torchKeys(nil, t.keys()), nil
	case torchGet:
		v, _ := t.get(r.key())
		return torchBytes(nil, v), r.err
	case torchMultiGet:
		for _, k := range r.keyList() {
			v, _ := t.get(k)
			if b = torchBytes(b, v); len(b) > torchMaxAnswer {
				return nil, fmt.Errorf("%w: multi_get of more than %d bytes", ErrTooLarge, torchMaxAnswer)
			}
		}
		return b, r.err
	case torchCheck:
		if len(t.absent(r.keyList(), true)) > 0 {
			return []byte{torchNotReady}, r.err
		}
		return []byte{torchReady}, r.err
	case torchQueueLen:
		return torchInt(nil, int64(t.queueLen(r.key()))), r.err
	case torchAdd:
		key, delta := r.key(), int64(r.u64())
		if r.err != nil {
			return nil, r.err
		}
		n, err := t.add(key, delta)
		if err != nil {
			return nil, fmt.Errorf("add %s: %w", quoteKey(key), err)
		}
		return torchInt(nil, n), nil
	case torchCompareSet:
		key, expected, desired := r.key(), r.value(), r.value()
		if r.err != nil {
			return nil, r.err
		}
		v, ok, err := t.compareAndSet(key, expected, desired)
		if !ok {
			v = expected // as torch does: its client cannot be told that there is nothing
		}
		return torchBytes(nil, v), err
	case torchDelete:
		key := r.key()
		if r.err != nil {
			return nil, r.err
		}
		if t.remove(key) {
			return torchInt(nil, 1), nil
		}
		return torchInt(nil, 0), nil
	case torchQueuePop:
		key := r.key()
		if r.err != nil {
			return nil, r.err
		}
		v, n := t.pop(key)
		if b = torchInt(nil, int64(n)); n > 0 {
			b = torchBytes(b, v)
		}
		return b, nil
	}
	return nil, fmt.Errorf("%w: query %d", errTorchFrame, query)
}

// torchWait answers once ready is closed, unless the client cancels first.
func (c *serverConn) torchWait(ready <-chan struct{}, giveUp func()) error {
	select {
	case <-ready:
		return c.write([]byte{torchReady})
	default:
	}
	end := make(chan struct{})
	c.mu.Lock()
	if len(c.pending) >= waitsPerConn {
		c.mu.Unlock()
		giveUp()
		return fmt.Errorf("%w: more than %d waits on one connection", ErrFull, waitsPerConn)
	}
	c.lastWait++
	id := c.lastWait
	c.pending[id] = func() { close(end) }
	c.mu.Unlock()
	c.tasks.Go(func() {
		defer giveUp()
		select {
		case <-ready:
		case <-end:
			return
		case <-c.gone:
			return
		}
		// Taken off and answered under one lock, so that the answer to a cancel comes after it or instead of it.
		c.out.Lock()
		defer c.out.Unlock()
		c.mu.Lock()
		_, open := c.pending[id]
		delete(c.pending, id)
		c.mu.Unlock()
		if open && c.writeLocked([]byte{torchReady}) != nil {
			_ = c.conn.Close()
		}
	})
	return nil
}

// cancelAll ends the waits that are open: none of them answers after this returns.
func (c *serverConn) cancelAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, end := range c.pending {
		end()
		delete(c.pending, id)
	}
}

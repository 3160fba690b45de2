package stream

import (
	"sync"

	"github.com/serry-project/serry/internal/wire"
)

const (
	smallChunk = 64 << 10
	largeChunk = wire.MaxPayload + wire.Size
)

// chunk is a run of whole encoded frames, as they go to the kernel.
type chunk struct {
	buf         []byte // len: filled
	first, last uint64 // link sequences
}

var pools = [2]sync.Pool{
	{New: func() any { return &chunk{buf: make([]byte, 0, smallChunk)} }},
	{New: func() any { return &chunk{buf: make([]byte, 0, largeChunk)} }},
}

func getChunk(n int) *chunk {
	if n <= smallChunk {
		return pools[0].Get().(*chunk)
	}
	return pools[1].Get().(*chunk)
}

func putChunk(c *chunk) {
	c.buf, c.first, c.last = c.buf[:0], 0, 0
	if cap(c.buf) == smallChunk {
		pools[0].Put(c)
		return
	}
	pools[1].Put(c)
}

// queue holds the frames that the peer has not acknowledged, in order: those before (at, off) were written to the
// current connection, the rest waits.
type queue struct {
	chunks   []*chunk
	at, off  int
	seq      uint64 // of the last frame put in
	acked    uint64 // by the peer
	retained int    // bytes in chunks
	unsent   int    // bytes behind (at, off)
}

// add encodes a frame behind the others and gives it the next sequence.
func (q *queue) add(h *wire.Header, payload []byte, sum bool) {
	n := wire.Size + len(payload)
	k := len(q.chunks)
	if k == 0 || cap(q.chunks[k-1].buf)-len(q.chunks[k-1].buf) < n {
		q.chunks = append(q.chunks, getChunk(n))
		k++
	}
	c := q.chunks[k-1]
	q.seq++
	h.LinkSeq = q.seq
	if len(c.buf) == 0 {
		c.first = q.seq
	}
	c.last = q.seq
	at := len(c.buf)
	c.buf = c.buf[:at+n]
	copy(c.buf[at+wire.Size:], payload)
	h.Put(c.buf[at:], payload, sum)
	q.retained += n
	q.unsent += n
}

// head returns the next run of bytes to write.
func (q *queue) head() []byte {
	for q.at < len(q.chunks) {
		if b := q.chunks[q.at].buf[q.off:]; len(b) > 0 {
			return b
		}
		if q.at == len(q.chunks)-1 {
			break
		}
		q.at, q.off = q.at+1, 0
	}
	return nil
}

// wrote moves on by n bytes of head.
func (q *queue) wrote(n int) {
	q.off += n
	q.unsent -= n
}

// written is the last sequence of which the last byte has gone to the connection, or a lower one.
func (q *queue) written() uint64 {
	if len(q.chunks) == 0 {
		return q.seq
	}
	if c := q.chunks[q.at]; q.off == len(c.buf) {
		return c.last
	}
	return q.seqAt(q.at, q.off) - 1
}

// seqAt is the sequence of the frame of chunk i that holds byte off.
func (q *queue) seqAt(i, off int) uint64 {
	c := q.chunks[i]
	s := c.first
	for p := 0; ; s++ {
		p += wire.Size + wire.LengthOf(c.buf[p:])
		if off < p || p >= len(c.buf) {
			return s
		}
	}
}

// ack frees what the peer has. False: it acknowledges what it can not have got.
func (q *queue) ack(a uint64) bool {
	if a <= q.acked {
		return true
	}
	if a > q.seq || (q.unsent > 0 && a > q.written()) {
		return false
	}
	q.acked = a
	k := 0
	for k < len(q.chunks) && q.chunks[k].last <= a {
		if k == len(q.chunks)-1 { // all of it: start again at the front of the same memory
			c := q.chunks[k]
			if cap(c.buf) == smallChunk {
				q.retained -= len(c.buf)
				c.buf = c.buf[:0]
				q.off = 0
				break
			}
		}
		q.retained -= len(q.chunks[k].buf)
		putChunk(q.chunks[k])
		k++
	}
	if k > 0 {
		n := copy(q.chunks, q.chunks[k:])
		clear(q.chunks[n:])
		q.chunks = q.chunks[:n]
		q.at -= k
		if q.at < 0 {
			q.at, q.off = 0, 0
		}
	}
	return true
}

// rewind makes a new connection start behind sequence a, the last that the peer has. False: that can not be.
func (q *queue) rewind(a uint64) bool {
	if a < q.acked || a > q.seq {
		return false
	}
	q.at, q.off, q.unsent = 0, 0, q.retained
	q.ackRewound(a)
	return true
}

func (q *queue) ackRewound(a uint64) {
	for q.at < len(q.chunks) {
		c := q.chunks[q.at]
		if len(c.buf) == 0 {
			break
		}
		if c.last <= a {
			q.unsent -= len(c.buf)
			if q.at == len(q.chunks)-1 {
				q.off = len(c.buf)
				break
			}
			q.at++
			continue
		}
		for s, p := c.first, 0; s <= a; s++ {
			n := wire.Size + wire.LengthOf(c.buf[p:])
			p += n
			q.off = p
			q.unsent -= n
		}
		break
	}
	q.ack(a)
}

// drop frees everything.
func (q *queue) drop() {
	for _, c := range q.chunks {
		putChunk(c)
	}
	q.chunks, q.at, q.off, q.retained, q.unsent = nil, 0, 0, 0, 0
}

package flight

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
	"github.com/serry-project/serry/internal/slots"
)

// A ring holds the last entries of a group. Who begins an operation takes the next index, which is the place in the ring
// and its turn. All words are atomic: who dumps reads them while they change, and tells by the tag in the last word, and by
// how far the indices have come, whether what it has read is one entry.
//
// The words of an entry. They are few and packed because each atomic store is a locked instruction.
//
//	0  sequence (48 bits), operation (8), dtype (8)
//	1  bytes in (32), bytes out (32); if they do not fit: bytes in
//	2  created
//	3  started
//	4  ended
//	5  bytes out, if they did not fit
//	6  state: epoch (32), peer (10), started, outcome (4), uneven, wide, tag (15)
const (
	wCall = iota
	wBytes
	wCreated
	wStarted
	wEnded
	wWide
	wState
	entryWords = 8 // a cache line on most machines
)

type entry [entryWords]atomic.Uint64

type words [entryWords]uint64

// The state word.
const (
	peerShift    = 32
	peerMask     = slots.Max - 1
	started      = 1 << 42
	outcomeShift = 43
	outcomeMask  = 15
	uneven       = 1 << 47
	wide         = 1 << 48
	tagShift     = 49
	busy         = 1 << tagShift // of a place that is claimed
)

const (
	seqBits  = 48
	seqMask  = 1<<seqBits - 1
	opShift  = 48
	dtShift  = 56
	halfMask = math.MaxUint32
)

// If several goroutines may record at once (shared), one of them may stand still while the rest come round to its place. So
// they claim a place before they write to it; who finds it claimed leaves it, and what he has to say is not remembered.
type ring struct {
	head    atomic.Uint64 // the next index
	entries []entry       // a power of two of them
	bits    uint8
	shared  bool
}

func newRing(bits uint8, shared bool) *ring {
	return &ring{entries: make([]entry, 1<<bits), bits: bits, shared: shared}
}

func (r *ring) at(i uint64) *entry { return &r.entries[i&(1<<r.bits-1)] }

// tag tells the turns of a place apart, and all of them from none and from busy.
func (r *ring) tag(i uint64) uint64 { return i>>r.bits&(1<<14-1) | 1<<14 }

// claimed is the state of entry i, if it may now be written to and its place is not another's.
func (r *ring) claimed(i uint64) (e *entry, was uint64, ok bool) {
	e = r.at(i)
	if was = e[wState].Load(); was>>tagShift != r.tag(i) {
		return e, was, false
	}
	return e, was, !r.shared || e[wState].CompareAndSwap(was, busy)
}

// begin takes the next index and writes its entry.
func (r *ring) begin(c *Call, epoch uint64, now time.Duration) uint64 {
	i := r.head.Add(1) - 1
	e := r.at(i)
	if r.shared {
		was := e[wState].Load()
		if was>>tagShift == busy>>tagShift || !e[wState].CompareAndSwap(was, busy) {
			return i
		}
	}
	state := epoch&halfMask | uint64(c.Peer&peerMask)<<peerShift | r.tag(i)<<tagShift
	if c.Uneven {
		state |= uneven
	}
	e[wCall].Store(c.Seq&seqMask | uint64(c.Op)<<opShift | uint64(c.DType)<<dtShift)
	if in, out := uint64(c.In), uint64(c.Out); in|out <= halfMask {
		e[wBytes].Store(in | out<<32)
	} else {
		state |= wide
		e[wBytes].Store(in)
		e[wWide].Store(out)
	}
	e[wCreated].Store(uint64(now))
	e[wState].Store(state)
	return i
}

// start says that entry i waits for others, in a version.
func (r *ring) start(i, epoch uint64, now time.Duration) {
	if e, was, ok := r.claimed(i); ok {
		if was&started == 0 {
			e[wStarted].Store(uint64(now))
		}
		e[wState].Store(was&^halfMask | epoch&halfMask | started)
	}
}

func (r *ring) end(i uint64, out ops.Outcome, epoch uint64, now time.Duration) {
	if e, was, ok := r.claimed(i); ok {
		e[wEnded].Store(uint64(now))
		e[wState].Store(was&^(halfMask|outcomeMask<<outcomeShift) | epoch&halfMask | uint64(out&outcomeMask)<<outcomeShift)
	}
}

// found is an entry as it was read.
type found struct {
	at Index
	words
}

// read returns the entries that are whole, oldest first. One that is being written while it is read is left out: it can
// only be among the newest, or have become the oldest.
func (r *ring) read(kind Index) (all []found) {
	head := r.head.Load()
	size := uint64(len(r.entries))
	first := uint64(0)
	if head > size {
		first = head - size
	}
	all = make([]found, 0, head-first)
	for i := first; i < head; i++ {
		w, ok := r.copy(i)
		if now := r.head.Load(); now > i+size { // the place was taken again meanwhile, and so were those before
			all = all[:0]
			i = now - size - 1
			continue
		}
		if ok {
			all = append(all, found{kind | Index(i), w})
		}
	}
	return all
}

// copy reads entry i. What its state speaks of was stored before the state, so that is read first; whether the place was
// taken again meanwhile, read sees by the head.
func (r *ring) copy(i uint64) (w words, ok bool) {
	e := r.at(i)
	w[wState] = e[wState].Load()
	if w[wState]>>tagShift != r.tag(i) {
		return w, false
	}
	for k := range wState {
		w[k] = e[k].Load()
	}
	return w, true
}

func (w *words) seq() uint64      { return w[wCall] & seqMask }
func (w *words) op() ops.Op       { return ops.Op(w[wCall] >> opShift) }
func (w *words) dt() dtype.DType  { return dtype.DType(w[wCall] >> dtShift) }
func (w *words) epoch() uint64    { return w[wState] & halfMask }
func (w *words) peer() int        { return int(w[wState] >> peerShift & peerMask) }
func (w *words) uneven() bool     { return w[wState]&uneven != 0 }
func (w *words) started() bool    { return w[wState]&started != 0 }
func (w *words) out() ops.Outcome { return ops.Outcome(w[wState] >> outcomeShift & outcomeMask) }

func (w *words) bytes() (in, out int) {
	if w[wState]&wide != 0 {
		return int(w[wBytes]), int(w[wWide])
	}
	return int(w[wBytes] & halfMask), int(w[wBytes] >> 32)
}

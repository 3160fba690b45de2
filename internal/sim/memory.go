package sim

import (
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device/host"
)

// memory is how a process reaches the memory of its host: each access is a place where others may run, or where it dies.
// Only its own arena may be stored to; what is shared changes by compare-and-swap.
type memory struct{ p *proc }

var _ collectives.Memory = memory{}

// access gives way now and then. What a dead process still does while its stack unwinds has no effect.
func (p *proc) access() {
	w := p.w
	t := w.cur
	if t == nil || t.p != p || p.dead {
		return
	}
	w.accesses++
	if w.rnd.Uint32()&w.grain != 0 {
		return
	}
	d := time.Duration(w.rnd.Uint32() & 4095)
	if w.rnd.Uint32()&127 == 0 {
		d = w.between(0, 3*time.Millisecond) // off its core
	}
	if w.burnt(p) {
		w.crash(p, 0)
	}
	p.inside = t
	w.sleep(t, d)
}

// owner says whose memory b is: this process's, shared words, or a peer's.
func (m memory) mine(b []byte) (own, shared bool) {
	same := func(a []byte) bool { return len(a) > 0 && len(b) > 0 && &a[0] == &b[0] }
	return same(m.p.arena), same(m.p.words)
}

type word struct {
	*atomic.Uint64
	p           *proc
	own, shared bool
}

func (x word) Load() uint64 {
	x.p.access()
	return x.Uint64.Load()
}

func (x word) Store(v uint64) {
	x.p.access()
	if x.p.dead {
		return
	}
	if !x.own && !x.shared {
		x.p.w.violate("P4", "%v stores into another process's memory", x.p)
	}
	x.Uint64.Store(v)
}

func (x word) CompareAndSwap(old, new uint64) bool {
	x.p.access()
	if x.p.dead {
		return true
	}
	if !x.own && !x.shared {
		x.p.w.violate("P4", "%v swaps in another process's memory", x.p)
	}
	return x.Uint64.CompareAndSwap(old, new)
}

// Word64 implements collectives.Memory.
func (m memory) Word64(b []byte, off int) collectives.Word {
	own, shared := m.mine(b)
	return word{host.Word64(b, off), m.p, own, shared}
}

type word32Key = atomic.Uint32

type word32 struct {
	*atomic.Uint32
	p *proc
}

func (x word32) Load() uint32 {
	x.p.access()
	return x.Uint32.Load()
}

func (x word32) Store(v uint32) {
	if x.p.access(); !x.p.dead {
		x.Uint32.Store(v)
	}
}

func (x word32) CompareAndSwap(old, new uint32) bool {
	x.p.access()
	return x.p.dead || x.Uint32.CompareAndSwap(old, new)
}

func (x word32) Add(d uint32) uint32 {
	if x.p.access(); x.p.dead {
		return 0
	}
	return x.Uint32.Add(d)
}

// Word32 implements collectives.Memory.
func (m memory) Word32(b []byte, off int) collectives.Word32 { return word32{host.Word32(b, off), m.p} }

// Copy implements collectives.Memory: others may run in the middle of it.
func (m memory) Copy(dst, src []byte) {
	n := len(src) / 2
	copy(dst, src[:n])
	m.p.access()
	copy(dst[n:], src[n:])
}

// Wait implements collectives.Memory.
func (m memory) Wait(x collectives.Word32, is uint32, d time.Duration) {
	p, w, key := m.p, m.p.w, x.(word32).Uint32
	t := w.cur
	if t == nil || t.p != p || p.dead {
		return
	}
	p.access()
	if key.Load() != is {
		return
	}
	t.futex = key
	w.sleepers = append(w.sleepers, t)
	w.sleep(t, d)
	t.awake()
}

func (t *thread) awake() {
	t.futex = nil
	s := t.p.w.sleepers
	for i, x := range s {
		if x == t {
			s[i] = s[len(s)-1]
			t.p.w.sleepers = s[:len(s)-1]
			return
		}
	}
}

// Wake implements collectives.Memory.
func (m memory) Wake(x collectives.Word32) {
	p, w, key := m.p, m.p.w, x.(word32).Uint32
	if p.access(); p.dead {
		return
	}
	for _, t := range w.sleepers {
		if t.futex == key {
			t.futex = nil
			w.wake(t, w.between(time.Microsecond, 40*time.Microsecond))
		}
	}
}

// Yield implements collectives.Memory.
func (m memory) Yield() { m.p.yield() }

func (p *proc) yield() {
	w := p.w
	if t := w.cur; t != nil && t.p == p && !p.dead {
		w.sleep(t, w.between(2*time.Microsecond, 60*time.Microsecond))
	}
}

// Now implements collectives.Memory.
func (m memory) Now() time.Duration { return m.p.Now() }

// Rand implements collectives.Memory.
func (m memory) Rand() uint32 { return m.p.w.rnd.Uint32() }

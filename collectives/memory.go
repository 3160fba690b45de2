package collectives

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/device/host"
)

// Word is a 64-bit word that processes share; *atomic.Uint64 is one.
type Word interface {
	Load() uint64
	Store(uint64)
	CompareAndSwap(old, new uint64) bool
}

// Word32 is a 32-bit word on which one can sleep; *atomic.Uint32 is one.
type Word32 interface {
	Load() uint32
	Store(uint32)
	CompareAndSwap(old, new uint32) bool
	Add(delta uint32) uint32
}

// Memory is what a Comm's shared words are made of, how a caller sleeps on one, and the clock. Production has the machine's
// own; a simulation supplies one whose words stop before (and after) each access, and runs others meanwhile.
//
// A Comm holds no lock while a method of its Memory, or of a word of it, runs. Besides the words processes share bytes
// that are loaded and stored plainly: what a rank puts into its slot lies between two accesses to words of it, or in Copy;
// what it reads in a peer's slot comes right after an access, so who wants others to run in between stops after it too.
type Memory interface {
	// Word64 and Word32 are the 8 and 4 bytes at b[off:], aligned. Two words of the same bytes are the same word. They are
	// made once, when a Comm or an area is, and for entries of directory and index each time.
	Word64(b []byte, off int) Word
	Word32(b []byte, off int) Word32

	// Copy copies a contribution into or out of a slot. dst and src have the same length. (A reduction reads slots itself.)
	Copy(dst, src []byte)

	// Wait sleeps until somebody wakes w, unless w says something else than is; for at most d. It may return at any time.
	Wait(w Word32, is uint32, d time.Duration)
	// Wake wakes all who sleep on w.
	Wake(w Word32)
	// Yield waits a little for another process.
	Yield()

	// Now is a monotonic clock.
	Now() time.Duration
	// Rand is any number; places in the host's words are drawn with it.
	Rand() uint32
}

// machine is the Memory of production.
type machine struct{}

func (machine) Word64(b []byte, off int) Word   { return host.Word64(b, off) }
func (machine) Word32(b []byte, off int) Word32 { return host.Word32(b, off) }
func (machine) Copy(dst, src []byte)            { copy(dst, src) }
func (machine) Wait(w Word32, is uint32, d time.Duration) {
	_, _ = host.FutexWait(w.(*atomic.Uint32), is, d)
}
func (machine) Wake(w Word32)      { _, _ = host.FutexWake(w.(*atomic.Uint32), 1<<30) }
func (machine) Yield()             { host.SchedYield() }
func (machine) Now() time.Duration { return time.Duration(host.Nanotime()) }
func (machine) Rand() uint32       { return rand.Uint32() }

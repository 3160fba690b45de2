package host

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// LineBytes is the distance that words of different writers keep from each
// other: two cache lines, because adjacent lines are prefetched in pairs.
const LineBytes = 128

// Word32 returns the 4 bytes at b[off:] as an atomic word. It panics if they
// are not all inside b or not aligned: offsets come from a layout that is
// fixed, never from a peer.
func Word32(b []byte, off int) *atomic.Uint32 {
	return (*atomic.Uint32)(word(b, off, 4))
}

// Word64 returns the 8 bytes at b[off:] as an atomic word, like Word32.
func Word64(b []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(word(b, off, 8))
}

func word(b []byte, off, size int) unsafe.Pointer {
	if off < 0 || off > len(b)-size {
		panic(fmt.Sprintf("host: word of %d bytes at offset %d of a region of %d bytes", size, off, len(b)))
	}
	p := unsafe.Pointer(&b[off])
	if uintptr(p)&uintptr(size-1) != 0 {
		panic(fmt.Sprintf("host: word of %d bytes at offset %d is not aligned", size, off))
	}
	return p
}

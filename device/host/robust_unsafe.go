//go:build linux

package host

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// robustHead is the kernel's struct robust_list_head.
type robustHead struct {
	next    uintptr
	offset  int
	pending uintptr
}

// robustNode is the kernel's struct robust_list, as far from the next one as
// the words are.
type robustNode struct {
	next uintptr
	_    [RobustStride - unsafe.Sizeof(uintptr(0))]byte
}

// Robust is the registration of one thread's death words.
type Robust struct {
	list  []byte // private mapping: the head, then n nodes
	words []byte
	n     int
}

// RegisterRobust makes the kernel mark the first n words of region (see
// RobustStride) when the calling thread dies. region is shared memory that
// stays mapped as long as the process lives, or until Close.
//
// The caller has called runtime.LockOSThread, on a goroutine that lives as
// long as the process: when that thread ends, the process counts as dead. The
// thread must not run C code that holds robust mutexes, because a thread has
// one such list and this call replaces it.
func RegisterRobust(region []byte, n int) (*Robust, error) {
	if n < 1 || n > RobustMax || len(region) < RobustBytes(n) {
		return nil, fmt.Errorf("host: robust list: %d words in %d bytes: want 1 to %d words and %d bytes each",
			n, len(region), RobustMax, RobustStride)
	}
	headSize := int(unsafe.Sizeof(robustHead{}))
	first := (headSize + RobustStride - 1) / RobustStride * RobustStride
	list, err := unix.Mmap(-1, 0, first+n*RobustStride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("host: robust list of %d words: mmap: %w", n, err)
	}
	head := (*robustHead)(unsafe.Pointer(&list[0]))
	headAddr := uintptr(unsafe.Pointer(head))
	nodes := unsafe.Slice((*robustNode)(unsafe.Pointer(&list[first])), n)
	for i := range nodes {
		nodes[i].next = headAddr
		if i+1 < n {
			nodes[i].next = uintptr(unsafe.Pointer(&nodes[i+1]))
		}
	}
	head.next = uintptr(unsafe.Pointer(&nodes[0]))
	head.offset = int(uintptr(unsafe.Pointer(RobustWord(region, 0))) - uintptr(unsafe.Pointer(&nodes[0])))
	tid := uint32(unix.Gettid())
	for i := range n {
		RobustWord(region, i).Store(tid&futexTidMask | futexWaiters)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SET_ROBUST_LIST, headAddr, uintptr(headSize), 0); errno != 0 {
		for i := range n {
			RobustWord(region, i).Store(0)
		}
		_ = unix.Munmap(list)
		return nil, fmt.Errorf("host: robust list of %d words: set_robust_list: %w", n, errno)
	}
	return &Robust{list: list, words: region, n: n}, nil
}

// Close takes the registration back: the thread's death is marked nowhere, and
// the region may be unmapped. It may be called from any thread and more than
// once. The list itself, a page or two, stays mapped, because the kernel still
// knows its address.
func (r *Robust) Close() {
	if r.list == nil {
		return
	}
	head := (*robustHead)(unsafe.Pointer(&r.list[0]))
	head.next = uintptr(unsafe.Pointer(head)) // the empty list
	for i := range r.n {
		RobustWord(r.words, i).Store(0)
	}
	r.list, r.words = nil, nil
}

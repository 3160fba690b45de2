//go:build linux

package host

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait    = 0
	futexWake    = 1
	futex2Size32 = 2
)

// FutexWait sleeps until addr is woken, as long as it holds val. It works
// across processes (the word lies in a shared mapping) and on a read-only
// mapping. A negative timeout is none. It does not allocate.
func FutexWait(addr *atomic.Uint32, val uint32, timeout time.Duration) (FutexResult, error) {
	var ts unix.Timespec
	var tsp *unix.Timespec
	if timeout >= 0 {
		ts = unix.NsecToTimespec(int64(timeout))
		tsp = &ts
	}
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), futexWait, uintptr(val),
		uintptr(unsafe.Pointer(tsp)), 0, 0)
	return futexResult(errno, "futex wait")
}

// FutexWake wakes at most n of those who wait on addr and returns how many it
// woke. It cannot block.
func FutexWake(addr *atomic.Uint32, n int) (int, error) {
	r, _, errno := unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), futexWake,
		uintptr(max(min(n, 1<<30), 0)), 0, 0, 0)
	if errno != 0 {
		return 0, fmt.Errorf("host: futex wake: %w", errno)
	}
	return int(r), nil
}

// waitv is the kernel's struct futex_waitv.
type waitv struct {
	val   uint64
	uaddr uint64
	flags uint32
	_     uint32
}

// noWaitv is set once the kernel, or a seccomp filter, refused futex_waitv.
var noWaitv atomic.Bool

// waitvSlice is how often the fallback looks at all words but the first.
const waitvSlice = 2 * time.Millisecond

// FutexWaitv sleeps until one of the words is woken, as long as each holds its
// value. At most FutexWaitvMax words. A negative timeout is none. The words lie
// outside the Go stack, in a mapping that lasts at least as long as the wait.
//
// Before Linux 5.16, and under seccomp filters that do not know futex_waitv,
// it sleeps on the first word and looks at the others every 2 ms: put the word
// that must wake at once first.
func FutexWaitv(words []*atomic.Uint32, vals []uint32, timeout time.Duration) (FutexResult, error) {
	if len(words) == 0 || len(words) > FutexWaitvMax || len(vals) != len(words) {
		return 0, fmt.Errorf("host: futex_waitv: %d words and %d values: want 1 to %d of each", len(words), len(vals), FutexWaitvMax)
	}
	if noWaitv.Load() {
		return waitvFallback(words, vals, timeout)
	}
	var ts unix.Timespec
	var tsp *unix.Timespec
	if timeout >= 0 { // the system call takes a point in time
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("host: futex_waitv: clock_gettime: %w", err)
		}
		ts = unix.NsecToTimespec(ts.Nano() + int64(timeout))
		tsp = &ts
	}
	var wv [FutexWaitvMax]waitv
	for i, w := range words {
		wv[i] = waitv{val: uint64(vals[i]), uaddr: uint64(uintptr(unsafe.Pointer(w))), flags: futex2Size32}
	}
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX_WAITV, uintptr(unsafe.Pointer(&wv)), uintptr(len(words)), 0,
		uintptr(unsafe.Pointer(tsp)), unix.CLOCK_MONOTONIC, 0)
	runtime.KeepAlive(words)
	if errno == unix.ENOSYS || errno == unix.EPERM {
		noWaitv.Store(true)
		return waitvFallback(words, vals, timeout)
	}
	return futexResult(errno, "futex_waitv")
}

func waitvFallback(words []*atomic.Uint32, vals []uint32, timeout time.Duration) (FutexResult, error) {
	start := Nanotime()
	for {
		for i, w := range words {
			if w.Load() != vals[i] {
				return FutexChanged, nil
			}
		}
		slice := waitvSlice
		if timeout >= 0 {
			left := timeout - time.Duration(Nanotime()-start)
			if left <= 0 {
				return FutexTimedOut, nil
			}
			slice = min(slice, left)
		}
		r, err := FutexWait(words[0], vals[0], slice)
		if err != nil || r != FutexTimedOut {
			return r, err
		}
	}
}

func futexResult(errno syscall.Errno, call string) (FutexResult, error) {
	switch errno {
	case 0, unix.EINTR:
		return FutexWoken, nil
	case unix.EAGAIN:
		return FutexChanged, nil
	case unix.ETIMEDOUT:
		return FutexTimedOut, nil
	}
	return 0, fmt.Errorf("host: %s: %w", call, errno)
}

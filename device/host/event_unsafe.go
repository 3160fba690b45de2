//go:build linux

package host

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// NewEventfd returns a non-blocking, close-on-exec eventfd whose count is 0.
func NewEventfd() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("host: eventfd: %w", err)
	}
	return fd, nil
}

// EventfdSignal adds one to the count, which wakes whoever polls it. It cannot
// block and does not allocate.
func EventfdSignal(fd int) error {
	one := uint64(1)
	_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one)), 8)
	if errno != 0 && errno != unix.EAGAIN { // EAGAIN: the count is at its limit, so it is readable
		return fmt.Errorf("host: write to eventfd %d: %w", fd, errno)
	}
	return nil
}

// EventfdDrain sets the count to 0 and returns what it was.
func EventfdDrain(fd int) (uint64, error) {
	var n uint64
	_, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&n)), 8)
	if errno == unix.EAGAIN {
		return 0, nil
	}
	if errno != 0 {
		return 0, fmt.Errorf("host: read of eventfd %d: %w", fd, errno)
	}
	return n, nil
}

// Epoll is an epoll instance with its buffers. Add, Mod and Del may be called
// from any goroutine; Wait from one at a time.
type Epoll struct {
	fd  int
	raw []unix.EpollEvent
	out []Event
}

// EpollCreate returns an instance whose Wait reports at most maxEvents at once.
func EpollCreate(maxEvents int) (*Epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("host: epoll_create1: %w", err)
	}
	maxEvents = max(maxEvents, 1)
	return &Epoll{fd: fd, raw: make([]unix.EpollEvent, maxEvents), out: make([]Event, maxEvents)}, nil
}

// Add watches fd for the conditions in want and reports them with token.
func (e *Epoll) Add(fd int, want Ready, token uint64) error {
	return e.ctl(unix.EPOLL_CTL_ADD, "add", fd, want, token)
}

// Mod changes what fd is watched for and its token.
func (e *Epoll) Mod(fd int, want Ready, token uint64) error {
	return e.ctl(unix.EPOLL_CTL_MOD, "mod", fd, want, token)
}

// Del stops the watching of fd. An event of it that Wait has returned already
// is still in the caller's hands.
func (e *Epoll) Del(fd int) error { return e.ctl(unix.EPOLL_CTL_DEL, "del", fd, 0, 0) }

func (e *Epoll) ctl(op int, name string, fd int, want Ready, token uint64) error {
	ev := unix.EpollEvent{Events: uint32(want), Fd: int32(uint32(token)), Pad: int32(uint32(token >> 32))}
	if err := unix.EpollCtl(e.fd, op, fd, &ev); err != nil {
		return fmt.Errorf("host: epoll_ctl %s of descriptor %d: %w", name, fd, err)
	}
	return nil
}

// Wait returns the descriptors that are ready, or none after the timeout
// (rounded up to milliseconds; negative is none) or a signal. With timeout 0 it
// cannot block. The slice is valid until the next Wait. It does not allocate.
func (e *Epoll) Wait(timeout time.Duration) ([]Event, error) {
	var n uintptr
	var errno syscall.Errno
	size := uintptr(len(e.raw))
	switch {
	case timeout == 0:
		n, _, errno = unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&e.raw[0])), size, 0, 0, 0)
	case timeout < 0:
		n, _, errno = unix.Syscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&e.raw[0])), size, ^uintptr(0), 0, 0)
	default:
		ms := min((timeout+time.Millisecond-1)/time.Millisecond, 1<<30)
		n, _, errno = unix.Syscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(&e.raw[0])), size, uintptr(ms), 0, 0)
	}
	if errno == unix.EINTR {
		return nil, nil
	}
	if errno != 0 {
		return nil, fmt.Errorf("host: epoll_pwait: %w", errno)
	}
	for i := range e.raw[:n] {
		r := &e.raw[i]
		e.out[i] = Event{Token: uint64(uint32(r.Fd)) | uint64(uint32(r.Pad))<<32, Ready: Ready(r.Events)}
	}
	return e.out[:n], nil
}

// FD is the descriptor of the instance, which can itself be polled.
func (e *Epoll) FD() int { return e.fd }

// Close closes the instance. No Wait may be running.
func (e *Epoll) Close() error {
	if e.fd < 0 {
		return nil
	}
	err := unix.Close(e.fd)
	e.fd = -1
	if err != nil {
		return fmt.Errorf("host: close of epoll: %w", err)
	}
	return nil
}

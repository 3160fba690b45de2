//go:build !linux

package host

import (
	"runtime"
	"sync/atomic"
	"time"
)

// MaxFds is the largest number of descriptors in one message.
const MaxFds = 16

// Segment is anonymous shared memory; see the Linux version.
type Segment struct{}

// CreateSegment is unsupported here.
func CreateSegment(name string, size int) (*Segment, error) { return nil, ErrUnsupported }

// CreateSparse is unsupported here.
func CreateSparse(name string, size, reserve int) (*Segment, error) { return nil, ErrUnsupported }

// Reserve is unsupported here.
func (s *Segment) Reserve(n int) error { return ErrUnsupported }

// CreateShared is unsupported here.
func CreateShared(name string, size int) (*Segment, error) { return nil, ErrUnsupported }

// OpenSegment is unsupported here.
func OpenSegment(fd, size int, writable bool) (*Segment, error) { return nil, ErrUnsupported }

// Bytes is nil here.
func (s *Segment) Bytes() []byte { return nil }

// Keep does nothing here.
func (s *Segment) Keep() {}

// FD is -1 here.
func (s *Segment) FD() int { return -1 }

// Close does nothing here.
func (s *Segment) Close() error { return nil }

// FutexWait is unsupported here.
func FutexWait(addr *atomic.Uint32, val uint32, timeout time.Duration) (FutexResult, error) {
	return 0, ErrUnsupported
}

// FutexWake is unsupported here.
func FutexWake(addr *atomic.Uint32, n int) (int, error) { return 0, ErrUnsupported }

// FutexWaitv is unsupported here.
func FutexWaitv(words []*atomic.Uint32, vals []uint32, timeout time.Duration) (FutexResult, error) {
	return 0, ErrUnsupported
}

// SchedYield lets another goroutine run.
func SchedYield() { runtime.Gosched() }

// Robust is the registration of one thread's death words.
type Robust struct{}

// RegisterRobust is unsupported here.
func RegisterRobust(region []byte, n int) (*Robust, error) { return nil, ErrUnsupported }

// Close does nothing here.
func (r *Robust) Close() {}

// DeathWatch waits for the death words of many peers; see the Linux version.
type DeathWatch struct{}

// NewDeathWatch is unsupported here.
func NewDeathWatch(onDeath func(id uint64)) (*DeathWatch, error) { return nil, ErrUnsupported }

// Add is unsupported here.
func (w *DeathWatch) Add(id uint64, word *atomic.Uint32) error { return ErrUnsupported }

// Remove does nothing here.
func (w *DeathWatch) Remove(id uint64) {}

// Close does nothing here.
func (w *DeathWatch) Close() {}

// PidfdOpen is unsupported here.
func PidfdOpen(pid int) (int, error) { return -1, ErrUnsupported }

// SelfPidfd is unsupported here.
func SelfPidfd() (int, error) { return -1, ErrUnsupported }

// Exited is unsupported here.
func Exited(pidfd int) (bool, error) { return false, ErrUnsupported }

// SendFds is unsupported here.
func SendFds(sockfd int, payload []byte, fds ...int) (int, error) { return 0, ErrUnsupported }

// RecvFds is unsupported here.
func RecvFds(sockfd int, buf []byte) (n int, fds []int, err error) { return 0, nil, ErrUnsupported }

// PeerCred is unsupported here.
func PeerCred(sockfd int) (pid, uid int, err error) { return 0, 0, ErrUnsupported }

// NewEventfd is unsupported here.
func NewEventfd() (int, error) { return -1, ErrUnsupported }

// EventfdSignal is unsupported here.
func EventfdSignal(fd int) error { return ErrUnsupported }

// EventfdDrain is unsupported here.
func EventfdDrain(fd int) (uint64, error) { return 0, ErrUnsupported }

// Epoll is an epoll instance; see the Linux version.
type Epoll struct{}

// EpollCreate is unsupported here.
func EpollCreate(maxEvents int) (*Epoll, error) { return nil, ErrUnsupported }

// Add is unsupported here.
func (e *Epoll) Add(fd int, want Ready, token uint64) error { return ErrUnsupported }

// Mod is unsupported here.
func (e *Epoll) Mod(fd int, want Ready, token uint64) error { return ErrUnsupported }

// Del is unsupported here.
func (e *Epoll) Del(fd int) error { return ErrUnsupported }

// Wait is unsupported here.
func (e *Epoll) Wait(timeout time.Duration) ([]Event, error) { return nil, ErrUnsupported }

// FD is -1 here.
func (e *Epoll) FD() int { return -1 }

// Close does nothing here.
func (e *Epoll) Close() error { return nil }

// Identity is unsupported here.
func Identity() (Ident, error) { return Ident{}, ErrUnsupported }

// Cores is the number of cores that this process may use at once.
func Cores() int { return runtime.NumCPU() }

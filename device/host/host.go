// Package host wraps what the shared-memory runtime needs from the operating
// system: sealed anonymous segments, futexes on shared words, death words that
// the kernel marks, pidfds, descriptor passing, epoll and eventfd, and who and
// where this process is.
//
// It knows nothing of ranks, groups or messages. On systems other than Linux
// everything compiles and what cannot work returns [ErrUnsupported].
package host

import (
	"errors"
	"fmt"
	"time"
)

// ErrUnsupported is what every operation returns that this operating system or
// this kernel does not have. It wraps errors.ErrUnsupported.
var ErrUnsupported = fmt.Errorf("host: %w", errors.ErrUnsupported)

// ErrNoMemory is wrapped by the error of CreateSegment and CreateShared when
// the host, the cgroup or a resource limit has no room for the segment.
var ErrNoMemory = errors.New("not enough memory")

// ErrNotSealed is wrapped by the error of OpenSegment for a descriptor whose
// owner could still truncate it, which would turn a load into SIGBUS.
var ErrNotSealed = errors.New("not sealed against shrinking")

var clockBase = time.Now()

// Nanotime is a monotonic clock in nanoseconds. Its zero is near the start of
// the process, so values of different processes cannot be compared.
func Nanotime() int64 { return int64(time.Since(clockBase)) }

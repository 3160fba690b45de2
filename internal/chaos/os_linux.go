package chaos

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// errNoSocket: the process has no TCP connection to hurt.
var errNoSocket = errors.New("chaos: this rank has no TCP connection")

// hurtSocket closes the nth of this process's TCP connections in both directions, or writes into it what is no frame.
func hurtSocket(n int, garble bool) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var fds []int
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, err := unix.Getpeername(fd); err != nil {
			continue
		}
		if sa, err := unix.Getsockname(fd); err == nil {
			switch sa.(type) {
			case *unix.SockaddrInet4, *unix.SockaddrInet6:
				fds = append(fds, fd)
			}
		}
	}
	if len(fds) == 0 {
		return errNoSocket
	}
	slices.Sort(fds)
	fd := fds[n%len(fds)]
	if garble {
		_, err = unix.Write(fd, []byte("this is no frame, and fits nowhere in one"))
	} else {
		err = unix.Shutdown(fd, unix.SHUT_RDWR)
	}
	if err != nil {
		return fmt.Errorf("chaos: connection %d of %d: %w", n%len(fds), len(fds), err)
	}
	return nil
}

// stopHere stops the process, this thread first: kill(2) lets another thread take the signal, and this one go on for a
// while, beyond the point at which it was to stop.
func stopHere() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP)
}

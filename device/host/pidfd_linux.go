package host

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// PidfdOpen returns a close-on-exec pidfd of a process of this pid namespace.
func PidfdOpen(pid int) (int, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, fmt.Errorf("host: pidfd_open of process %d: %w", pid, err)
	}
	return fd, nil
}

// SelfPidfd returns a pidfd of this process, to be passed to peers: it tells
// them of our death in whatever namespace they are.
func SelfPidfd() (int, error) { return PidfdOpen(unix.Getpid()) }

// Exited says whether the process of a pidfd has ended. It does not block.
func Exited(pidfd int) (bool, error) {
	return waitExit(pidfd, 0)
}

func waitExit(pidfd, timeoutMillis int) (bool, error) {
	p := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(p, timeoutMillis)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("host: poll of pidfd %d: %w", pidfd, err)
		}
		if p[0].Revents&unix.POLLNVAL != 0 {
			return false, fmt.Errorf("host: poll of pidfd %d: %w", pidfd, unix.EBADF)
		}
		return p[0].Revents&(unix.POLLIN|unix.POLLHUP) != 0, nil
	}
}

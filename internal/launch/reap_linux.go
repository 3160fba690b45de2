package launch

import (
	"errors"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// reap waits for the end of r, ends its children, and then takes the exit code. In between the rank is a zombie, so that
// neither its number nor its group can be another's.
func (l *Launcher) reap(r *rank, cmd *exec.Cmd) error {
	for errors.Is(unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	l.mu.Lock()
	r.signalGroup(syscall.SIGKILL)
	r.state = ending
	l.mu.Unlock()
	return cmd.Wait()
}

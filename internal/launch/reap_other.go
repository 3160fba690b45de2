//go:build !linux

package launch

import (
	"os/exec"
	"syscall"
)

// reap waits for the end of r and then ends its children. Its number is free by then and could, in principle, be that of
// another group already; only Linux offers better.
func (l *Launcher) reap(r *rank, cmd *exec.Cmd) error {
	err := cmd.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	r.signalGroup(syscall.SIGKILL)
	r.state = ending
	return err
}

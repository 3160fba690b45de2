//go:build unix

package launch

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownGroup makes a process the first of its process group, so that a signal reaches its children too, and so that
// Ctrl-C in a terminal reaches the launcher alone.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// signalGroup sends sig to the rank and its children. It must not have been waited for yet.
func (r *rank) signalGroup(sig syscall.Signal) {
	err := syscall.Kill(-r.cmd.Process.Pid, sig)
	if errors.Is(err, syscall.ESRCH) { // it went into another group
		_ = r.cmd.Process.Signal(sig)
	}
}

func sysSignalName(s syscall.Signal) string { return unix.SignalName(s) }

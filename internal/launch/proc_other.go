//go:build !unix

package launch

import "syscall"

func ownGroup() *syscall.SysProcAttr { return nil }

func (r *rank) signalGroup(syscall.Signal) { _ = r.cmd.Process.Kill() }

func sysSignalName(s syscall.Signal) string { return s.String() }

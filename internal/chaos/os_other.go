//go:build !linux

package chaos

import (
	"errors"
	"os"
	"syscall"
)

var errNoSocket = errors.New("chaos: connections are hurt only on linux")

func hurtSocket(n int, garble bool) error { return errNoSocket }

func stopHere() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) }

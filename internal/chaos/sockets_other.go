//go:build !linux

package chaos

import "errors"

var errNoSocket = errors.New("chaos: connections are hurt only on linux")

func hurtSocket(n int, garble bool) error { return errNoSocket }

//go:build !linux

package bench

import (
	"errors"
	"time"
)

var errLinux = errors.New("bench: this needs Linux")

func mono() int64 { return time.Now().UnixNano() }

func resident(n int64) error { return errLinux }

func cpu(pid int) (ticked, exact time.Duration, err error) { return 0, 0, errLinux }

func used() usage { return usage{} }

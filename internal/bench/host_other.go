//go:build !linux

package bench

import (
	"errors"
	"time"
)

var errLinux = errors.New("bench: this needs Linux")

func cpu(pid int) (ticked, exact time.Duration, err error) { return 0, 0, errLinux }

func used() usage { return usage{} }

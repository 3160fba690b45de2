//go:build !linux

package harness

import (
	"errors"
	"time"
)

// Mono is a clock that all processes of this system share, in nanoseconds.
func Mono() int64 { return time.Now().UnixNano() }

// Touch takes and touches memory; not on this system.
func Touch(n int64) error { return errors.New("harness: memory is touched only on linux") }

// State is not known on this system.
func (p *Proc) State() string { return "" }

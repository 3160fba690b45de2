//go:build !unix

package devicetest

import "testing"

func descriptor(s *state) { s.Skip("nothing to wait with on this system") }

func noLeak(t *testing.T, _ func(t *testing.T) Pair) { t.Skip("nothing to count with on this system") }

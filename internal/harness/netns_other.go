//go:build !linux

package harness

import "testing"

// Host is a network namespace; there are none on this system.
type Host struct{ IP string }

// Hosts skips the test.
func Hosts(t testing.TB, n int) []*Host {
	t.Skip("no network namespaces on this system")
	return nil
}

// In makes a process run on this host.
func (h *Host) In() Option { return nil }

// Cut takes the way between this host and the others down or up.
func (h *Host) Cut(down bool) error { return nil }

func enterNetns() {}

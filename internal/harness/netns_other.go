//go:build !linux

package harness

import (
	"errors"
	"os/exec"
)

var errHosts = errors.New("harness: there are no network namespaces on this system")

// Network is hosts that are joined by a switch; there are none on this system.
type Network struct{ Hosts []*Host }

// Host is a network namespace; there are none on this system.
type Host struct{ IP string }

// NewNetwork says that there is none on this system.
func NewNetwork(n int) (*Network, error) { return nil, errHosts }

// Close gives up the namespaces.
func (w *Network) Close() {}

// Renew takes a host away and makes another with its address.
func (w *Network) Renew(i int) error { return errHosts }

// Close gives up the namespace of one host.
func (h *Host) Close() {}

// In makes a process run on this host.
func (h *Host) In() Option { return func(*exec.Cmd) {} }

func (h *Host) start(*exec.Cmd) error { return errHosts }

// Cut takes the way between this host and the others down or up.
func (h *Host) Cut(down bool) error { return errHosts }

// CutTo makes what this host sends to another vanish, or not any more.
func (h *Host) CutTo(other *Host, down bool) error { return errHosts }

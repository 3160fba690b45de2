// Package device is what memory is and which links reach it: the contract of a Link, which the packages below it
// implement (shm and tcp for real machines, sim on a virtual clock, faulty around any other) and devicetest proves.
package device

import (
	"errors"

	"github.com/serry-project/serry/internal/wire"
)

// Frame is a header and its payload (len(Payload) == Header.Length, at most wire.MaxPayload).
type Frame struct {
	wire.Header
	Payload []byte
}

// Caps is what a link can do beyond carrying frames. Using what is not set is a bug.
type Caps struct {
	Name         string // "shm", "tcp", ...: for logs and status
	SharesMemory bool   // the peer's segment is mapped here (Region), and ours there
	OneSidedPut  bool
	OneSidedGet  bool
	MustRegister bool // memory has to be registered before one-sided access
}

// Link joins two processes and carries frames both ways.
//
// Order: frames arrive in the order of Send, each exactly once, as long as both processes live: a link that loses its
// connection reconnects and replays. A frame that fails its checksum costs the connection, not the link.
//
// Ownership: Send has copied or written the payload when it returns. The payload that Poll hands to fn is valid until fn
// returns.
//
// Blocking: no method blocks. Send from any goroutine; Poll, Fd events and Close from one at a time.
//
// Errors: ErrFull is not a failure: send again when Poll has run. Any other error of Send or Poll is final and wraps
// ErrClosed (by us) or ErrLost (evidence about the peer, not proof); it names the peer.
type Link interface {
	// Send queues one frame. ErrFull: more than the link's backlog (8 MiB) is waiting; control kinds are never refused.
	Send(f *Frame) error
	// Poll moves what it can without blocking: flushes the backlog, reads what has come, and calls fn for each frame. It
	// returns the number of frames delivered. fn must not call Poll or Close.
	Poll(fn func(*Frame)) (int, error)
	// Fd is the descriptor to wait on, and whether it is wanted for writing too; -1: none now (sim, or reconnecting:
	// then Poll again soon).
	Fd() (fd int, write bool)
	// Caps says what the link can do.
	Caps() Caps
	// Close ends it, with what is in the backlog. Idempotent.
	Close() error
}

// The errors of a Link.
var (
	ErrFull   = errors.New("link backlog is full")
	ErrClosed = errors.New("link is closed")
	ErrLost   = errors.New("link is lost")
)

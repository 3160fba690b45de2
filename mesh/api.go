// Package mesh is what a process has once: its identity, its shared-memory segment, its listeners, one link to each
// peer, and the evidence of their deaths. Process groups, expert parallelism, transfer and store borrow it, so nothing is
// connected or registered twice.
//
// One thread of its own, the loop, waits for all sockets, pidfds, timers and posts in its own epoll and calls the
// Handler; nothing else reads a link. Memory of peers is read by anybody, inline.
package mesh

import (
	"log/slog"
	"time"

	"github.com/serry-project/serry/device"
)

// Nonce names a process for its lifetime.
type Nonce = [16]byte

// Config says how a process takes part. The zero value of a field means its default.
type Config struct {
	World  [16]byte // random id of the world: who has another one is refused
	Key    []byte   // secret of the world: every link proves it (HMAC-SHA256 challenge)
	Nonce  Nonce    // of this process; zero: drawn
	Name   string   // "rank 2", for logs and errors
	Links  string   // "auto" (default): shared memory on the same host, else TCP; "tcp": TCP for all data
	Arena  int64    // bytes of shared memory for slots (default 64 MiB)
	Listen string   // host or interface to listen on; default: the address of the route to Via, never 0.0.0.0
	Via    string   // "host:port" of the rendezvous, to find that route; empty: loopback

	// SocketDir is where unix sockets lie, if abstract ones do not reach from one container to the next: processes with
	// the same directory are on one host.
	SocketDir string

	HeartbeatEvery time.Duration                 // between processes of different hosts (default 100 ms)
	HeartbeatLimit time.Duration                 // silence that is evidence (default 1 s)
	NoChecksum     bool                          // leave CRC32C out of TCP frames
	Wrap           func(device.Link) device.Link // tests: put device/faulty around every link
	Log            *slog.Logger

	testHost uint64 // tests: a Mesh.Host of its own
}

// Refuser is a Handler that wants to know of peers that live and refuse this process for good, because they have forgotten
// it, with proof of who says so: the link will not come back. It is called like a Handler.
type Refuser interface{ Refused(p *Peer, why error) }

// Handler gets what the loop sees, on the loop's thread, one call at a time. It must not block.
type Handler interface {
	// Frame is a frame of kind >= wire.KindControl from p. The payload is valid during the call.
	Frame(p *Peer, f *device.Frame)
	// Died is proof that a process is gone for good: the kernel's, for one of this host (robust futex, pidfd), or its own
	// word when it closed its Mesh. All frames that it sent to us before have been delivered, as far as they had come.
	Died(p *Peer)
	// Silent says that a process of another host has not been heard for HeartbeatLimit; Heard takes it back.
	Silent(p *Peer)
	Heard(p *Peer)
	// Linked tells of a new peer, dialled or accepted.
	Linked(p *Peer)
	// Tick runs after every batch of the above, after Post, and when the time that it returned last is reached. It
	// returns when it wants to be called next (0: only when something happens). Times are of Now.
	Tick(now time.Duration) time.Duration
}

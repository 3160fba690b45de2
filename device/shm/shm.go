// Package shm is the link between two processes of one host: frames over a unix socket, and each one's segment mapped
// read-only by the other, so that data goes as memory that its owner writes and peers pull.
package shm

import (
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/stream"
)

// Options of a Link.
type Options struct {
	Peer    string // whom errors name
	Backlog int    // default 8 MiB
	Wake    func() // see stream.Options
}

// New returns a link without a connection: Attach gives it one.
func New(o Options) *stream.Link {
	return stream.New(stream.Options{
		Caps: device.Caps{Name: "shm", SharesMemory: true}, Peer: o.Peer, Backlog: o.Backlog, Wake: o.Wake,
	})
}

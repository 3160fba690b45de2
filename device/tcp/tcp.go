// Package tcp is the link between any two hosts: frames over a TCP connection, checked by CRC32C, replayed over the next
// connection when one is lost.
package tcp

import (
	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/stream"
)

// Options of a Link.
type Options struct {
	Peer    string // whom errors name
	NoSum   bool   // leave the checksum out; both sides alike
	Backlog int    // default 8 MiB
	Wake    func() // see stream.Options
}

// New returns a link without a connection: Attach gives it one.
func New(o Options) *stream.Link {
	return stream.New(stream.Options{
		Caps: device.Caps{Name: "tcp"}, Peer: o.Peer, Sum: !o.NoSum, Backlog: o.Backlog, Wake: o.Wake,
	})
}

// Tune sets what a connection of such a link needs: no delay, and room for what is on its way.
func Tune(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
}

package host

// Event is what Epoll.Wait returns: the token given to Add and which of the
// Ready bits are up.
type Event struct {
	Token uint64
	Ready Ready
}

// Ready is a set of conditions of a descriptor.
type Ready uint32

const (
	// ReadyIn: there is something to read, or to accept.
	ReadyIn Ready = 0x1
	// ReadyOut: there is room to write.
	ReadyOut Ready = 0x4
	// ReadyErr: the descriptor has an error. Always reported.
	ReadyErr Ready = 0x8
	// ReadyHup: both directions are closed. Always reported.
	ReadyHup Ready = 0x10
	// ReadyPeerClosed: the peer will send no more.
	ReadyPeerClosed Ready = 0x2000
	// ReadyEdge asks for one report a change instead of one a Wait.
	ReadyEdge Ready = 0x80000000
)

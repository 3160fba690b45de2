package mesh

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/shm"
	"github.com/serry-project/serry/device/stream"
	"github.com/serry-project/serry/device/tcp"
)

// Peer is another process of the world, in one incarnation. Its methods may be called from any goroutine.
type Peer struct {
	m     *Mesh
	id    uint64
	nonce Nonce
	addr  []byte
	a     *Address
	name  string
	mem   *foreign // nil: not of this host, or no memory could be shared
	given uint32   // the death word of ours that it watches
	share bool     // data goes by shared memory
	why   string   // the link is what it is

	base *stream.Link
	link device.Link // base, or what Config.Wrap made of it

	linked chan struct{} // closed when the handler knows it
	over   atomic.Bool   // dead, closed or forgotten
	silent atomic.Bool
	dead   atomic.Bool
	gone   atomic.Bool // forgotten
	dirty  atomic.Bool // the loop has been told of a backlog
	dialer atomic.Bool // we dialled the connection

	// of the loop
	started bool
	heard   time.Duration
	epoch   int  // of the connection that the epoll knows
	epWrite bool // and whether for writing
	onFrame func(*device.Frame)
	bye     bool
	failed  bool          // the link gave a final error
	busy    bool          // a redial is running
	since   time.Duration // when it was attached last

	release sync.Once
	hands   int // handshakes that are to give it a connection; of Mesh.mu
}

// Nonce names the process.
func (p *Peer) Nonce() Nonce { return p.nonce }

// Addr is its encoded address.
func (p *Peer) Addr() []byte { return p.addr }

// Name is what it calls itself: "rank 2".
func (p *Peer) Name() string { return p.name }

// SameHost says whether its memory and its death are visible here at once.
func (p *Peer) SameHost() bool { return p.mem != nil }

// Arena is its arena, read-only; nil unless data goes by shared memory, which takes the same shared words here and there
// (see Mesh.Words). It is mapped as long as the Peer is reachable,
// also when the process is dead or forgotten: who keeps the slice keeps the Peer.
func (p *Peer) Arena() []byte {
	if p.mem == nil || !p.share {
		return nil
	}
	if theirs, ours := p.mem.words.Load(), p.m.seg.wordsID().Load(); theirs != ours && theirs != 0 && ours != 0 {
		return nil
	}
	return p.mem.arena
}

// HasWords says whether the process has shared words of its host, not necessarily ours; true if it needs none. Once both
// sides have some, Arena does not change any more.
func (p *Peer) HasWords() bool { return p.mem == nil || !p.share || p.mem.words.Load() != 0 }

// Board is its board, read-only; nil unless SameHost. It is mapped as long as Arena.
func (p *Peer) Board() []byte {
	if p.mem == nil {
		return nil
	}
	return p.mem.board
}

// Send sends a frame; World is filled in here, in a copy. Errors are those of device.Link.
func (p *Peer) Send(f *device.Frame) error {
	if p.link == p.base {
		h := f.Header
		h.World = p.m.cfg.World
		return p.base.SendHeader(h, f.Payload)
	}
	c := *f
	c.World = p.m.cfg.World
	err := p.link.Send(&c)
	p.wake()
	return err
}

// Bytes is what came from and went to it over sockets.
func (p *Peer) Bytes() (in, out int64) { return p.base.Bytes() }

// Dead says whether Handler.Died was called, or is about to be.
func (p *Peer) Dead() bool { return p.dead.Load() }

// Silent says whether Handler.Silent was called, and Heard not since.
func (p *Peer) Silent() bool { return p.silent.Load() }

// Forget closes the link and stops watching: a view has dropped the process, and nothing of it counts any more. Its
// memory stays mapped as long as the Peer is reachable.
func (p *Peer) Forget() {
	if p.gone.Swap(true) {
		return
	}
	p.over.Store(true)
	m := p.m
	m.mu.Lock()
	if m.peers[p.nonce] == p {
		delete(m.peers, p.nonce)
	}
	m.mu.Unlock()
	p.base.Fail(fmt.Errorf("%w: %s was dropped from the group", device.ErrClosed, p.name))
	m.lp.do(func() { m.lp.drop(p) })
}

func (p *Peer) String() string { return p.name }

// wake makes the loop look after what Send left.
func (p *Peer) wake() {
	if !p.dirty.Swap(true) {
		p.m.lp.do(func() { p.dirty.Store(false); p.m.lp.polls = append(p.m.lp.polls, p) })
	}
}

// newPeer makes the peer of an address; mem is what the handshake got, nil for none.
func (m *Mesh) newPeer(a *Address, raw []byte, mem *foreign, given uint32, why string) *Peer {
	m.lastID++
	p := &Peer{
		m: m, id: m.lastID, nonce: a.Nonce, addr: raw, a: a, name: a.Name, mem: mem, given: given, why: why,
		share: mem != nil && !m.onlyTCP && !a.OnlyTCP, linked: make(chan struct{}), epoch: -1,
	}
	if p.name == "" {
		p.name = fmt.Sprintf("process %x", a.Nonce[:4])
	}
	if p.share {
		p.base = shm.New(shm.Options{Peer: p.name, Wake: p.wake})
	} else {
		p.base = tcp.New(tcp.Options{Peer: p.name, NoSum: m.cfg.NoChecksum || a.NoChecksum, Wake: p.wake})
	}
	p.link = p.base
	if m.cfg.Wrap != nil {
		p.link = m.cfg.Wrap(p.base)
	}
	p.onFrame = func(f *device.Frame) { m.lp.frame(p, f) }
	if mem != nil {
		runtime.AddCleanup(p, func(mem *foreign) { mem.close() }, mem)
	}
	return p
}

// PeerStatus is a line of Mesh.Status.
type PeerStatus struct {
	Name       string
	Nonce      Nonce
	Hostname   string
	PID        int
	Link       string // "shm", "tcp"
	Why        string // this link
	SameHost   bool
	State      string // "up", "connecting", "silent", "dead"
	Error      string // why there is no connection
	In, Out    int64  // bytes over sockets
	Reconnects int
}

// Status describes every peer.
func (m *Mesh) Status() []PeerStatus {
	m.mu.Lock()
	peers := make([]*Peer, 0, len(m.peers))
	for _, p := range m.peers {
		peers = append(peers, p)
	}
	m.mu.Unlock()
	out := make([]PeerStatus, 0, len(peers))
	for _, p := range peers {
		s := PeerStatus{
			Name: p.name, Nonce: p.nonce, Hostname: p.a.Hostname, PID: p.a.PID, Link: p.link.Caps().Name, Why: p.why,
			SameHost: p.mem != nil, State: "up", Reconnects: max(p.base.Attached()-1, 0),
		}
		s.In, s.Out = p.Bytes()
		if err := p.base.Down(); err != nil {
			s.State, s.Error = "connecting", err.Error()
		}
		switch {
		case p.dead.Load():
			s.State = "dead"
		case p.silent.Load():
			s.State = "silent"
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b PeerStatus) int { return strings.Compare(a.Name, b.Name) })
	return out
}

var _ device.Link = (*stream.Link)(nil)

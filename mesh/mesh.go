package mesh

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/internal/wire"
)

// Mesh is this process among the others of its world. Its methods may be called from any goroutine.
type Mesh struct {
	cfg     Config
	log     *slog.Logger
	id      host.Ident
	hostID  uint64
	nonce   Nonce
	addr    []byte
	onlyTCP bool
	seg     *segment
	pidfd   int
	base    time.Time
	noShare string // why no memory is shared with anybody; empty: it is

	unixL, tcpL net.Listener
	slots       chan struct{} // handshakes that were accepted and are not done

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	lp     *loop

	words     atomic.Pointer[host.Segment]
	haveWords chan struct{}

	mu      sync.Mutex
	started bool
	closed  bool
	lastID  uint64
	peers   map[Nonce]*Peer
	pending map[Nonce]pendingMemory
	dialing map[Nonce]time.Time // since when
	changed chan struct{}       // closed, and made anew, when peers or dialing change
}

// pendingMemory came over a unix socket for a link that will be another connection.
type pendingMemory struct {
	mem   *foreign
	given uint32
}

const maxHandshakes = 64

// Open makes the process's segment and listeners. Others can be told Addr now; Start begins to serve them.
func Open(ctx context.Context, cfg Config) (_ *Mesh, err error) {
	if cfg.Arena == 0 {
		cfg.Arena = 64 << 20
	}
	if cfg.HeartbeatLimit <= 0 {
		cfg.HeartbeatLimit = max(time.Second, 10*cfg.HeartbeatEvery)
	}
	if cfg.HeartbeatEvery <= 0 {
		cfg.HeartbeatEvery = min(100*time.Millisecond, cfg.HeartbeatLimit/4)
	}
	if cfg.HeartbeatLimit < 2*cfg.HeartbeatEvery {
		return nil, fmt.Errorf("mesh: heartbeat limit %v: want at least twice the %v between heartbeats", cfg.HeartbeatLimit, cfg.HeartbeatEvery)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	switch cfg.Links {
	case "":
		cfg.Links = "auto"
	case "auto", "tcp":
	default:
		return nil, fmt.Errorf("mesh: links %q: want auto or tcp", cfg.Links)
	}
	if cfg.Nonce == (Nonce{}) {
		_, _ = rand.Read(cfg.Nonce[:])
	}
	m := &Mesh{
		cfg: cfg, log: cfg.Log, nonce: cfg.Nonce, onlyTCP: cfg.Links == "tcp", pidfd: -1, base: time.Now(),
		slots: make(chan struct{}, maxHandshakes), haveWords: make(chan struct{}), peers: map[Nonce]*Peer{},
		pending: map[Nonce]pendingMemory{}, dialing: map[Nonce]time.Time{}, changed: make(chan struct{}),
	}
	m.ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			m.cancel()
			m.free()
			if m.seg != nil {
				_ = m.seg.Close()
			}
		}
	}()
	if m.id, err = host.Identity(); err != nil {
		return nil, fmt.Errorf("mesh: %w", err)
	}
	if m.seg, err = createSegment(m.id, m.nonce, cfg.Arena); err != nil {
		return nil, err
	}
	if m.pidfd, err = host.SelfPidfd(); err != nil {
		m.log.Info("mesh: no pidfd of this process", "error", err)
		m.pidfd = -1
	}
	var name [16]byte
	_, _ = rand.Read(name[:])
	unixName := fmt.Sprintf("@serry-%x", name)
	m.hostID = hostHash(m.id.BootID, "net", m.id.NetNS)
	if cfg.SocketDir != "" {
		dir, herr := hostOfDir(m.id.BootID, cfg.SocketDir)
		if herr != nil {
			return nil, herr
		}
		sweep(cfg.SocketDir)
		m.hostID, unixName = dir, fmt.Sprintf("%s/serry-%x", cfg.SocketDir, name)
	}
	if cfg.testHost != 0 {
		m.hostID = cfg.testHost
	}
	if m.unixL, err = net.Listen("unix", unixName); err != nil {
		// A process that shares nothing is a host of its own: nobody may count on its words or vouch for its death.
		m.hostID = hostHash(m.id.BootID, "alone "+string(m.nonce[:]))
		m.noShare = err.Error()
		m.log.Warn("mesh: no memory will be shared with other processes of this host", "error", err)
		unixName = ""
	}
	at, err := listenHost(cfg.Listen, cfg.Via)
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	if m.tcpL, err = lc.Listen(ctx, "tcp", at); err != nil {
		return nil, fmt.Errorf("mesh: %w", err)
	}
	m.addr = (&Address{
		Major: wire.Major, Minor: wire.Minor, Nonce: m.nonce, Name: cfg.Name, Host: m.hostID, BootID: m.id.BootID,
		Hostname: m.id.Hostname, PID: m.id.PID, StartTime: m.id.StartTime, NetNS: m.id.NetNS, PidNS: m.id.PidNS,
		Unix: unixName, TCP: []string{m.tcpL.Addr().String()}, OnlyTCP: m.onlyTCP, NoChecksum: cfg.NoChecksum,
	}).encode()
	if len(m.addr) > maxAddr {
		return nil, fmt.Errorf("mesh: name of %d bytes", len(cfg.Name))
	}
	if m.lp, err = newLoop(m); err != nil {
		return nil, err
	}
	raiseProcs()
	runtime.AddCleanup(m, func(s *host.Segment) { _ = s.Close() }, m.seg.Segment)
	return m, nil
}

// raiseProcs makes room for callers that wait on their core.
func raiseProcs() {
	if _, set, _ := knob.GoMaxProcs.Lookup(); set {
		return
	}
	if n := host.Cores() + 4; runtime.GOMAXPROCS(0) < n {
		runtime.GOMAXPROCS(n)
	}
}

// Start starts the loop, which calls h, and lets others in. It returns when the kernel has been told to mark our death.
func (m *Mesh) Start(h Handler) error {
	m.mu.Lock()
	if m.started || m.closed {
		m.mu.Unlock()
		return errors.New("mesh: it was started before, or is closed")
	}
	m.started = true
	m.mu.Unlock()
	if err := m.lp.start(h); err != nil {
		return err
	}
	if m.unixL != nil {
		m.spawn(func() { m.accept(m.unixL) })
	}
	m.spawn(func() { m.accept(m.tcpL) })
	return nil
}

// spawn runs fn on a goroutine that Close waits for, unless the mesh is closed.
func (m *Mesh) spawn(fn func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.wg.Go(fn)
	}
}

// Addr is what another process needs to reach this one.
func (m *Mesh) Addr() []byte { return m.addr }

// Nonce names this process.
func (m *Mesh) Nonce() Nonce { return m.nonce }

// Host is equal among processes that can share memory and see each other's deaths: of one running kernel, and of one
// network namespace, where abstract sockets end, or one Config.SocketDir. A process that cannot listen there has a number
// of its own. Whether a handshake has then really shared memory, Peer.SameHost says.
func (m *Mesh) Host() uint64 { return m.hostID }

// Arena is the own arena, of which nothing may be touched before Reserve. Only this process writes it. It stays mapped as
// long as the Mesh is reachable, also after Close: who keeps the slice keeps the Mesh.
func (m *Mesh) Arena() []byte {
	b := m.seg.Bytes()
	return b[offArena : offArena+m.cfg.Arena : offArena+m.cfg.Arena]
}

// Reserve makes the first n bytes of Arena exist: nobody may touch the rest, here or at a peer. An error that wraps
// host.ErrNoMemory says how much was asked and what to do.
func (m *Mesh) Reserve(n int) error {
	if n < 0 || int64(n) > m.cfg.Arena {
		return fmt.Errorf("mesh: reserve %d bytes of an arena of %d", n, m.cfg.Arena)
	}
	return m.seg.Reserve(offArena + n)
}

// Board is the own board, 64 KiB. It stays mapped as long as Arena.
func (m *Mesh) Board() []byte { return m.seg.Bytes()[offBoard:offArena:offArena] }

// Now is the time of Handler.Tick.
func (m *Mesh) Now() time.Duration { return time.Since(m.base) }

// Post makes the loop call Tick soon. It does not block or allocate.
func (m *Mesh) Post() { m.lp.wake() }

// Peers returns the peers that are linked and not forgotten.
func (m *Mesh) Peers() []*Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*Peer
	for _, p := range m.peers {
		if isClosed(p.linked) {
			out = append(out, p)
		}
	}
	return out
}

// Arenas is the arenas of the peers that live and share memory with this process, also of those whose link is being made.
func (m *Mesh) Arenas() (out [][]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.peers {
		if a := p.Arena(); a != nil && !p.Dead() {
			out = append(out, a)
		}
	}
	return out
}

// Peer returns the peer of that process, nil if there is none: also one whose handshake is done here and whose connection
// the loop has not got yet. It has its memory by then, and what is sent waits for the connection.
func (m *Mesh) Peer(n Nonce) *Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peers[n]
}

// Close says goodbye to all peers, for whom this process is dead from then on, and ends the loop. It must not be called
// on the loop's thread. The own segment stays mapped while the Mesh is reachable, and a peer's while its Peer is, because
// somebody may still be reading.
func (m *Mesh) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	started := m.started
	m.mu.Unlock()
	m.cancel()
	if m.unixL != nil {
		m.unixL.Close()
	}
	m.tcpL.Close()
	m.wg.Wait()
	if started {
		m.lp.stop()
	}
	m.mu.Lock()
	for n, p := range m.pending {
		p.mem.close()
		delete(m.pending, n)
	}
	m.bump()
	m.mu.Unlock()
	m.free()
	return nil
}

// free gives back what Open made, but for the memory.
func (m *Mesh) free() {
	if m.unixL != nil {
		m.unixL.Close()
	}
	if m.tcpL != nil {
		m.tcpL.Close()
	}
	if m.lp != nil {
		m.lp.free()
	}
	if m.pidfd >= 0 {
		closeFd(m.pidfd)
		m.pidfd = -1
	}
}

// bump wakes who waits for a change of peers; mu is held.
func (m *Mesh) bump() {
	close(m.changed)
	m.changed = make(chan struct{})
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

package mesh

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/tcp"
)

// Connect links this process to the one with the address, or returns the link that there is. It tries until ctx ends, or
// for 10 seconds if ctx has no end; it gives up early on a refusal, and when nobody listens there any more.
func (m *Mesh) Connect(ctx context.Context, addr []byte) (*Peer, error) {
	a, err := ParseAddr(addr)
	if err != nil {
		return nil, err
	}
	if a.Nonce == m.nonce {
		return nil, errors.New("mesh: connect: that is this process itself")
	}
	ctx, cancel := m.bound(ctx)
	defer cancel()
	var last error
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 500*time.Millisecond) {
		p, mine, changed, err := m.begin(a.Nonce)
		if err != nil {
			return nil, err
		}
		if p != nil {
			select {
			case <-p.linked:
				return p, nil
			case <-changed:
				continue
			case <-ctx.Done():
				return nil, m.gaveUp(ctx, a, last)
			}
		}
		if mine {
			p, err = m.dial(ctx, a, nil)
			m.end(a.Nonce)
			m.wg.Done()
			if err == nil {
				select {
				case <-p.linked:
					return p, nil
				case <-ctx.Done():
					return nil, m.gaveUp(ctx, a, last)
				}
			}
			if final(err) {
				return nil, fmt.Errorf("mesh: connect to %s: %w", a.Name, err)
			}
			if ctx.Err() == nil {
				last = err
			}
		}
		select {
		case <-changed:
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, m.gaveUp(ctx, a, last)
		}
	}
}

// Await waits until the process with the address has connected to this one.
func (m *Mesh) Await(ctx context.Context, addr []byte) (*Peer, error) {
	a, err := ParseAddr(addr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := m.bound(ctx)
	defer cancel()
	for {
		m.mu.Lock()
		p, changed := m.peers[a.Nonce], m.changed
		m.mu.Unlock()
		var linked chan struct{}
		if p != nil {
			linked = p.linked
		}
		select {
		case <-linked:
			return p, nil
		case <-changed:
		case <-ctx.Done():
			return nil, m.gaveUp(ctx, a, nil)
		}
	}
}

func (m *Mesh) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	cancel := context.CancelFunc(func() {})
	if _, ok := ctx.Deadline(); !ok {
		ctx, cancel = context.WithTimeout(ctx, 10*time.Second)
	}
	ctx, cancel2 := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.ctx, func() { cancel2(errClosed) })
	return ctx, func() { stop(); cancel2(nil); cancel() }
}

func (m *Mesh) gaveUp(ctx context.Context, a *Address, last error) error {
	if last != nil {
		return fmt.Errorf("mesh: connect to %s: %w (last: %w)", a.Name, context.Cause(ctx), last)
	}
	return fmt.Errorf("mesh: waiting for %s: %w", a.Name, context.Cause(ctx))
}

// ErrDead is wrapped by the error of Connect for a process that was linked and is known to be dead.
var ErrDead = errors.New("mesh: the process is dead")

// final says that another try is of no use: refused, or the process does not listen any more.
func final(err error) bool {
	var r *RefusedError
	return errors.As(err, &r) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, device.ErrLost)
}

// begin reserves the dialling of a process for the caller, unless there is a peer or somebody dials already.
func (m *Mesh) begin(n Nonce) (p *Peer, mine bool, changed <-chan struct{}, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, false, nil, errClosed
	case !m.started:
		return nil, false, nil, errors.New("mesh: connect before Start")
	}
	if p := m.peers[n]; p != nil {
		if p.over.Load() {
			return nil, false, nil, fmt.Errorf("%w: %s", ErrDead, p.name)
		}
		return p, false, m.changed, nil
	}
	if _, ok := m.dialing[n]; ok {
		return nil, false, m.changed, nil
	}
	m.dialing[n] = time.Now()
	m.wg.Add(1) // Close waits for the dial
	return nil, true, m.changed, nil
}

func (m *Mesh) end(n Nonce) {
	m.mu.Lock()
	delete(m.dialing, n)
	m.bump()
	m.mu.Unlock()
}

// dial makes one connection, and the peer if again is nil.
func (m *Mesh) dial(ctx context.Context, a *Address, again *Peer) (*Peer, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if again != nil {
		if again.share {
			c, err := m.dialUnix(ctx, a)
			if err != nil {
				return nil, err
			}
			return m.dialled(ctx, c, a, forAgain, again, nil, noWatcher, "")
		}
		c, err := m.dialTCP(ctx, a)
		if err != nil {
			return nil, err
		}
		return m.dialled(ctx, c, a, forAgain, again, nil, noWatcher, "")
	}
	why := fmt.Sprintf("another host (%s)", a.Hostname)
	var mem *foreign
	given := noWatcher
	switch {
	case a.Host == m.hostID && a.Unix != "" && m.noShare == "":
		only := m.onlyTCP || a.OnlyTCP
		p, f, g, err := m.dialSame(ctx, a, only)
		if err == nil && !only {
			return p, nil
		}
		if err == nil {
			mem, given, why = f, g, "links are set to tcp"
			break
		}
		if final(err) || err == errBusy || ctx.Err() != nil {
			return nil, err
		}
		why = "same host, but no shared memory: " + err.Error()
		m.log.Warn("mesh: no shared memory with a process of this host", "peer", a.Name, "error", err)
	case a.BootID == m.id.BootID:
		why = m.whyApart(a)
	}
	c, err := m.dialTCP(ctx, a)
	if err != nil {
		m.dropMemory(mem, given)
		return nil, err
	}
	if mem != nil {
		return m.dialled(ctx, c, a, forData, nil, mem, given, why)
	}
	return m.dialled(ctx, c, a, forLink, nil, nil, noWatcher, why)
}

// whyApart says why two processes of one kernel share nothing.
func (m *Mesh) whyApart(a *Address) string {
	switch {
	case m.noShare != "":
		return "no shared memory here: " + m.noShare
	case a.Unix == "":
		return "the peer has no unix socket"
	}
	return fmt.Sprintf("same kernel, but network namespace %d, not %d, and no common SocketDir", a.NetNS, m.id.NetNS)
}

// dialSame goes over the unix socket: for all of the link, or only for the memory.
func (m *Mesh) dialSame(ctx context.Context, a *Address, onlyMemory bool) (*Peer, *foreign, uint32, error) {
	c, err := m.dialUnix(ctx, a)
	if err != nil {
		return nil, nil, noWatcher, err
	}
	if !onlyMemory {
		p, err := m.dialled(ctx, c, a, forLink, nil, nil, noWatcher, "same host")
		return p, nil, noWatcher, err
	}
	defer c.Close()
	defer m.guard(c)()
	t := m.newTalk(c, forMemory, a.Nonce)
	if err := t.dialled(m.addr); err != nil {
		return nil, nil, noWatcher, err
	}
	f, given, err := m.swapMemory(t, true)
	if err != nil {
		return nil, nil, noWatcher, err
	}
	if _, _, err := t.ready(true, noLink); err != nil {
		m.dropMemory(f, given)
		return nil, nil, noWatcher, err
	}
	return nil, f, given, nil
}

func (m *Mesh) dropMemory(f *foreign, given uint32) {
	f.close()
	m.seg.release(given)
}

func (m *Mesh) dialTCP(ctx context.Context, a *Address) (net.Conn, error) {
	var d net.Dialer
	d.KeepAlive = -1
	var errs []error
	for _, t := range a.TCP {
		c, err := d.DialContext(ctx, "tcp", t)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("mesh: %s has no TCP endpoint", a.Name)
	}
	return nil, errors.Join(errs...)
}

// guard makes Close end a handshake on c; what it returns ends the guard.
func (m *Mesh) guard(c net.Conn) func() {
	stop := context.AfterFunc(m.ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

// dialled runs the dialler's handshake on c, which it owns, and hands the socket to the loop.
func (m *Mesh) dialled(ctx context.Context, c net.Conn, a *Address, why purpose, p *Peer, mem *foreign, given uint32, reason string) (*Peer, error) {
	defer m.guard(c)()
	t := m.newTalk(c, why, a.Nonce)
	if d, ok := ctx.Deadline(); ok {
		t.within(time.Until(d))
	}
	err := t.dialled(m.addr)
	if _, unix := c.(*net.UnixConn); err == nil && unix && why == forLink {
		mem, given, err = m.swapMemory(t, true)
	}
	if err != nil {
		m.dropMemory(mem, given)
		c.Close()
		return nil, err
	}
	if p == nil {
		if p, err = m.adopt(t, mem, given, reason); err != nil {
			_ = t.refuse(err)
			c.Close()
			return nil, err
		}
	} else {
		m.again(p)
	}
	peerHas, gen, err := t.ready(true, p.base.Reset)
	if err != nil {
		c.Close()
		m.settled(p)
		return nil, err
	}
	return p, m.hand(p, c, peerHas, gen, true)
}

// adopt returns the peer of the process at the other end, a new one if need be. It takes the memory over.
func (m *Mesh) adopt(t *talk, mem *foreign, given uint32, reason string) (*Peer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.peers[t.addr.Nonce]
	if p != nil || m.closed {
		m.dropMemory(mem, given)
	}
	switch {
	case m.closed:
		return nil, errClosed
	case p != nil && p.over.Load():
		return nil, forgotten("process %x is dead", t.addr.Nonce)
	case p != nil:
		p.hands++
		return p, nil
	}
	p = m.newPeer(t.addr, bytes.Clone(t.raw), mem, given, reason)
	p.hands = 1
	m.peers[p.nonce] = p
	if mem != nil && m.words.Load() != nil && !mem.hasWords {
		mem.hasWords = true
		m.wg.Go(func() { m.passWordsNow(p) })
	}
	m.bump()
	return p, nil
}

func (m *Mesh) again(p *Peer) {
	m.mu.Lock()
	p.hands++
	m.mu.Unlock()
}

// settled ends a handshake that adopted p. If no connection came of it, nor can from another one, p is forgotten.
func (m *Mesh) settled(p *Peer) {
	m.mu.Lock()
	p.hands--
	never := p.hands == 0 && p.base.Attached() == 0 && m.peers[p.nonce] == p
	if never {
		delete(m.peers, p.nonce)
		m.bump()
	}
	m.mu.Unlock()
	if never {
		p.over.Store(true)
		p.base.Close()
		p.release.Do(func() { m.seg.release(p.given) })
	}
}

// hand gives the socket to the loop.
func (m *Mesh) hand(p *Peer, c net.Conn, peerHas, gen uint64, dialler bool) error {
	_ = c.SetDeadline(time.Time{})
	_, isTCP := c.(*net.TCPConn)
	fd, err := descriptor(c)
	if err != nil {
		m.settled(p)
		return err
	}
	if isTCP {
		tcp.Tune(fd)
	}
	if !m.lp.do(func() {
		m.lp.attach(p, fd, peerHas, gen, dialler)
		m.settled(p)
	}) {
		closeFd(fd)
		return errClosed
	}
	return nil
}

// accept serves a listener.
func (m *Mesh) accept(l net.Listener) {
	for {
		select {
		case m.slots <- struct{}{}:
		case <-m.ctx.Done():
			return
		}
		c, err := l.Accept()
		if err != nil {
			<-m.slots
			if m.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			m.log.Warn("mesh: accept", "error", err)
			select {
			case <-time.After(50 * time.Millisecond): // out of descriptors, most likely
			case <-m.ctx.Done():
				return
			}
			continue
		}
		m.spawn(func() {
			defer func() { <-m.slots }()
			if err := m.accepted(c); err != nil && err != errBusy && err != errUnknown && m.ctx.Err() == nil {
				level := slog.LevelWarn
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
					level = slog.LevelDebug // it has ended, or did not want to any more
				}
				m.log.Log(m.ctx, level, "mesh: a connection came to nothing", "from", c.RemoteAddr().String(), "error", err)
			}
		})
	}
}

// accepted runs the acceptor's handshake on c, which it owns.
func (m *Mesh) accepted(c net.Conn) (err error) {
	defer m.guard(c)()
	handed := false
	defer func() {
		if !handed {
			c.Close()
		}
	}()
	t := m.newTalk(c, 0, Nonce{})
	if _, err := sameUser(c); err != nil {
		t.within(time.Second)
		_, _ = t.receive(msgHello)
		return t.refuse(err)
	}
	if err := t.accepted(m.addr, m.welcome); err != nil {
		return err
	}
	_, unix := c.(*net.UnixConn)
	var mem *foreign
	given := noWatcher
	reason := "the peer came by tcp"
	switch p := t.mine.purpose; {
	case p == forWords && unix:
		return m.acceptWords(t)
	case p == forMemory && unix, p == forLink && unix:
		reason = "same host"
		if mem, given, err = m.swapMemory(t, false); err != nil {
			return err
		}
		if p == forMemory {
			return m.acceptMemory(t, mem, given)
		}
	case p == forData:
		m.mu.Lock()
		w, ok := m.pending[t.addr.Nonce]
		delete(m.pending, t.addr.Nonce)
		m.mu.Unlock()
		if !ok {
			return t.refuse(errBusy) // from the start
		}
		mem, given, reason = w.mem, w.given, "links are set to tcp"
	case p == forLink:
		if t.addr.BootID != m.id.BootID {
			reason = fmt.Sprintf("another host (%s)", t.addr.Hostname)
		} else if t.addr.Host != m.hostID {
			reason = m.whyApart(t.addr)
		}
	case p != forAgain:
		return t.refuse(fmt.Errorf("mesh: purpose %d over %s", p, c.RemoteAddr().Network()))
	}
	var p *Peer
	if t.mine.purpose == forAgain {
		m.mu.Lock()
		p = m.peers[t.addr.Nonce]
		m.mu.Unlock()
		if p == nil || p.over.Load() || p.share != unix {
			return t.turnAway(errUnknown)
		}
		m.again(p)
	} else if p, err = m.adopt(t, mem, given, reason); err != nil {
		return t.turnAway(err)
	}
	peerHas, gen, err := t.ready(false, p.base.Reset)
	if err != nil {
		m.settled(p)
		return err
	}
	handed = true
	return m.hand(p, c, peerHas, gen, false)
}

func (m *Mesh) acceptMemory(t *talk, mem *foreign, given uint32) error {
	if _, _, err := t.ready(false, noLink); err != nil {
		m.dropMemory(mem, given)
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if old, ok := m.pending[t.addr.Nonce]; ok {
		m.dropMemory(old.mem, old.given)
	}
	m.pending[t.addr.Nonce] = pendingMemory{mem, given}
	time.AfterFunc(2*handshakeTime, func() { // the link did not follow: its owner may be dead
		m.mu.Lock()
		defer m.mu.Unlock()
		if w := m.pending[t.addr.Nonce]; w.mem == mem {
			delete(m.pending, t.addr.Nonce)
			m.dropMemory(mem, given)
		}
	})
	return nil
}

// errUnknown: somebody wants a link back that there is not; it was forgotten, or never got as far as here.
var errUnknown = forgotten("there is no such link any more")

// welcome decides whether a dialler's connection is wanted: when both sides dial at once, that of the lower nonce stays.
func (m *Mesh) welcome(h *hello) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h.nonce == m.nonce {
		return refused("it has the nonce of %s itself", m.cfg.Name)
	}
	p := m.peers[h.nonce]
	if p != nil && p.over.Load() {
		return forgotten("process %x is dead here", h.nonce)
	}
	if p == nil && h.purpose == forAgain {
		return errUnknown
	}
	if p != nil && p.base.Err() != nil {
		return refused("the link is lost: %s", p.base.Err())
	}
	since, mine := m.dialing[h.nonce]
	if mine && h.purpose != forWords && bytes.Compare(m.nonce[:], h.nonce[:]) < 0 && time.Since(since) < time.Second {
		return errBusy
	}
	return nil
}

// redialTime is short: across a cut cable a fresh attempt every second is back sooner than one that backs off.
const redialTime = time.Second

// refusedTime is how long a peer may say that it knows of no link: it may have missed the end of the first handshake, and
// be about to dial.
const refusedTime = 3 * time.Second

// redial brings a lost connection back, until it is there, from whichever side, or the peer is over.
func (m *Mesh) redial(p *Peer, first time.Duration) {
	var lost error
	start := time.Now()
	defer func() { m.lp.do(func() { m.lp.redialled(p, lost) }) }()
	for wait := first; ; wait = min(max(2*wait, 10*time.Millisecond), 500*time.Millisecond) {
		select {
		case <-time.After(wait):
		case <-m.ctx.Done():
			return
		}
		if p.over.Load() || p.base.Down() == nil {
			return
		}
		m.mu.Lock()
		_, other := m.dialing[p.nonce]
		if !other {
			m.dialing[p.nonce] = time.Now()
		}
		m.mu.Unlock()
		if other {
			continue
		}
		ctx, cancel := context.WithTimeout(m.ctx, redialTime)
		_, err := m.dial(ctx, p.a, p)
		cancel()
		m.end(p.nonce)
		if err == nil {
			// The loop attaches it next; if it fails again, the loop dials again.
			return
		}
		var r *RefusedError
		if errors.As(err, &r) && time.Since(start) > refusedTime || p.mem != nil && errors.Is(err, syscall.ECONNREFUSED) {
			lost = err
			return
		}
	}
}

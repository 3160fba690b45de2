package mesh

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/device/stream"
	"github.com/serry-project/serry/internal/wire"
)

// loop is the one thread that waits for everything. Its fields without a lock belong to it.
type loop struct {
	m     *Mesh
	h     Handler
	ep    *host.Epoll
	event int // eventfd
	watch *host.DeathWatch
	turns *atomic.Uint64
	done  chan struct{}

	woken  atomic.Bool // event was signalled and not drained yet
	mu     sync.Mutex
	todo   []func()
	ending bool

	byID  map[uint64]*Peer
	left  map[uint64]*Peer // forgotten, and perhaps still watching a death word of ours
	far   []*Peer          // peers that need heartbeats
	polls []*Peer          // to be polled in the next turn
	tick  time.Duration
	beat  beat
	ended bool
	idle  []func() // todo's other slice
}

// What an epoll token means: the peer's id and, below, one of these.
const (
	tokenEvent = 0
	tokenLink  = 1
	tokenPidfd = 2
	tokenBits  = 2
)

func newLoop(m *Mesh) (*loop, error) {
	l := &loop{m: m, byID: map[uint64]*Peer{}, left: map[uint64]*Peer{}, event: -1, done: make(chan struct{}), turns: host.Word64(m.seg.Bytes(), offTurns)}
	var err error
	if l.ep, err = host.EpollCreate(128); err != nil {
		return nil, fmt.Errorf("mesh: %w", err)
	}
	if l.event, err = host.NewEventfd(); err == nil {
		err = l.ep.Add(l.event, host.ReadyIn, tokenEvent)
	}
	if err == nil {
		l.watch, err = host.NewDeathWatch(l.marked)
	}
	if err != nil {
		l.free()
		return nil, fmt.Errorf("mesh: %w", err)
	}
	return l, nil
}

func (l *loop) free() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ending = true
	if l.event >= 0 {
		closeFd(l.event)
		l.event = -1
		_ = l.ep.Close()
	}
}

// wake makes the loop turn, from any goroutine.
func (l *loop) wake() {
	if !l.woken.Swap(true) {
		l.mu.Lock() // against free
		if l.event >= 0 {
			_ = host.EventfdSignal(l.event)
		}
		l.mu.Unlock()
	}
}

// do makes the loop call fn soon. False: it has ended, and never will.
func (l *loop) do(fn func()) bool {
	l.mu.Lock()
	if l.ending {
		l.mu.Unlock()
		return false
	}
	l.todo = append(l.todo, fn)
	l.mu.Unlock()
	l.wake()
	return true
}

// marked is called on a thread of the DeathWatch.
func (l *loop) marked(id uint64) {
	l.do(func() {
		if p := l.byID[id]; p != nil {
			l.died(p, "the kernel has marked its death")
		}
		l.parted(l.left[id])
	})
}

func (l *loop) start(h Handler) error {
	l.h = h
	ready := make(chan error)
	go l.run(ready)
	return <-ready
}

func (l *loop) run(ready chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(l.done)
	words := l.m.seg.deathRegion()
	robust, err := host.RegisterRobust(words, deathWords)
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		l.m.log.Warn("mesh: the kernel will not mark this process's death early", "error", err)
	}
	ready <- nil
	for !l.ended {
		l.turn()
	}
	if robust != nil {
		robust.Close()
	}
	// For the others of this host a closed mesh is a dead process.
	for i := range deathWords {
		w := host.RobustWord(words, i)
		w.Store(closedWord)
		_, _ = host.FutexWake(w, 1)
	}
}

// closedWord is what the kernel leaves in a death word.
const closedWord = 0x40000000

func (l *loop) turn() {
	evs, err := l.ep.Wait(l.timeout())
	if err != nil {
		l.m.log.Error("mesh: the loop can not wait", "error", err)
		time.Sleep(time.Millisecond)
	}
	l.turns.Add(1)
	now := l.m.Now()
	l.beat.late(l, now)
	for _, e := range evs {
		if e.Token == tokenEvent {
			_, _ = host.EventfdDrain(l.event)
			l.woken.Store(false)
		}
	}
	l.runTodo()
	for _, e := range evs {
		p := l.byID[e.Token>>tokenBits]
		if p == nil {
			l.parted(l.left[e.Token>>tokenBits])
			continue
		}
		switch e.Token & (1<<tokenBits - 1) {
		case tokenLink:
			l.poll(p)
		case tokenPidfd:
			l.died(p, "its pidfd says so")
		}
	}
	for i := 0; i < len(l.polls); i++ {
		l.poll(l.polls[i])
	}
	clear(l.polls)
	l.polls = l.polls[:0]
	if l.m.cfg.Wrap != nil {
		for _, p := range l.byID {
			l.poll(p)
		}
	}
	l.beat.run(l)
	if !l.ended {
		l.tick = l.h.Tick(l.m.Now())
	}
}

func (l *loop) runTodo() {
	l.mu.Lock()
	todo := l.todo
	l.todo = l.idle[:0]
	l.mu.Unlock()
	for i, fn := range todo {
		fn()
		todo[i] = nil
	}
	l.idle = todo
}

// timeout is how long the loop may sleep.
func (l *loop) timeout() time.Duration {
	next := l.tick
	if b := l.beat.next; b > 0 && (next == 0 || b < next) {
		next = b
	}
	d := time.Duration(-1)
	if next > 0 {
		d = max(next-l.m.Now(), 0)
	}
	if l.m.cfg.Wrap != nil && len(l.byID) > 0 && (d < 0 || d > 2*time.Millisecond) {
		d = 2 * time.Millisecond // what holds frames back does not tell for how long
	}
	return d
}

// attach takes a connection that a handshake has made.
func (l *loop) attach(p *Peer, fd int, peerHas, gen uint64, dialler bool) {
	if err := p.base.Attach(fd, peerHas, gen); err != nil {
		if err != stream.ErrStale {
			l.m.log.Warn("mesh: a link can not go on", "peer", p.name, "error", err)
		}
		if p.started {
			l.lost(p)
		} else if err == stream.ErrStale {
			l.lost(p) // the newer one may come to nothing
		}
		return
	}
	p.dialer.Store(dialler)
	p.since = l.m.Now()
	if p.over.Load() {
		p.base.Close()
		return
	}
	l.byID[p.id] = p
	if !l.register(p) {
		return
	}
	if !p.started {
		p.started = true
		p.heard = l.m.Now()
		if p.mem != nil {
			l.startWatch(p)
		} else {
			l.far = append(l.far, p)
			l.beat.start(l)
		}
		l.m.log.Info("mesh: linked", "peer", p.name, "link", p.link.Caps().Name, "why", p.why)
		l.h.Linked(p)
		close(p.linked)
	} else {
		l.m.log.Info("mesh: connected again", "peer", p.name, "link", p.link.Caps().Name)
	}
	l.poll(p)
}

func (l *loop) startWatch(p *Peer) {
	if p.mem.watch != noWatcher {
		if err := l.watch.Add(p.id, host.RobustWord(p.mem.death, int(p.mem.watch))); err != nil {
			l.m.log.Warn("mesh: can not watch for a mark of death", "peer", p.name, "error", err)
		}
	}
	if p.mem.pidfd >= 0 {
		if err := l.ep.Add(p.mem.pidfd, host.ReadyIn, p.id<<tokenBits|tokenPidfd); err != nil {
			l.m.log.Warn("mesh: can not watch a pidfd", "peer", p.name, "error", err)
		}
	}
}

// register tells the epoll of a new connection, or of a change in what is waited for. False: the connection is gone.
func (l *loop) register(p *Peer) bool {
	n, write := p.base.Attached(), p.base.Pending()
	if n == p.epoch && write == p.epWrite {
		return true
	}
	want := host.ReadyIn | host.ReadyPeerClosed
	if write {
		want |= host.ReadyOut
	}
	var err error
	ok := p.base.WithFd(func(fd int) {
		if n == p.epoch {
			err = l.ep.Mod(fd, want, p.id<<tokenBits|tokenLink)
		} else {
			err = l.ep.Add(fd, want, p.id<<tokenBits|tokenLink)
		}
	})
	if err != nil {
		l.m.log.Error("mesh: epoll", "peer", p.name, "error", err)
	}
	if ok {
		p.epoch, p.epWrite = n, write
	}
	return ok
}

// poll moves what can be moved on one link.
func (l *loop) poll(p *Peer) {
	if p.over.Load() || !p.started || p.failed {
		return
	}
	_, err := p.link.Poll(p.onFrame)
	switch {
	case p.over.Load(): // a frame made the handler forget it
	case p.bye:
		l.died(p, "it has closed its mesh")
	case err != nil:
		p.failed = true
		l.m.log.Warn("mesh: link", "peer", p.name, "error", err)
	case p.base.Down() != nil:
		l.lost(p)
	default:
		l.register(p)
	}
}

// frame takes what a link delivers.
func (l *loop) frame(p *Peer, f *device.Frame) {
	if p.bye || p.gone.Load() {
		return
	}
	if p.mem == nil {
		l.beat.heard(l, p)
	}
	switch {
	case f.Kind >= wire.KindControl:
		if f.World == l.m.cfg.World {
			l.h.Frame(p, f)
		}
	case f.Kind == wire.KindHello && f.Op == opBye:
		p.bye = true
	}
}

// opBye marks the last frame of a process that closes its mesh.
const opBye = 1

// lost looks at a link without a connection: the process is dead, or somebody has to dial.
func (l *loop) lost(p *Peer) {
	if p.over.Load() {
		return
	}
	if p.mem != nil && p.mem.gone() {
		l.died(p, "its connection broke, and the kernel says that it is dead")
		return
	}
	if p.busy {
		return
	}
	p.busy = true
	l.m.log.Info("mesh: connection lost", "peer", p.name, "error", p.base.Down())
	first := time.Duration(0)
	if !p.dialer.Load() {
		first = 300 * time.Millisecond // it is the other one's turn
	} else if l.m.Now()-p.since < time.Second {
		first = 50 * time.Millisecond // whatever breaks it at once will do so again
	}
	l.m.spawn(func() { l.m.redial(p, first) })
}

// redialled is the end of a redial. With an error, it has found out that there is nothing to come back to.
func (l *loop) redialled(p *Peer, err error) {
	p.busy = false
	if err == nil {
		if p.base.Down() != nil {
			l.lost(p)
		}
		return
	}
	if p.over.Load() || p.base.Down() == nil {
		return
	}
	p.base.Fail(fmt.Errorf("%w: %s: %w", device.ErrLost, p.name, err))
	l.m.log.Warn("mesh: link is lost", "peer", p.name, "error", err)
	if p.mem != nil && errors.Is(err, syscall.ECONNREFUSED) {
		// The process lives, or its pidfd would have said so first, but nobody listens: its mesh is closed.
		l.died(p, "nobody listens for it any more")
		return
	}
	if h, ok := l.h.(Refuser); ok && isForgotten(err) {
		h.Refused(p, err)
	}
}

// died reports a death, once, after what the process had sent.
func (l *loop) died(p *Peer, why string) {
	if p.over.Load() || !p.started {
		return
	}
	for range 8 {
		if n, err := p.link.Poll(p.onFrame); n == 0 || err != nil || p.over.Load() {
			break
		}
	}
	if p.over.Swap(true) {
		return
	}
	p.dead.Store(true)
	p.base.Fail(fmt.Errorf("%w: %s is dead: %s", device.ErrLost, p.name, why))
	l.unwatch(p)
	p.release.Do(func() { l.m.seg.release(p.given) })
	l.m.log.Info("mesh: dead", "peer", p.name, "why", why)
	l.h.Died(p)
}

// unwatch ends all that the loop does for p.
func (l *loop) unwatch(p *Peer) {
	l.unlink(p)
	l.unguard(p)
}

func (l *loop) unlink(p *Peer) {
	delete(l.byID, p.id)
	for i, q := range l.far {
		if q == p {
			l.far = append(l.far[:i], l.far[i+1:]...)
			break
		}
	}
	if p.link != p.base {
		_ = p.link.Close()
	}
}

// unguard ends the watch for its death.
func (l *loop) unguard(p *Peer) {
	if p.mem != nil && p.started {
		if p.mem.pidfd >= 0 {
			_ = l.ep.Del(p.mem.pidfd)
			p.mem.closePidfd()
		}
		l.watch.Remove(p.id)
	}
}

// drop ends what Forget has begun. The process may live on and watch the death word that we gave it, so the word is not
// another's before this one has ended or closed its mesh: that alone is still watched for, and keeps its memory mapped.
func (l *loop) drop(p *Peer) {
	if p.dead.Load() {
		return
	}
	l.unlink(p)
	if p.mem == nil || !p.started {
		return
	}
	l.left[p.id] = p
	if p.mem.gone() { // its mark came after Forget and before us
		l.parted(p)
	}
}

// parted takes the death word back from a forgotten process that is no more; nil is nobody.
func (l *loop) parted(p *Peer) {
	if p == nil {
		return
	}
	delete(l.left, p.id)
	l.unguard(p)
	p.release.Do(func() { l.m.seg.release(p.given) })
}

// stop says goodbye and ends the loop.
func (l *loop) stop() {
	l.do(func() {
		for _, p := range l.byID {
			h := wire.Header{Kind: wire.KindHello, Op: opBye, World: l.m.cfg.World}
			_ = p.base.SendHeader(h, nil)
		}
		// Peers get a moment to read it all and close in turn: what we have not read would reset the connection.
		for until := time.Now().Add(farewell); l.waiting() && time.Now().Before(until); {
			time.Sleep(time.Millisecond)
		}
		for _, p := range l.byID {
			p.over.Store(true)
			p.base.Close()
			l.unwatch(p)
		}
		for _, p := range l.left {
			l.parted(p)
		}
		l.ended = true
	})
	<-l.done
	l.watch.Close()
	l.mu.Lock()
	l.ending, l.todo = true, nil
	l.mu.Unlock()
}

// farewell is how long Close waits for peers to close in turn.
const farewell = 100 * time.Millisecond

// waiting says whether a peer has not closed yet.
func (l *loop) waiting() bool {
	some := false
	for _, p := range l.byID {
		_, _ = p.base.Poll(func(*device.Frame) {})
		if p.base.Pending() {
			some = true
		} else if p.base.WithFd(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_WR) }) {
			some = true
		}
	}
	return some
}

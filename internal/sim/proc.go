package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/pg"
)

// proc is a process: what its kernel, its mesh and its clock are to it.
type proc struct {
	w    *World
	pid  int
	host *hostOf
	slot int // that it asks for
	inc  uint32

	nonce mesh.Nonce
	seat  *pg.Seat
	arena []byte
	board []byte
	words []byte

	loop, caller, second *thread
	idle, posted         bool // of the loop
	inbox                []func()
	waiting              []*thread // in Await
	inside               *thread   // gave way at an access to memory
	frozen               []*thread

	peers  map[int]*peer // by pid
	linked []*peer       // in the order of linking
	dirty  []*peer       // to be polled

	dead, stopped bool
	ended         history.Outcome
	over          bool          // its program has come to the end
	ran           time.Duration // when it was stopped last, or when it went on
	killed, born  time.Duration
	member        bool

	// Its clock: base + (now - since) x rate.
	base, since time.Duration
	rate        float64

	prog    program
	events  []history.Event
	pending int // operations issued and not waited for
}

func (p *proc) String() string { return fmt.Sprintf("rank %d (process %d)", p.slot, p.pid) }

// Now implements pg.Ground: the clock of this process.
func (p *proc) Now() time.Duration {
	return p.base + time.Duration(float64(p.w.now-p.since)*p.rate)
}

// setClock makes the clock go on from now at another rate, after a jump.
func (p *proc) setClock(rate float64, jump time.Duration) {
	p.base, p.since, p.rate = p.Now()+jump, p.w.now, rate
	p.kick()
}

// real is how long d of this process's time takes.
func (p *proc) real(d time.Duration) time.Duration {
	return time.Duration(float64(max(d, 0))/p.rate) + 1
}

// do runs f on the process's loop.
func (p *proc) do(f func()) {
	if !p.dead {
		p.inbox = append(p.inbox, f)
		p.kick()
	}
}

// kick makes the loop run soon.
func (p *proc) kick() {
	if p.dead {
		return
	}
	p.posted = true
	if p.idle {
		p.idle = false
		p.w.wake(p.loop, p.w.between(500*time.Nanosecond, 20*time.Microsecond))
	}
}

// Post implements pg.Ground.
func (p *proc) Post() { p.kick() }

// turn is what a mesh's loop does over and over.
func (p *proc) turn() {
	w := p.w
	for {
		p.posted = false
		for len(p.inbox) > 0 {
			f := p.inbox[0]
			p.inbox[0] = nil
			p.inbox = p.inbox[1:]
			f()
		}
		for len(p.dirty) > 0 {
			x := p.dirty[0]
			p.dirty = p.dirty[1:]
			if x.dirty = false; !x.gone {
				_, _ = x.link.Poll(func(f *device.Frame) { x.take(f) })
			}
		}
		next := p.seat.Agent.Tick(p.Now())
		p.news()
		p.stir()
		if p.posted {
			w.sleep(p.loop, 200*time.Nanosecond)
			continue
		}
		p.idle = true
		if next != 0 {
			w.wake(p.loop, p.real(next-p.Now()))
		}
		p.loop.pause()
		p.idle = false
	}
}

// take is a frame that has come: so the other is heard.
func (x *peer) take(f *device.Frame) {
	if x.silent {
		x.silent = false
		x.p.seat.Agent.Heard(x)
	}
	x.p.seat.Agent.Frame(x, f)
}

// stir makes callers that wait for something of their process look again.
func (p *proc) stir() {
	for _, t := range p.waiting {
		p.w.wake(t, p.w.between(100*time.Nanosecond, 20*time.Microsecond))
	}
	p.waiting = p.waiting[:0]
}

// Await implements pg.Ground.
func (p *proc) Await(ctx context.Context, d time.Duration, chs ...<-chan struct{}) {
	w, t := p.w, p.w.cur
	if t == nil || t.p != p || p.dead {
		panic("sim: Await outside of a thread of the process")
	}
	end := p.Now() + d
	for {
		for _, ch := range chs {
			select {
			case <-ch:
				return
			default:
			}
		}
		if ctx.Err() != nil || d > 0 && p.Now() >= end {
			return
		}
		p.waiting = append(p.waiting, t)
		nap := 5 * time.Millisecond // a poke of another caller of this process is seen then
		if d > 0 {
			nap = min(nap, p.real(end-p.Now()))
		}
		w.sleep(t, nap)
		for i, x := range p.waiting {
			if x == t {
				p.waiting = append(p.waiting[:i], p.waiting[i+1:]...)
				break
			}
		}
	}
}

// The rest of pg.Ground.
func (p *proc) Board() []byte              { return p.board }
func (p *proc) Host() uint64               { return uint64(p.host.id) + 1 }
func (p *proc) Nonce() mesh.Nonce          { return p.nonce }
func (p *proc) Arena() []byte              { return p.arena }
func (p *proc) Memory() collectives.Memory { return memory{p} }
func (p *proc) Cores() int                 { return 0 }
func (p *proc) Spin()                      {}
func (p *proc) Yield()                     { p.yield() }
func (p *proc) Go(func())                  {} // second does it

// Step gives way between two accesses to a board.
func (p *proc) Step() {
	w := p.w
	if t := w.cur; t != nil && t.p == p && !p.dead && w.rnd.Uint32()&3 == 0 {
		p.inside = t
		w.sleep(t, w.between(0, 20*time.Microsecond))
	}
}

// Peer implements pg.Ground.
func (p *proc) Peer(n mesh.Nonce) pg.Peer {
	for _, x := range p.linked {
		if x.to.nonce == n && !x.gone {
			return x
		}
	}
	return nil
}

// Link implements pg.Ground.
func (p *proc) Link(_ context.Context, ms []fault.Member) error {
	w := p.w
	end := p.Now() + 2*time.Second
	for _, m := range ms {
		q := w.byNonce[m.Nonce]
		if q == p || q == nil {
			continue
		}
		for p.peers[q.pid] == nil {
			if q.dead {
				return fmt.Errorf("%v: connection refused", q)
			}
			if p.Now() > end {
				return fmt.Errorf("%v cannot be reached", q)
			}
			w.sleep(w.cur, w.between(100*time.Microsecond, 2*time.Millisecond))
			if w.open(p, q) && p.peers[q.pid] == nil && !q.dead {
				w.meet(p, q)
			}
		}
	}
	return nil
}

// crash ends a process where it stands. Of what it has sent a part still arrives; its host sees it soon.
func (w *World) crash(p *proc, ended history.Outcome) {
	if p.dead {
		return
	}
	p.dead, p.ended, p.killed = true, ended, w.now
	w.changes++
	for _, t := range []*thread{p.loop, p.caller, p.second} {
		if t == nil {
			continue
		}
		for i := 0; i < len(w.sleepers); i++ {
			if w.sleepers[i] == t {
				w.sleepers[i] = w.sleepers[len(w.sleepers)-1]
				w.sleepers = w.sleepers[:len(w.sleepers)-1]
				i--
			}
		}
		if t != w.cur {
			t.stop()
		}
	}
	for _, x := range p.linked {
		if c := x.conn; c != nil && !c.over {
			d := &c.dirs[x.side]
			if ended == 0 { // nobody flushes what a killed process has not sent
				d.cutTail(w)
			}
			d.eof = true
			side := x.side
			w.after(max(d.last-w.now, 0)+time.Microsecond, func() { c.arrive(side) })
		}
		q := x.to
		y := q.peers[p.pid]
		if q.dead || y == nil {
			continue
		}
		switch {
		case q.host == p.host: // the kernel's word
			w.after(w.between(100*time.Microsecond, 5*time.Millisecond), func() { y.died() })
		case ended != 0: // its own
			w.farewell(x, y)
		}
	}
	w.watchAll()
	if w.cur != nil && w.cur.p == p {
		panic(killed{})
	}
}

// farewell tells the other side that a process has closed its mesh, when all that it sent has come.
func (w *World) farewell(x, y *peer) {
	w.after(w.between(200*time.Microsecond, 3*time.Millisecond), func() {
		c := x.conn
		if c == nil || c.over || y.conn != c || len(c.dirs[x.side].fly) > 0 && w.isCut(x.p.host, y.p.host) {
			return // it never comes
		}
		y.died()
	})
}

// died says for good that the other is gone: after all frames that it has sent, as far as they have come.
func (y *peer) died() {
	y.p.do(func() {
		if y.dead || y.gone {
			return
		}
		_, _ = y.link.Poll(func(f *device.Frame) { y.take(f) })
		if y.gone {
			return
		}
		y.dead = true
		y.p.seat.Agent.Died(y)
	})
}

// cutTail loses a part of what is under way.
func (d *direction) cutTail(w *World) {
	keep := w.rnd.IntN(len(d.fly) + 1)
	if keep < len(d.fly) && w.chance(0.5) { // and the next one in the middle
		s := &d.fly[keep]
		s.b = s.b[:w.rnd.IntN(len(s.b)+1)]
		keep++
	}
	for _, s := range d.fly[keep:] {
		d.bytes -= len(s.b)
	}
	d.fly = d.fly[:keep]
}

// stop is SIGSTOP, and cont SIGCONT.
func (w *World) stop(p *proc) {
	if !p.dead && !p.stopped {
		p.stopped, p.ran = true, w.now
		w.tell("-- stop %v", p)
		w.watchAll()
	}
}

func (w *World) cont(p *proc) {
	if p.dead || !p.stopped {
		return
	}
	p.stopped, p.ran = false, w.now
	w.tell("-- continue %v", p)
	for _, t := range p.frozen {
		w.wake(t, w.between(0, 50*time.Microsecond))
	}
	p.frozen = p.frozen[:0]
	w.watchAll()
}

// Package faulty puts faults into any link: it wraps one and drops, delays, corrupts or refuses the frames that a small
// script names, or closes the link at one of them.
//
// A script is text, so that a flag can carry it (*Script is a flag.Value):
//
//	script    = { rule } .
//	rule      = "(" action [ "recv" ] { predicate } ")" .
//	action    = "drop" | "delay" duration | "corrupt" | "close" | "full" .
//	predicate = "(" "kind" kind { kind } ")"
//	          | "(" field range ")"
//	          | "(" "nth" range ")"
//	          | "(" "every" number ")"
//	          | "(" "chance" fraction ")"
//	          | "(" ( "and" | "or" ) { predicate } ")"
//	          | "(" "not" predicate ")" .
//	kind      = "control" | "agent" | "data" | "hold" | "need" | "forward" | "done" | "p2p" | number .
//	field     = "op" | "phase" | "flags" | "group" | "version" | "seq" | "completed" | "slot" | "to" | "inc" | "toinc"
//	          | "tag" | "offset" | "total" | "size" .
//	range     = number | number ".." | ".." number | number ".." number .
//
// Numbers are decimal or 0x..., ranges include both ends, durations are Go's (5ms), the fraction is from 0 to 1.
//
// A rule is about frames that this end sends or, with recv, that it receives. It matches if all its predicates do, left to
// right, the rest not being looked at after one that does not. The first rule that matches a frame acts, and later rules
// do not see the frame. nth counts, from 1, how often it has been looked at (so (nth 3) after other predicates is the
// third frame that they match); every k matches each k-th time. Counts are those of one wrapped link, and a frame that
// the wrapped link refuses as full is not counted until it is accepted.
//
// The actions:
//
//   - drop: the frame vanishes, this once, as a broken peer would lose it: the link neither knows nor sends it again, so
//     its promise of delivery is broken. What relies on that promise is tested with delay, close and full.
//   - delay: the frame and all behind it in its direction wait so long. Order is kept.
//   - corrupt: one bit of the payload is flipped (of the sequence where there is no payload), beneath no checksum: the
//     sender's memory was wrong.
//   - close: the link is over: this end says ErrLost, and the other one too, once this one has been polled or closed.
//   - full: Send says ErrFull. Rules of this kind do not look at control kinds, which no link refuses.
//
// Examples: (drop (kind data) (nth 3)); (delay 5ms (to 2)); (corrupt (group 7) (not (phase 0))); (close (seq 10));
// (full (kind data p2p) (chance 0.1)); (delay 1ms recv (every 100)).
package faulty

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// backlog is how much may be held back in one direction, as for any link.
const backlog = 8 << 20

// Options of a wrapped link. The zero value works.
type Options struct {
	Seed uint64               // of chance and corrupt
	Peer string               // how errors name the peer (default: what the link prints as, or "the peer")
	Now  func() time.Duration // clock for delays; delayed frames then leave in Poll (default: real time, which needs no Poll)
}

// Link is a link with faults.
type Link struct {
	inner   device.Link
	opts    Options
	plain   bool // no rules
	virtual bool // the clock is not real time
	recv    func(*device.Frame)

	mu     sync.Mutex // guards the way out and how it ended
	out    side
	lost   error // final: a rule closed the link, or Poll said so
	closed bool
	timer  *time.Timer // flushes out, in real time

	in    side // this and what follows is Poll's
	fn    func(*device.Frame)
	count int
	deaf  bool  // a rule closed the link in this Poll
	over  error // the wrapped link's last word, while frames are held back
}

var _ device.Link = (*Link)(nil)

// side is one direction: its rules with their counts, and what it holds back.
type side struct {
	rules  []*rule
	state  state
	undo   state
	fired  []uint64
	held   []held
	bytes  int
	free   [][]byte
	frame  device.Frame // a changed copy
	buffer []byte
}

type held struct {
	frame device.Frame
	due   time.Duration
}

// Wrap puts the faults of s around l. A nil or empty Script changes nothing.
func (s *Script) Wrap(l device.Link, o Options) *Link {
	w := &Link{inner: l, opts: o, plain: s == nil || len(s.rules) == 0, virtual: o.Now != nil}
	w.recv = w.receive
	if o.Peer == "" {
		w.opts.Peer = "the peer"
		if p, ok := l.(fmt.Stringer); ok {
			w.opts.Peer = p.String()
		}
	}
	if o.Now == nil {
		start := time.Now()
		w.opts.Now = func() time.Duration { return time.Since(start) }
	}
	if w.plain {
		return w
	}
	for i, r := range s.rules {
		d := &w.out
		if r.recv {
			d = &w.in
		}
		d.rules = append(d.rules, &s.rules[i])
	}
	for i, d := range []*side{&w.out, &w.in} {
		d.fired = make([]uint64, len(s.rules))
		for _, st := range []*state{&d.state, &d.undo} {
			st.counts = make([]uint64, s.counters)
			st.chance = *rand.NewPCG(o.Seed, uint64(i))
		}
	}
	return w
}

// Unwrap is the link inside.
func (l *Link) Unwrap() device.Link { return l.inner }

// Fired is how often each rule of the script has acted. It is called from where Poll is.
func (l *Link) Fired() []uint64 {
	if l.plain {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	sum := slices.Clone(l.out.fired)
	for i, n := range l.in.fired {
		sum[i] += n
	}
	return sum
}

// match finds the rule for a frame and notes how to take it back.
func (d *side) match(f *device.Frame) *rule {
	d.undo.copy(&d.state)
	for _, r := range d.rules {
		if r.action == full && f.Kind < wire.KindData {
			continue
		}
		if d.state.all(r.preds, f) {
			d.fired[r.index]++
			return r
		}
	}
	return nil
}

// takeBack undoes the last match, which was r: the frame comes again.
func (d *side) takeBack(r *rule) {
	d.state.copy(&d.undo)
	if r != nil {
		d.fired[r.index]--
	}
}

// corrupted is a copy of f with one bit flipped.
func (d *side) corrupted(f *device.Frame) *device.Frame {
	d.buffer = append(d.buffer[:0], f.Payload...)
	d.frame = device.Frame{Header: f.Header, Payload: d.buffer}
	if bits := uint64(len(d.buffer)) * 8; bits > 0 {
		bit := d.state.chance.Uint64() % bits
		d.buffer[bit/8] ^= 1 << (bit % 8)
	} else {
		d.frame.Seq ^= 1
	}
	return &d.frame
}

// hold keeps a copy of f until due, or as long as what is before it.
func (d *side) hold(f *device.Frame, due time.Duration) {
	if k := len(d.held); k > 0 {
		due = max(due, d.held[k-1].due)
	}
	var b []byte
	if k := len(d.free); k > 0 {
		b, d.free = d.free[k-1], d.free[:k-1]
	}
	b = append(b[:0], f.Payload...)
	d.held = append(d.held, held{frame: device.Frame{Header: f.Header, Payload: b}, due: due})
	d.bytes += wire.Size + len(b)
}

// pass removes the first k held frames.
func (d *side) pass(k int) {
	for _, h := range d.held[:k] {
		d.bytes -= wire.Size + len(h.frame.Payload)
		d.free = append(d.free, h.frame.Payload)
	}
	d.held = slices.Delete(d.held, 0, k)
}

// Send queues one frame, or does with it what a rule says.
func (l *Link) Send(f *device.Frame) error {
	if l.plain {
		return l.inner.Send(f)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return l.inner.Send(f)
	case l.lost != nil:
		return l.lost
	case l.out.bytes > backlog && f.Kind >= wire.KindData:
		return device.ErrFull
	}
	r := l.out.match(f)
	if r != nil {
		switch r.action {
		case drop:
			return nil
		case full:
			return device.ErrFull
		case closes:
			l.lose(r)
			return l.lost
		case corrupt:
			f = l.out.corrupted(f)
		case delay:
			now := l.opts.Now()
			l.out.hold(f, now+r.delay)
			l.arm(now)
			return nil
		}
	}
	if len(l.out.held) > 0 {
		l.out.hold(f, 0)
		return nil
	}
	err := l.inner.Send(f)
	if errors.Is(err, device.ErrFull) {
		l.out.takeBack(r)
	}
	return err
}

func (l *Link) lose(r *rule) {
	l.lost = fmt.Errorf("faulty: %s: %w by the rule %v", l.opts.Peer, device.ErrLost, r)
}

// arm sets the timer for the first held frame, if time is real.
func (l *Link) arm(now time.Duration) {
	if l.virtual || len(l.out.held) == 0 {
		return
	}
	wait := max(l.out.held[0].due-now, 100*time.Microsecond) // also the time between tries on a full link
	if l.timer == nil {
		l.timer = time.AfterFunc(wait, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.flush()
		})
	} else {
		l.timer.Reset(wait)
	}
}

// flush sends what is due.
func (l *Link) flush() {
	if l.closed || l.lost != nil || len(l.out.held) == 0 {
		return
	}
	now, k := l.opts.Now(), 0
	for k < len(l.out.held) && l.out.held[k].due <= now {
		err := l.inner.Send(&l.out.held[k].frame)
		if errors.Is(err, device.ErrFull) {
			break
		}
		if err != nil { // final: Poll of the wrapped link will say so
			k = len(l.out.held)
			break
		}
		k++
	}
	l.out.pass(k)
	l.arm(now)
}

// Poll lets the wrapped link run and hands over what the rules leave.
func (l *Link) Poll(fn func(*device.Frame)) (int, error) {
	if l.plain {
		return l.inner.Poll(fn)
	}
	l.mu.Lock()
	l.flush()
	closed, lost := l.closed, l.lost
	l.mu.Unlock()
	if closed {
		return l.inner.Poll(fn)
	}
	l.fn, l.count = fn, 0
	var err error
	if lost == nil {
		l.release()
		if l.over == nil && l.in.bytes <= backlog {
			_, err = l.inner.Poll(l.recv)
		}
		l.mu.Lock()
		lost = l.lost
		l.mu.Unlock()
	}
	l.fn = nil
	if lost != nil {
		l.in.pass(len(l.in.held))
		l.inner.Close() // so that the peer sees it
		return l.count, lost
	}
	if err != nil {
		l.over = err
	}
	if len(l.in.held) > 0 || l.over == nil {
		return l.count, nil // what is held comes first
	}
	l.mu.Lock()
	l.lost = l.over // for Send
	l.mu.Unlock()
	return l.count, l.over
}

// release hands over the held frames that are due.
func (l *Link) release() {
	k := 0
	for now := l.opts.Now(); k < len(l.in.held) && l.in.held[k].due <= now; k++ {
		l.count++
		l.fn(&l.in.held[k].frame)
	}
	l.in.pass(k)
}

// receive is what the wrapped link's Poll calls.
func (l *Link) receive(f *device.Frame) {
	if l.deaf {
		return
	}
	if r := l.in.match(f); r != nil {
		switch r.action {
		case drop:
			return
		case closes:
			l.mu.Lock()
			l.lose(r)
			l.mu.Unlock()
			l.deaf = true
			return
		case corrupt:
			f = l.in.corrupted(f)
		case delay:
			l.in.hold(f, l.opts.Now()+r.delay)
			return
		}
	}
	if len(l.in.held) > 0 {
		l.in.hold(f, 0)
		return
	}
	l.count++
	l.fn(f)
}

// Fd is the wrapped link's, or -1 while Poll has something to do that no descriptor tells of.
func (l *Link) Fd() (fd int, write bool) {
	if !l.plain {
		l.mu.Lock()
		busy := l.lost != nil || l.virtual && len(l.out.held) > 0
		closed := l.closed
		l.mu.Unlock()
		if !closed && (busy || len(l.in.held) > 0 || l.over != nil) {
			return -1, false
		}
	}
	return l.inner.Fd()
}

// Caps says what the wrapped link can do.
func (l *Link) Caps() device.Caps { return l.inner.Caps() }

// Close ends it, with what is held back.
func (l *Link) Close() error {
	l.mu.Lock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.out.pass(len(l.out.held))
	l.mu.Unlock()
	l.in.pass(len(l.in.held))
	return l.inner.Close()
}

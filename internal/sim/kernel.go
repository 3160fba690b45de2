package sim

import (
	"iter"
	"math/rand/v2"
	"time"
)

// kernel is a virtual clock and the coroutines that it runs, one at a time, in the order of their events.
type kernel struct {
	now   time.Duration
	n     uint64
	q     []event
	rnd   *rand.Rand
	cur   *thread
	turns int
}

type event struct {
	at    time.Duration
	n     uint64
	t     *thread // resume it, if token is its last
	token uint64
	f     func()
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.n < o.n }

func (k *kernel) push(e event) {
	k.n++
	e.n = k.n
	q := append(k.q, e)
	i := len(q) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !q[i].before(&q[up]) {
			break
		}
		q[i], q[up] = q[up], q[i]
		i = up
	}
	k.q = q
}

func (k *kernel) pop() event {
	q := k.q
	e := q[0]
	last := len(q) - 1
	q[0] = q[last]
	q[last] = event{}
	q = q[:last]
	for i := 0; ; {
		c := 2*i + 1
		if c >= len(q) {
			break
		}
		if c+1 < len(q) && q[c+1].before(&q[c]) {
			c++
		}
		if !q[c].before(&q[i]) {
			break
		}
		q[i], q[c] = q[c], q[i]
		i = c
	}
	k.q = q
	return e
}

// after runs f when d has passed.
func (k *kernel) after(d time.Duration, f func()) { k.push(event{at: k.now + max(d, 0), f: f}) }

// between draws a duration.
func (k *kernel) between(lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return lo + time.Duration(k.rnd.Uint64N(uint64(hi-lo)+1))
}

func (k *kernel) chance(p float64) bool { return k.rnd.Float64() < p }

// thread is a coroutine of a process.
type thread struct {
	p     *proc
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	token uint64
	over  bool
	futex *word32Key // on which it sleeps
}

// killed unwinds a coroutine whose process is dead.
type killed struct{}

func (k *kernel) spawn(p *proc, f func()) *thread {
	t := &thread{p: p}
	t.next, t.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			t.over = true
			if r := recover(); r != nil && r != any(killed{}) {
				panic(r)
			}
		}()
		t.yield = yield
		f()
	})
	return t
}

// wake resumes a thread when d has passed, and not when it was to be resumed before.
func (k *kernel) wake(t *thread, d time.Duration) {
	t.token++
	k.push(event{at: k.now + max(d, 0), t: t, token: t.token})
}

// pause gives way: the thread goes on when somebody wakes it.
func (t *thread) pause() {
	if !t.yield(struct{}{}) {
		panic(killed{})
	}
}

// sleep gives way for d.
func (k *kernel) sleep(t *thread, d time.Duration) {
	k.wake(t, d)
	t.pause()
}

// run goes from event to event until done says that it is over, or nothing is left to happen.
func (k *kernel) run(limit time.Duration, most int, done func() bool) (why string) {
	for !done() {
		if len(k.q) == 0 {
			return "nothing is left to happen"
		}
		if k.turns++; k.turns > most {
			return "too many turns"
		}
		e := k.pop()
		if e.at > limit {
			return "time is over"
		}
		k.now = max(k.now, e.at)
		switch {
		case e.f != nil:
			e.f()
		case e.t.over || e.token != e.t.token || e.t.p.dead:
		default:
			k.resume(e.t)
		}
	}
	return ""
}

func (k *kernel) resume(t *thread) {
	p := t.p
	if p.stopped {
		p.frozen = append(p.frozen, t)
		return
	}
	if b := p.inside; b != nil && b != t {
		if !b.over && p.seat.Locked() { // b was stopped with a lock in its hands
			k.wake(t, k.between(time.Microsecond, 3*time.Microsecond))
			return
		}
	} else {
		p.inside = nil
	}
	k.cur = t
	t.next()
	k.cur = nil
}

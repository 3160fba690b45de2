package fault

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"
)

// Worlds that are cut into exact halves, with a witness: both halves ask it, at nearly the same time, over a network that
// delays, loses and repeats; it is down, slow, or out of reach for one host; who asks it dies at each step.

// simWitness is a register that is compared and set when a question arrives, whatever has become of who asked.
type simWitness struct {
	held  []byte
	down  bool
	slow  Time
	loss  float64
	cut   map[int]bool // hosts that do not reach it
	asked int
	votes int // swaps
	races int // questions that found another vote
}

func (w *world) askWitness(p *proc, e AskWitness) {
	s := w.witness
	s.asked++
	if m := p.m; m.att == nil || !exactlyHalf(m.view, m.votes(m.att)) {
		w.bad("rank %v asks the witness and has not half of epoch %d", p.id, m.view.Epoch)
	}
	lost := func() bool { return w.chance(s.loss) }
	way := func() Time {
		d := w.rnd(ms/20, 2*ms) + s.slow
		if w.chance(0.05) {
			d += w.rnd(0, 2*simHL)
		}
		return d
	}
	fail := func(why string) {
		if w.chance(0.5) { // or it is not even told that it failed
			w.at(way(), func() { p.do(func() { p.step(Witnessed{Err: why}) }) })
		}
	}
	if s.cut[p.host] || lost() {
		fail("no way to it")
		return
	}
	w.at(way(), func() {
		if s.down {
			fail("it is down")
			return
		}
		switch {
		case bytes.Equal(s.held, e.Old) || w.bug == bugWitnessStore:
			w.ascend(s.held, e.New)
			s.held = e.New
			s.votes++
			w.tr("the witness takes %v's %s", p.id, registerText(s.held))
		case !bytes.Equal(s.held, e.New):
			s.races++
			w.tr("the witness refuses %v: it holds %s", p.id, registerText(s.held))
		}
		held := s.held
		for range 2 {
			if s.cut[p.host] || lost() {
				fail("no way back")
			} else {
				w.at(way(), func() { p.do(func() { p.step(Witnessed{Held: held}) }) })
			}
			if !w.chance(0.05) { // the answer comes once
				break
			}
		}
	})
}

func registerText(b []byte) string {
	r, err := parseRegister(b)
	return fmt.Sprintf("epoch %d, promised %v, accepted %v %q %v", r.Epoch, r.Promised, r.Accepted, r.Value.Why, err)
}

// ascend checks that a register only ever goes up.
func (w *world) ascend(from, to []byte) {
	if w.bug != bugNone {
		return // what is broken is seen by what comes of it
	}
	a, err := parseRegister(from)
	b, err2 := parseRegister(to)
	if err != nil || err2 != nil {
		w.bad("the witness holds what cannot be read: %v, %v", err, err2)
	}
	up := a.Epoch < b.Epoch || a.Epoch == b.Epoch && !b.Promised.Less(a.Promised) && !b.Accepted.Less(a.Accepted) && !bytes.Equal(from, to)
	if !up || b.Promised.Less(b.Accepted) {
		w.bad("the witness goes from %s to %s", registerText(from), registerText(to))
	}
}

// simulateHalves runs one schedule of a world that is cut in the middle.
func simulateHalves(seed uint64, b bug, trace bool) *world {
	shape := seed * 0x9e3779b97f4a7c15 >> 40
	n := 2 + 2*int(shape%3)
	hosts := 2 + 2*int(shape/3%2)
	if n == 2 {
		hosts = 2
	}
	w := emptyWorld(seed, hosts, b)
	w.trace, w.wire = trace, w.chance(0.2)
	w.witness = &simWitness{held: FirstVote(), cut: map[int]bool{}}
	if w.chance(0.4) {
		w.bt = ms / 2
	}
	var at []int
	right := make([]bool, hosts)
	for h := range hosts {
		right[h] = 2*h >= hosts
	}
	for i := range n { // each half of the hosts has half of the ranks; which half has rank 0 is random
		h := i % 2 * hosts / 2
		if hosts == 4 && i/2%2 == 1 {
			h++
		}
		at = append(at, h)
	}
	w.rng.Shuffle(n, func(i, j int) { at[i], at[j] = at[j], at[i] })
	subs := []Set{SetOf(0, n-1), SetOf(w.rng.IntN(n), w.rng.IntN(n))}
	w.found(at, subs, Set{})

	t0 := w.rnd(20*ms, 80*ms)
	long := 3 * time.Second
	if w.chance(0.3) {
		long = w.rnd(50*ms, 8*simHL)
	}
	oneWay := w.chance(0.1)
	w.at(t0, func() {
		w.cut(func(p, q *proc) bool { return right[p.host] != right[q.host] && (!oneWay || right[p.host]) }, long)
	})
	if w.chance(0.4) { // and what is left is cut once more
		w.at(t0+w.rnd(simHL, 4*simHL), func() {
			side := make([]bool, hosts)
			for i := range side {
				side[i] = w.chance(0.5)
			}
			w.cut(func(p, q *proc) bool { return side[p.host] != side[q.host] }, w.rnd(simHL, 8*simHL))
		})
	}
	w.trouble(t0)
	if w.chance(0.3) {
		w.faults(n)
	}
	for range w.rng.IntN(3) { // around the time when the halves decide
		w.at(t0+simHL+w.rnd(-10*ms, 40*ms), func() {
			p := w.procs[w.rng.IntN(len(w.procs))]
			switch w.rng.IntN(4) {
			case 0:
				w.tr("crash %v", p.id)
				p.crash()
			case 1:
				w.pause(p, w.rnd(ms, 6*simHL))
			case 2:
				for _, q := range w.procs {
					if q.host == p.host {
						w.pause(q, w.rnd(ms, 8*simHL))
					}
				}
			case 3:
				for _, q := range w.procs {
					if right[q.host] == right[p.host] && w.chance(0.9) {
						q.crash()
					}
				}
			}
		})
	}
	if w.chance(0.4) { // who asks dies, or is stopped, at one of its steps towards the witness
		w.onStep(1+w.rng.IntN(12), w.chance(0.7))
	}
	w.run(2200 * ms)
	w.witness.down, w.witness.slow, w.witness.loss = false, 0, 0
	clear(w.witness.cut)
	w.rest()
	return w
}

// trouble schedules what goes wrong with the witness.
func (w *world) trouble(t0 Time) {
	s := w.witness
	if w.chance(0.2) {
		s.loss = w.rng.Float64() / 2
	}
	if w.chance(0.2) {
		s.slow = w.rnd(0, 20*ms)
	}
	for range w.rng.IntN(3) {
		at, d := t0+simHL+w.rnd(-20*ms, 60*ms), w.rnd(ms, 100*ms)
		if w.chance(0.2) {
			at, d = t0, 2*time.Second
		}
		if w.chance(0.5) {
			w.at(at, func() { s.down = true; w.tr("the witness is down for %v", d) })
			w.at(at+d, func() { s.down = false; w.tr("the witness is up") })
			continue
		}
		h := w.rng.IntN(w.hosts)
		w.at(at, func() { s.cut[h] = true; w.tr("host %d does not reach the witness for %v", h, d) })
		w.at(at+d, func() { delete(s.cut, h) })
	}
}

// onStep crashes or stops a process before or after its n-th step that has to do with the witness.
func (w *world) onStep(n int, crash bool) {
	after := w.chance(0.5)
	w.before = func(p *proc, e Effect) bool {
		m := p.m
		_, ask := e.(AskWitness)
		s, sends := e.(Send)
		if sends {
			_, isAccept := s.Msg.(accept)
			_, isCommit := s.Msg.(commit)
			ask = isAccept || isCommit
		}
		if !ask || w.witness.asked == 0 || m == nil {
			return false
		}
		if n--; n != 0 {
			return false
		}
		w.tr("%v %T is its last step for now (crash %v, after %v)", p.id, e, crash, after)
		switch {
		case !crash:
			w.at(0, func() { w.pause(p, w.rnd(ms, 4*simHL)) })
			return false
		case after:
			w.at(0, p.crash)
			return false
		}
		return true
	}
}

func TestSimulationOfHalves(t *testing.T) {
	if *simSeed != 0 {
		w := simulateHalves(*simSeed, bugNone, true)
		fmt.Fprintln(os.Stdout, w.log.String())
		for _, f := range w.fails {
			t.Error(f)
		}
		return
	}
	runs := *simRuns
	if runs == 0 {
		if runs = 3000; testing.Short() {
			runs = 300
		}
	}
	begin, asked, votes, races, bad, on, changes := time.Now(), 0, 0, 0, 0, 0, 0
	for i := range uint64(runs) {
		w := simulateHalves(*simFirst+i, bugNone, false)
		asked, votes, races, changes = asked+w.witness.asked, votes+w.witness.votes, races+w.witness.races, changes+len(w.values)
		for _, p := range w.procs {
			if p.m != nil && !p.dead {
				on++
				break
			}
		}
		for _, f := range w.fails {
			t.Errorf("seed %d: %s", *simFirst+i, f)
		}
		if len(w.fails) > 0 {
			if bad++; bad > 10 {
				t.FailNow()
			}
		}
	}
	d := time.Since(begin)
	t.Logf("%d schedules in %v (%.0f/s): %d questions, %d votes, %d that found another vote; %d changes; somebody goes on in %d", runs,
		d.Round(time.Millisecond), float64(runs)/d.Seconds(), asked, votes, races, changes, on)
	if races == 0 || votes == 0 || on == 0 || on == runs {
		t.Error("the halves do not race")
	}
}

package fault

import (
	"container/heap"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

var (
	simRuns  = flag.Int("fault.runs", 0, "schedules of the simulation (0: 5000, or 500 with -short)")
	simSeed  = flag.Uint64("fault.seed", 0, "run only this schedule, and print what happens")
	simFirst = flag.Uint64("fault.first", 1, "first seed")
)

// faults schedules what goes wrong in the first seconds.
func (w *world) faults(n int) {
	kinds := 1 + w.rng.IntN(6)
	pick := func() *proc { return w.procs[w.rng.IntN(len(w.procs))] }
	storm := w.chance(0.3) // all at nearly the same time
	start := w.rnd(5*ms, 60*ms)
	for range kinds {
		t := w.rnd(5*ms, 700*ms)
		if storm {
			t = start + w.rnd(0, 6*ms)
		}
		switch w.rng.IntN(16) {
		case 0, 1, 2:
			w.at(t, func() { p := pick(); w.tr("crash %v", p.id); p.crash() })
		case 3:
			w.at(t, func() { pick().fuse = 1 + w.rng.IntN(12) })
		case 4: // a host but for at most one
			w.at(t, func() {
				h, keep := w.rng.IntN(w.hosts), w.chance(0.8)
				for _, p := range w.procs {
					if p.host == h && !p.dead {
						if keep {
							keep = false
							continue
						}
						w.tr("crash %v with its host", p.id)
						p.crash()
					}
				}
			})
		case 5, 6:
			w.at(t, func() { w.pause(pick(), w.rnd(ms, 4*simHL)) })
		case 7: // a partition
			w.at(t, func() {
				side := make([]bool, w.hosts)
				for i := range side {
					side[i] = w.chance(0.5)
				}
				w.cut(func(p, q *proc) bool { return side[p.host] != side[q.host] }, w.rnd(10*ms, 8*simHL))
			})
		case 8: // one link
			w.at(t, func() {
				a, b := pick(), pick()
				w.cut(func(p, q *proc) bool {
					return p.host != q.host && (p == a && q == b || p == b && q == a)
				}, w.rnd(10*ms, 8*simHL))
			})
		case 9, 10: // restart
			w.at(t, func() {
				p := pick()
				w.tr("%v crashes and comes back", p.id)
				p.crash()
				slot := p.id.Slot
				if p.id.Inc == 0 || w.chance(0.3) {
					slot = -1
				}
				h := p.host
				if w.chance(0.3) {
					h = w.rng.IntN(w.hosts)
				}
				w.at(w.rnd(0, 100*ms), func() { w.newProc(h).join(slot) })
			})
		case 11: // a newcomer, or a replacement of one that lives
			w.at(t, func() {
				slot := -1
				if w.chance(0.5) {
					slot = w.rng.IntN(n)
				}
				p := w.newProc(w.rng.IntN(w.hosts))
				p.join(slot)
				if w.chance(0.3) {
					w.at(w.rnd(0, 300*ms), p.crash)
				}
			})
		case 12:
			w.at(t, func() {
				p := pick()
				switch w.rng.IntN(4) {
				case 0:
					p.leave = true
				case 1:
					p.stuck = true
					w.tr("%v is stuck", p.id)
				case 2:
					p.do(func() { p.step(Abort{100, "a test"}) })
				case 3:
					p.do(func() { p.step(Abort{1, "a test"}) })
				}
			})
		case 14: // deaf in one direction
			w.at(t, func() {
				a, b := pick(), pick()
				w.cut(func(p, q *proc) bool { return p.host != q.host && p == a && q == b }, w.rnd(10*ms, 12*simHL))
			})
		case 15: // slow to come to its boundary
			w.at(t, func() { pick().slow = w.rnd(simHL, 3*simHL) })
		case 13: // crash of whoever coordinates now
			w.at(t, func() {
				for _, p := range w.procs {
					if !p.dead && p.m != nil && p.m.att != nil {
						w.tr("crash of a coordinator %v", p.id)
						p.crash()
						return
					}
				}
				pick().fuse = 1 + w.rng.IntN(5)
			})
		}
	}
}

func (w *world) pause(p *proc, d Time) {
	if p.pause || p.dead {
		return
	}
	w.tr("%v is stopped for %v", p.id, d)
	p.pause = true
	w.watch(p)
	w.at(d, func() {
		w.tr("%v goes on", p.id)
		p.pause = false
		w.watch(p)
		back := p.back
		p.back = nil
		for _, f := range back {
			p.do(f)
		}
	})
}

// cut breaks links for a while; what is sent meanwhile comes later.
func (w *world) cut(which func(p, q *proc) bool, d Time) {
	var ps [][2]int
	for _, p := range w.procs {
		for _, q := range w.procs {
			k := [2]int{p.pid, q.pid}
			if p == q || !which(p, q) {
				continue
			}
			if w.links[k] == nil {
				w.links[k] = &link{}
			}
			if !w.links[k].down {
				w.links[k].down = true
				ps = append(ps, k)
				w.watchPair(p, q)
			}
		}
	}
	w.tr("links down for %v: %v", d, ps)
	w.at(d, func() {
		for _, k := range ps {
			l := w.links[k]
			l.down = false
			for range len(l.queue) {
				w.at(ms/10, func() {
					if !l.down {
						l.pop()
					}
				})
			}
			w.watchPair(w.procs[k[0]], w.procs[k[1]])
		}
		w.tr("links up: %v", ps)
	})
}

func (w *world) run(until Time) {
	for len(w.q) > 0 && w.q[0].at <= until && len(w.fails) == 0 {
		e := heap.Pop(&w.q).(simEvent)
		w.now = max(w.now, e.at)
		e.run()
		if w.steps > 200_000 {
			w.bad("the world does not come to rest: %d steps", w.steps)
		}
	}
	w.now = max(w.now, until)
}

// simulate runs one schedule and returns its world.
func simulate(seed uint64, b bug, trace bool) *world {
	shape := seed * 0x9e3779b97f4a7c15 >> 40
	n := 2 + int(shape%6)
	hosts := 1 + int(shape/6%3)
	w := newWorld(seed, n, hosts, b)
	w.trace = trace
	w.faults(n)
	w.run(2200 * ms)
	w.rest()
	return w
}

// rest checks that once faults have stopped the living go on, some time.
func (w *world) rest() {
	for range 4 {
		if len(w.fails) > 0 {
			return
		}
		if len(w.unsettled()) == 0 {
			return
		}
		w.run(w.now + 10*simHL)
	}
	for _, s := range w.unsettled() {
		w.bad("%s", s)
	}
}

// unsettled says what is not as it should be after the last fault.
func (w *world) unsettled() (what []string) {
	bad := func(f string, a ...any) { what = append(what, fmt.Sprintf(f, a...)) }
	var newest *View
	for _, p := range w.procs {
		if p.m != nil && !p.dead && (newest == nil || p.m.view.Epoch > newest.Epoch) {
			newest = &p.m.view
		}
	}
	if newest == nil {
		return nil
	}
	stuck := false // one that comes to no boundary any more keeps newcomers out
	for _, x := range newest.Members {
		p := w.find(x.ID)
		stuck = stuck || p != nil && p.stuck
	}
	before := map[int]int{}
	for _, p := range w.procs {
		before[p.pid] = p.index
	}
	w.run(w.now + 2*simHL)
	for _, p := range w.procs {
		switch {
		case p.m == nil && !p.dead && !stuck:
			bad("pid %d still waits to join (slot %d)", p.pid, p.joinSlot)
		case p.m == nil || p.dead: // gone
		case p.m.view.Epoch != newest.Epoch:
			bad("rank %v is in epoch %d, others in %d", p.id, p.m.view.Epoch, newest.Epoch)
		case findMember(newest.Members, p.id) == nil:
			bad("rank %v lives and is not in epoch %d, and does not know", p.id, newest.Epoch)
		case !p.stuck && p.index == before[p.pid]:
			bad("rank %v does not go on: busy %v group %d op %d boundary %v held %v at %d (of %d)",
				p.id, p.busy, p.group, p.seq, p.inBound, p.holding, p.holdAt, p.bound)
		}
	}
	for _, x := range newest.Members {
		if p := w.find(x.ID); p == nil || p.dead {
			bad("rank %v is dead and in epoch %d", x.ID, newest.Epoch)
		}
	}
	return what
}

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		w := simulate(*simSeed, bugNone, true)
		fmt.Fprintln(os.Stdout, w.log.String())
		for _, f := range w.fails {
			t.Error(f)
		}
		return
	}
	runs := *simRuns
	if runs == 0 {
		if runs = 5000; testing.Short() {
			runs = 500
		}
	}
	begin, steps, done, grown, changes, bad, empty, epochs := time.Now(), 0, 0, 0, 0, 0, 0, 0
	for i := range uint64(runs) {
		w := simulate(*simFirst+i, bugNone, false)
		steps, done, grown, changes = steps+w.steps, done+w.doneSum, grown+w.grown, changes+w.changes
		n := 0
		for _, v := range w.values {
			epochs++
			if strings.Contains(v.Why, "did not hold") {
				n++
			}
		}
		if empty += n; n > 6 {
			t.Logf("seed %d: %d changes without a change", *simFirst+i, n)
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
	t.Logf("%d schedules in %v (%.0f/s): %d steps, %d returns, %d installs, %d of them growth; %d changes, %d of them empty", runs, d.Round(time.Millisecond),
		float64(runs)/d.Seconds(), steps, done, changes, grown, epochs, empty)
}

// TestMutants breaks one rule at a time, and wants the simulation to see it.
func TestMutants(t *testing.T) {
	hint := map[bug]uint64{bugNoQuorum: 18, bugIgnoreAccepted: 104, bugNoRecheck: 427, bugNoProxyRead: 208, bugNoWord: 64, bugNoClose: 10,
		bugEarlyReopen: 239, bugAnyAccept: 1928, bugUnsure: 4, bugHalf: 50,
		bugWitnessBlind: 3, bugWitnessAny: 59, bugWitnessLater: 1029, bugWitnessLowest: 3, bugWitnessUnasked: 2, bugWitnessOnce: 2, bugWitnessStore: 3}
	for b := bugNone + 1; b <= bugLast; b++ {
		t.Run(b.String(), func(t *testing.T) {
			seeds := []uint64{max(hint[b], 1)} // where it was seen last: the rest is for when the code has changed
			for i := range uint64(10_000) {
				seeds = append(seeds, i+1)
			}
			run := simulate
			if b >= bugWitnessBlind {
				run = simulateHalves
			}
			for i, seed := range seeds {
				if testing.Short() && i > 1500 {
					t.Skip("not seen in few schedules")
				}
				if w := run(seed, b, false); len(w.fails) > 0 {
					t.Logf("seen by schedule %d: %.150s", seed, w.fails[0])
					return
				}
			}
			t.Error("no schedule sees that this rule is broken")
		})
	}
}

func (b bug) String() string {
	return [...]string{"none", "commit without a quorum", "ignore what is accepted", "proxy without a second look",
		"proxy without a first look", "cut from the dead", "cut without word", "words stay open", "reopened early",
		"accept below the promise", "growth without standing still", "a number twice", "any half is a quorum",
		"witness not looked at", "witness overwritten by a lower ballot", "witness overwritten by an earlier epoch",
		"lowest half decides alone", "half decides alone", "a promise of the witness is enough", "witness stores"}[b]
}

// TestReplay runs a schedule twice: the same must happen.
func TestReplay(t *testing.T) {
	for seed := range uint64(30) {
		a, b := simulate(seed+1, bugNone, true), simulate(seed+1, bugNone, true)
		if a.log.String() != b.log.String() {
			t.Fatalf("seed %d runs differently the second time", seed+1)
		}
	}
}

package fault

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// The lab: scenes that are written down, run in the simulated world and checked by the same rules.

type lab struct {
	*testing.T
	w *world
}

// newLab starts rank 0, 1, ... on the hosts given, with subgroups 100, 101, ...
func newLab(t *testing.T, hosts []int, subs ...Set) *lab {
	t.Helper()
	return newLabIn(t, hosts, func(*world) {}, subs...)
}

// newLabIn starts them in a world that init has changed.
func newLabIn(t *testing.T, hosts []int, init func(*world), subs ...Set) *lab {
	t.Helper()
	n := 0
	for _, h := range hosts {
		n = max(n, h+1)
	}
	w := emptyWorld(1, n+1, bugNone)
	w.trace, w.wire = true, true
	init(w)
	w.found(hosts, subs, Set{})
	l := &lab{t, w}
	t.Cleanup(func() {
		if t.Failed() && testing.Verbose() {
			t.Log(w.log.String())
		}
	})
	l.run(30 * ms)
	return l
}

func (l *lab) run(d Time) {
	l.Helper()
	l.w.run(l.w.now + d)
	for _, f := range l.w.fails {
		l.Fatal(f)
	}
}

// rank is the process that holds a slot, or held it last.
func (l *lab) rank(slot int) (p *proc) {
	for _, q := range l.w.procs {
		if q.id.Slot == slot && q.id.Inc > 0 && (p == nil || q.id.Inc > p.id.Inc) {
			p = q
		}
	}
	return p
}

func (l *lab) kill(slots ...int) {
	for _, s := range slots {
		l.rank(s).crash()
	}
}

// wantView wants the living to be in this epoch, with these members (slot, and .inc if it is not 1).
func (l *lab) wantView(epoch uint64, members string) {
	l.Helper()
	for _, p := range l.w.procs {
		if p.m == nil || p.dead {
			continue
		}
		var s []string
		for _, x := range p.m.View().Members {
			if x.Inc == 1 {
				s = append(s, fmt.Sprint(x.Slot))
			} else {
				s = append(s, fmt.Sprintf("%d.%d", x.Slot, x.Inc))
			}
		}
		if got := strings.Join(s, " "); got != members || p.m.View().Epoch != epoch {
			l.Fatalf("rank %v is in epoch %d with %q, want epoch %d with %q", p.id, p.m.View().Epoch, got, epoch, members)
		}
	}
}

func (l *lab) wantWhy(epoch uint64, part string) {
	l.Helper()
	if why := l.w.values[epoch].Why; !strings.Contains(why, part) {
		l.Fatalf("epoch %d is because of %q, want %q", epoch, why, part)
	}
}

func (l *lab) wantEnd(p *proc, part string) {
	l.Helper()
	if !p.dead || !strings.Contains(p.ended, part) {
		l.Fatalf("rank %v: ended %v because of %q, want %q", p.id, p.dead, p.ended, part)
	}
}

// goOn wants all living members to complete operations.
func (l *lab) goOn() {
	l.Helper()
	at := map[int]int{}
	for _, p := range l.w.procs {
		at[p.pid] = p.index
	}
	l.run(simHL)
	for _, p := range l.w.procs {
		if p.m != nil && !p.dead && !p.stuck && p.index <= at[p.pid] {
			l.Fatalf("rank %v does not go on", p.id)
		}
	}
}

func TestOneDeath(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1}, SetOf(0, 1), SetOf(2, 3))
	l.kill(3)
	l.run(30 * ms)
	l.wantView(2, "0 1 2")
	l.wantWhy(2, "rank 3 died (seen by the kernel")
	if g, _ := l.rank(0).m.Group(100); g.Version != 1 {
		t.Errorf("group 100 lost nobody and has version %d", g.Version)
	}
	if g, _ := l.rank(2).m.Group(101); g.Version != 2 || g.Active != SetOf(2) {
		t.Errorf("group 101 lost rank 3: %+v", g)
	}
	l.goOn()
}

func TestDeathOfAWholeHost(t *testing.T) { // nobody there can vouch or prove: silence decides
	l := newLab(t, []int{0, 0, 1, 2})
	l.kill(3)
	l.run(simHL - 5*ms)
	l.wantView(1, "0 1 2 3")
	l.run(60 * ms)
	l.wantView(2, "0 1 2")
	l.wantWhy(2, "nobody of its host speaks for it")
	l.goOn()
}

func TestCoordinatorDies(t *testing.T) {
	is := map[string]func(Msg) bool{
		"in prepare": func(x Msg) bool { _, ok := x.(prepare); return ok },
		"in accept":  func(x Msg) bool { _, ok := x.(accept); return ok },
		"in commit":  func(x Msg) bool { _, ok := x.(commit); return ok },
	}
	for name, phase := range is {
		for sent := range 4 {
			t.Run(fmt.Sprintf("%s after %d", name, sent), func(t *testing.T) {
				l := newLab(t, []int{0, 0, 0, 1, 1}, SetOf(0, 3), SetOf(1, 4))
				n := 0
				l.w.before = func(p *proc, e Effect) bool {
					s, ok := e.(Send)
					if p.id.Slot != 0 || !ok || !phase(s.Msg) {
						return false
					}
					n++
					return n == sent+1
				}
				l.kill(4)
				l.run(100 * ms)
				if n <= sent { // it never sends as many
					l.wantView(2, "0 1 2 3")
					return
				}
				v := l.rank(1).m.View()
				l.wantView(v.Epoch, "1 2 3")
				l.goOn()
			})
		}
	}
}

func TestTwoAtOnce(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1, 1}, SetOf(0, 4))
	l.kill(1, 4)
	l.run(40 * ms)
	l.wantView(l.rank(0).m.View().Epoch, "0 2 3")
	l.goOn()
}

func TestLastOfItsHost(t *testing.T) { // one of eight lives on: it votes for seven
	l := newLab(t, []int{0, 0, 0, 0, 0, 0, 0, 0})
	l.kill(0, 1, 2, 3, 4, 6, 7)
	l.run(60 * ms)
	l.wantView(l.rank(5).m.View().Epoch, "5")
	l.goOn()
}

func TestMostOfAHost(t *testing.T) { // four of six die on one host, whose last process votes for them
	l := newLab(t, []int{0, 0, 0, 0, 0, 1})
	l.kill(0, 1, 2, 3)
	l.run(60 * ms)
	l.wantView(l.rank(4).m.View().Epoch, "4 5")
	l.goOn()
}

func TestPartition(t *testing.T) {
	l := newLab(t, []int{0, 1, 2, 3, 4})
	l.w.cut(func(p, q *proc) bool { return (p.id.Slot < 3) != (q.id.Slot < 3) }, 10*time.Second)
	l.run(4 * simHL)
	l.wantView(l.rank(0).m.View().Epoch, "0 1 2")
	l.wantEnd(l.rank(3), "no quorum: 3 of the 5 ranks of epoch 1 cannot be reached (0, 1, 2)")
	l.wantEnd(l.rank(4), "no quorum")
	l.goOn()
}

func TestHalves(t *testing.T) { // the half with the lowest rank goes on
	l := newLab(t, []int{0, 0, 1, 1})
	l.w.cut(func(p, q *proc) bool { return p.host != q.host }, 10*time.Second)
	l.run(4 * simHL)
	l.wantView(l.rank(0).m.View().Epoch, "0 1")
	l.wantEnd(l.rank(2), "no quorum")
	l.goOn()
}

func TestLinkBetweenTwo(t *testing.T) {
	l := newLab(t, []int{0, 1, 2})
	l.w.cut(func(p, q *proc) bool { return p.id.Slot+q.id.Slot == 1 }, 10*time.Second)
	l.run(8 * simHL)
	l.wantView(l.rank(0).m.View().Epoch, "0 2")
	l.wantEnd(l.rank(1), "evicted")
	l.goOn()
}

func TestFewestLinks(t *testing.T) {
	l := newLab(t, []int{0, 1, 2, 3})
	l.w.cut(func(p, q *proc) bool { return p.id.Slot*q.id.Slot == 2 || p.id.Slot*q.id.Slot == 3 }, 10*time.Second)
	l.run(8 * simHL) // 1 reaches neither 2 nor 3
	l.wantView(l.rank(0).m.View().Epoch, "0 2 3")
	l.wantEnd(l.rank(1), "evicted")
	l.goOn()
}

func TestLate(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1})
	p := l.rank(3)
	p.stuck = true
	l.run(3 * simHL)
	l.wantView(1, "0 1 2 3") // late, and the deadline of no operation is over
	l.run(4 * simHL)
	l.wantView(2, "0 1 2")
	l.wantWhy(2, "rank 3 is late: the deadline of operation")
	l.wantWhy(2, "waits for nothing")
	l.wantEnd(p, "rank 3 is late")
	l.goOn()
}

func TestStoppedIsNotDead(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1})
	l.w.pause(l.rank(3), 3*simHL) // 2, on its host, speaks for it
	l.run(5 * simHL)
	l.wantView(1, "0 1 2 3")
	l.goOn()
}

func TestStoppedCoordinatorStays(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1})
	l.w.pause(l.rank(0), simHL)
	l.kill(3)
	l.run(80 * ms)
	if v := l.rank(1).m.View(); v.Epoch != 2 || len(v.Members) != 3 {
		t.Fatalf("others do not overtake it: %+v", v)
	}
	l.run(2 * simHL)
	l.wantView(2, "0 1 2")
	l.goOn()
}

func TestDeadlock(t *testing.T) {
	l := newLab(t, []int{0, 0, 1}, SetOf(0, 1), SetOf(0, 1))
	l.rank(1).order = []uint64{1, 101, 100, 1} // all others: 1, 100, 101, 1
	l.run(8 * simHL)
	l.wantView(2, "0 1 2")
	l.wantWhy(2, "deadlock: rank 0 waits in group 100 op")
	l.wantWhy(2, "for rank 1, rank 1 waits in group 101 op")
	for _, r := range []int{0, 1} {
		for _, id := range []uint64{100, 101} {
			if g, _ := l.rank(r).m.Group(id); !strings.Contains(g.Failed, "deadlock") {
				t.Errorf("rank %d: group %d: %+v", r, id, g)
			}
		}
	}
	l.goOn()
}

func TestGrowth(t *testing.T) {
	l := newLab(t, []int{0, 0, 1}, SetOf(1, 2))
	l.kill(1)
	l.run(30 * ms)
	l.wantView(2, "0 2")
	p := l.w.newProc(0)
	p.join(1)
	l.run(3 * simHL)
	l.wantView(3, "0 1.2 2")
	if g, ok := p.m.Group(100); !ok || g.Version != 3 || g.Active != SetOf(1, 2) {
		t.Errorf("the newcomer has group 100 as %+v", g)
	}
	l.goOn()
	q := l.w.newProc(1) // and one at any slot: the world becomes larger
	q.join(-1)
	l.run(3 * simHL)
	l.wantView(4, "0 1.2 2 3")
	if q.m.View().Size != 4 {
		t.Errorf("size %d", q.m.View().Size)
	}
	l.goOn()
}

func TestGrowthWithALossMeanwhile(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1})
	l.w.before = func(p *proc, e Effect) bool { // as it is about to stand still
		h, ok := e.(Hold)
		return ok && h.Count > 0 && p.id == ID{2, 1}
	}
	p := l.w.newProc(0)
	p.join(-1)
	l.run(6 * simHL)
	l.wantView(3, "0 1 2.2 3")
	if l.w.values[3].At == 0 || l.w.values[2].At != 0 {
		t.Error("epoch 2 is the loss, epoch 3 the growth")
	}
	l.goOn()
}

func TestReplacement(t *testing.T) { // the old one lives
	l := newLab(t, []int{0, 0, 1})
	old := l.rank(1)
	l.w.newProc(1).join(1)
	l.run(4 * simHL)
	l.wantView(3, "0 1.2 2")
	l.wantEnd(old, "is replaced by a new process")
	l.goOn()
}

func TestFull(t *testing.T) { // capacity 4
	l := newLab(t, []int{0, 1})
	for range 2 {
		l.w.newProc(0).join(-1)
	}
	l.run(4 * simHL)
	p := l.w.newProc(0)
	p.join(-1)
	q := l.w.newProc(0)
	q.join(7)
	l.run(4 * simHL)
	l.wantEnd(p, "4 of 4 slots")
	l.wantEnd(q, "slot 7 does not exist: the capacity is 4 slots")
	l.goOn()
}

func TestJoinerDiesWhileItJoins(t *testing.T) {
	for _, d := range []Time{0, 1, 2, 3, 5, 8, 13, 21, 34, 55} {
		l := newLab(t, []int{0, 0, 1})
		p := l.w.newProc(1)
		p.join(-1)
		l.run(d * ms)
		p.crash()
		l.run(5 * simHL)
		v := l.rank(0).m.View()
		l.wantView(v.Epoch, "0 1 2")
		l.goOn()
	}
}

func TestLeave(t *testing.T) {
	l := newLab(t, []int{0, 0, 1})
	p := l.rank(0)
	p.leave = true
	l.run(2 * simHL)
	l.wantView(2, "1 2")
	l.wantWhy(2, "rank 0 left")
	l.wantEnd(p, "left")
	l.goOn()
}

func TestAllLeave(t *testing.T) {
	for seed := range 20 {
		l := newLab(t, []int{0, 0, 1, 1, 2})
		for range seed {
			l.w.rng.Uint64()
		}
		for _, p := range l.w.procs {
			p.leave = true
		}
		l.run(8 * simHL)
		for _, p := range l.w.procs {
			l.wantEnd(p, "left")
		}
	}
}

func TestAbortOfASubgroup(t *testing.T) {
	l := newLab(t, []int{0, 0, 1, 1}, SetOf(1, 2, 3), SetOf(0, 1))
	l.rank(3).step(Abort{100, "dtype differs: float32 on rank 1, float16 on rank 3"})
	l.run(60 * ms)
	l.wantView(2, "0 1 2 3")
	for _, r := range []int{1, 2, 3} {
		if g, _ := l.rank(r).m.Group(100); g.Failed != "aborted by rank 3: dtype differs: float32 on rank 1, float16 on rank 3" {
			t.Errorf("rank %d: %+v", r, g)
		}
	}
	if g, _ := l.rank(0).m.Group(101); g.Failed != "" || g.Version != 1 {
		t.Errorf("group 101: %+v", g)
	}
	l.goOn()
}

func TestAbortOfTheWorld(t *testing.T) {
	l := newLab(t, []int{0, 0, 1})
	p := l.rank(1)
	p.step(Abort{1, "interrupted"})
	l.run(60 * ms)
	l.wantView(2, "0 2")
	l.wantEnd(p, "rank 1 aborted: interrupted")
	l.goOn()
}

func TestStaleMemberIsEvicted(t *testing.T) {
	l := newLab(t, []int{0, 0, 1})
	p := l.rank(2)
	l.w.pause(p, 6*simHL)
	l.run(4 * simHL)
	if v := l.rank(0).m.View(); len(v.Members) != 2 {
		t.Fatalf("it is still there: %+v", v)
	}
	l.run(4 * simHL)
	l.wantEnd(p, "evicted: rank 2 was silent")
	l.goOn()
}

func TestDeaf(t *testing.T) { // a link that is broken in one direction
	for _, c := range []struct {
		from, to int
		stay     string
	}{{0, 1, "0 2"}, {1, 0, "0 2"}, {0, 2, "0 1"}, {2, 0, "0 1"}, {1, 2, "0 1"}, {2, 1, "0 1"}} {
		t.Run(fmt.Sprintf("%d does not hear %d", c.to, c.from), func(t *testing.T) {
			l := newLab(t, []int{0, 1, 2})
			l.w.cut(func(p, q *proc) bool { return p.id.Slot == c.from && q.id.Slot == c.to }, 3*time.Second)
			l.run(20 * simHL)
			v := l.rank(0).m.View()
			l.wantView(v.Epoch, c.stay)
			l.goOn()
		})
	}
}

func TestStepsBackForNobody(t *testing.T) { // a broken link, and then both who could decide about it are gone
	l := newLab(t, []int{0, 1, 0})
	l.w.cut(func(p, q *proc) bool { return p.id.Slot+q.id.Slot == 3 }, 10*time.Second)
	l.run(simHL + 8*ms)
	l.wantView(1, "0 1 2")
	l.kill(0)
	l.run(8 * simHL)
	l.wantEnd(l.rank(1), "no quorum")
	l.wantView(l.rank(2).m.View().Epoch, "2")
	l.goOn()
}

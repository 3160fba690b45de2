package collectives

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Here a schedule interleaves every load, store and swap of a shared word: each rank's caller and each rank's loop is a
// coroutine that stops before each of them, and a death may come between any two.

// stepMem is the memory of one rank: it stops its user before each access.
type stepMem struct {
	machine
	w    *stepSim
	rank int
}

// firstArea is where the area of an arena's first group is.
const firstArea = dirBytes + pageBytes - areaHeader

func (m stepMem) Word64(b []byte, off int) Word {
	own := len(m.w.ranks) > 0 && &b[0] == &m.w.ranks[m.rank].mem[0]
	return stepWord{m.machine.Word64(b, off), m, own && off == firstArea}
}

func (m stepMem) Word32(b []byte, off int) Word32 { return stepWord32{m.machine.Word32(b, off), m} }

func (m stepMem) Copy(dst, src []byte) {
	n := copy(dst, src[:len(src)/2])
	m.w.pause()
	copy(dst[n:], src[n:])
}

func (m stepMem) Wake(w Word32) { m.machine.Wake(w.(stepWord32).Word32) }

type stepWord struct {
	Word
	m    stepMem
	done bool // how far this rank has returned
}

func (s stepWord) Load() uint64 { s.m.w.pause(); return s.Word.Load() }

func (s stepWord) Store(x uint64) {
	if s.done {
		s.m.worst()
	}
	s.m.w.pause()
	s.Word.Store(x)
}

func (s stepWord) CompareAndSwap(old, new uint64) bool {
	s.m.w.pause()
	ok := s.Word.CompareAndSwap(old, new)
	if ok {
		s.m.worst()
	}
	return ok
}

type stepWord32 struct {
	Word32
	m stepMem
}

func (s stepWord32) Load() uint32        { s.m.w.pause(); return s.Word32.Load() }
func (s stepWord32) Store(x uint32)      { s.m.w.pause(); s.Word32.Store(x) }
func (s stepWord32) Add(x uint32) uint32 { s.m.w.pause(); return s.Word32.Add(x) }
func (s stepWord32) CompareAndSwap(old, new uint32) bool {
	s.m.w.pause()
	return s.Word32.CompareAndSwap(old, new)
}

// worst is where a rank has decided and not returned: it may be taken off the processor, and somebody die meanwhile.
func (m stepMem) worst() {
	w := m.w
	if w.cur == nil || w.rnd.IntN(6) > 0 {
		return
	}
	w.asleep[m.rank] = w.turn + w.rnd.IntN(300)
	if len(w.dying) > 0 {
		w.dying[0] = w.turn + 1 + w.rnd.IntN(4)
	}
}

type coroutine struct {
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	over  bool
}

type killed struct{}

// stepSim is a sim whose ranks stop in the middle of things.
type stepSim struct {
	*sim
	cur     *coroutine
	callers []*coroutine
	loops   []*coroutine
	change  *stepChange   // under way
	views   []*stepChange // decided
	dying   []int         // deaths to come: at which turns
	asleep  map[int]int   // callers that do not run until that turn
	turn    int
}

// stepChange is a view in the making: those who were asked close and say how far the living of their host are.
type stepChange struct {
	epoch, cut uint64
	ask        map[int]bool
	said       map[int]uint64
	members    []int
}

// pause lets others run.
func (w *stepSim) pause() {
	if w.cur != nil {
		w.wait()
	}
}

func (w *stepSim) wait() {
	if !w.cur.yield(struct{}{}) {
		panic(killed{})
	}
}

func (w *stepSim) spawn(f func()) *coroutine {
	co := &coroutine{}
	co.next, co.stop = iter.Pull(iter.Seq[struct{}](func(yield func(struct{}) bool) {
		defer func() {
			co.over = true
			if r := recover(); r != nil && r != any(killed{}) {
				panic(r)
			}
		}()
		co.yield = yield
		f()
	}))
	return co
}

func (w *stepSim) resume(co *coroutine) {
	w.cur = co
	co.next()
	w.cur = nil
}

// loop is what the loop of a rank does: frames, closes and views.
func (w *stepSim) loop(x *simRank) {
	for {
		from := w.rnd.IntN(len(w.ranks))
		w.deliver(from, x.rank)
		w.wait()
		epoch := x.comm.Current().Epoch + 1
		if ch := w.change; ch != nil && ch.epoch == epoch && ch.ask[x.rank] && w.rnd.IntN(3) == 0 {
			done := x.comm.CloseWord(epoch, func(r int) bool { return !w.ranks[r].dead })
			for r, seq := range done {
				ch.said[r] = max(ch.said[r], seq)
			}
			delete(ch.ask, x.rank)
		}
		for _, v := range w.views {
			if v.epoch == epoch && w.rnd.IntN(3) == 0 {
				x.comm.Install(epoch, v.cut, w.members(x.rank, v.members), "")
				x.comm.Reopen(epoch)
				break
			}
		}
		if w.rnd.IntN(6) == 0 {
			x.comm.Tell()
		}
		w.wait()
	}
}

// living lists the ranks that live, of a host or (-1) of all.
func (w *stepSim) living(host int) (rs []int) {
	for _, x := range w.ranks {
		if !x.dead && (host < 0 || x.host == host) {
			rs = append(rs, x.rank)
		}
	}
	return rs
}

// die ends a rank where it stands. Of what it has sent a part still arrives.
func (w *stepSim) die(r int) {
	w.ranks[r].dead = true
	w.callers[r].stop()
	w.loops[r].stop()
	for to := range w.ranks {
		q := &w.wire[r*len(w.ranks)+to]
		*q = (*q)[:w.rnd.IntN(len(*q)+1)]
	}
	if w.change == nil {
		w.epoch++
		w.change = &stepChange{epoch: w.epoch, ask: map[int]bool{}, said: map[int]uint64{}}
	}
	// Of each host some speak, at least one that lives: the others may be stopped.
	ch := w.change
	delete(ch.ask, r)
	for h := range len(w.ranks) {
		ms := w.living(h)
		if len(ms) == 0 {
			continue
		}
		for _, m := range ms {
			if _, said := ch.said[m]; !said && w.rnd.IntN(2) == 0 {
				ch.ask[m] = true
			}
		}
		if !slices.ContainsFunc(ms, func(m int) bool { _, said := ch.said[m]; return said || ch.ask[m] }) {
			ch.ask[ms[w.rnd.IntN(len(ms))]] = true
		}
	}
}

// decide makes the view when all who were asked have spoken, for all who live.
func (w *stepSim) decide() {
	ch := w.change
	if ch == nil || len(ch.ask) > 0 {
		return
	}
	ch.members = w.living(-1)
	for _, r := range ch.members {
		seq, ok := ch.said[r]
		if !ok { // whoever spoke for its host had not bound its memory: it speaks itself
			ch.ask[r] = true
			continue
		}
		ch.cut = max(ch.cut, seq)
	}
	if len(ch.ask) > 0 {
		ch.cut = 0
		return
	}
	w.views = append(w.views, ch)
	w.change = nil
}

// TestSteps is TestSchedules at the grain of shared words, with deaths in the middle of a step.
func TestSteps(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	count := 400
	if testing.Short() {
		count = 60
	}
	for i := range uint64(count) {
		if !t.Run(fmt.Sprint(seed+i), func(t *testing.T) { steps(t, seed+i) }) {
			break
		}
	}
}

func steps(t testing.TB, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 78))
	size := 2 + r.IntN(4)
	w := &stepSim{sim: &sim{}, asleep: map[int]int{}}
	hosts, depth := 1+r.IntN(min(size, 3)), 1+r.IntN(3)
	w.sim.build(t, hosts, size, Shape{SlotBytes: testSlot, Depth: depth, Lanes: 1}, func(rank int) Memory { return stepMem{w: w, rank: rank} })
	w.rnd = r
	tasks := make([]*task, 2+r.IntN(5))
	for i := range tasks {
		tasks[i] = drawTask(r, size)
	}
	type outcome struct {
		epoch uint64
		ok    bool
	}
	got := make([]map[uint64]outcome, size)
	for _, x := range w.ranks {
		got[x.rank] = map[uint64]outcome{}
		for _, k := range tasks {
			x.start(k.call(x.rank), true)
		}
		w.callers = append(w.callers, w.spawn(func() {
			for len(x.queue) > 0 {
				if o, _ := x.step(); o != nil {
					require.NoError(t, tasks[o.Seq-1].verify(x, o))
					got[x.rank][o.Seq] = outcome{o.Ver.Epoch, o.Err == nil}
				}
				w.wait()
			}
		}))
		w.loops = append(w.loops, w.spawn(func() { w.loop(x) }))
	}
	defer func() {
		for i := range w.callers {
			w.callers[i].stop()
			w.loops[i].stop()
		}
	}()
	for range r.IntN(size) {
		at := r.IntN(300 * len(tasks))
		w.dying = append(w.dying, at)
		if r.IntN(2) == 0 {
			w.dying = append(w.dying, at+r.IntN(60)) // and another soon after
		}
	}
	for ; ; w.turn++ {
		turn := w.turn
		if turn > 400_000 {
			t.Fatalf("stuck: %s", w.state())
		}
		busy := w.change != nil
		for _, x := range w.ranks {
			busy = busy || !x.dead && !w.callers[x.rank].over
		}
		if !busy {
			break
		}
		if i := slices.Index(w.dying, turn); i >= 0 {
			w.dying = slices.Delete(w.dying, i, i+1)
			if ms := w.living(-1); len(ms) > 1 {
				w.die(ms[r.IntN(len(ms))])
			}
		}
		x := w.ranks[r.IntN(size)]
		if x.dead {
			continue
		}
		for range 1 + r.IntN(12) { // a while on one processor
			if r.IntN(2) == 0 && !w.callers[x.rank].over && w.asleep[x.rank] <= turn {
				w.resume(w.callers[x.rank])
			} else {
				w.resume(w.loops[x.rank])
			}
		}
		w.decide()
	}
	var first map[uint64]outcome
	for _, x := range w.ranks {
		if x.dead {
			continue
		}
		require.Len(t, got[x.rank], len(tasks))
		if first == nil {
			first = got[x.rank]
		}
		require.Equal(t, first, got[x.rank], "rank %d", x.rank)
	}
}

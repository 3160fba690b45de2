package collectives

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/serry-project/serry/device"

	"github.com/stretchr/testify/require"
)

// sim is ranks on hosts, in one goroutine: a schedule says who steps next, and when frames arrive. The views are decided
// here, in the simplest way that keeps the machine's rules: all living members close, the cut is the most that one of them
// has returned from, and each installs at its own time.
type sim struct {
	t     testing.TB
	rnd   *rand.Rand
	shape Shape
	ranks []*simRank
	wire  [][]device.Frame // by from*n+to: in order
	epoch uint64
	todo  []*simInstall
	lost  map[int]bool
}

type simRank struct {
	w     *sim
	rank  int
	host  int
	mem   []byte
	comm  *Comm
	dead  bool
	seq   uint64 // issued
	queue []*Op
}

type simInstall struct {
	epoch, cut uint64
	members    []int
	left       map[int]bool // who has not installed it
}

// newSim puts ranks on hosts round robin.
func newSim(t testing.TB, hosts, ranks int, shape Shape) *sim {
	w := &sim{}
	w.build(t, hosts, ranks, shape, func(int) Memory { return nil })
	return w
}

// build is newSim with a memory for each rank.
func (w *sim) build(t testing.TB, hosts, ranks int, shape Shape, memory func(rank int) Memory) {
	shape.Size = ranks
	*w = sim{t: t, shape: shape, epoch: 1, wire: make([][]device.Frame, ranks*ranks), lost: map[int]bool{}}
	words := make([][]byte, hosts)
	for i := range words {
		words[i] = make([]byte, WordsBytes)
	}
	var all []int
	for r := range ranks {
		w.ranks = append(w.ranks, &simRank{w: w, rank: r, host: r % hosts, mem: make([]byte, dirBytes+pageBytes+shape.Bytes())})
		all = append(all, r)
	}
	for r, x := range w.ranks {
		a, err := NewArena(x.mem, func(int) error { return nil }, shape)
		require.NoError(t, err)
		a.Memory = memory(r)
		x.comm, err = New(Config{
			Group: 5, Rank: r, Slots: all, Arena: a, Words: words[x.host], Shape: shape, Retain: 64 << 10,
		}, 1, 0, w.members(r, all))
		require.NoError(t, err)
	}
}

// members is how rank r reaches the others.
func (w *sim) members(r int, who []int) (ms []Member) {
	for _, q := range who {
		m := Member{Rank: q, Slot: q, Inc: 1}
		if x := w.ranks[q]; q == r || x.host == w.ranks[r].host {
			m.Arena = x.mem
		}
		if q != r {
			m.Send = func(f *device.Frame) error { return w.send(r, q, f) }
		}
		ms = append(ms, m)
	}
	return ms
}

func (w *sim) send(from, to int, f *device.Frame) error {
	q := &w.wire[from*len(w.ranks)+to]
	if w.rnd != nil && len(*q) > 2 && w.rnd.IntN(4) == 0 {
		return device.ErrFull
	}
	g := *f
	g.Inc = 1
	g.Payload = slices.Clone(f.Payload)
	*q = append(*q, g)
	return nil
}

// deliver gives the next frame of one link to its receiver.
func (w *sim) deliver(from, to int) bool {
	q := &w.wire[from*len(w.ranks)+to]
	if len(*q) == 0 || w.ranks[to].dead {
		return false
	}
	f := (*q)[0]
	*q = (*q)[1:]
	if !w.ranks[to].knows(from) {
		return true // the mesh has closed that link
	}
	w.ranks[to].comm.Frame(from, &f)
	return true
}

func (x *simRank) knows(r int) bool {
	return x.comm.Current().Ranks.Has(r)
}

// start issues an operation.
func (x *simRank) start(c *Call, keep bool) *Op {
	o := &Op{Call: *c, Keep: keep}
	x.seq++
	require.NoError(x.w.t, x.comm.Start(o, x.seq, x.comm.Current()))
	x.queue = append(x.queue, o)
	return o
}

// step takes the queue on once. Operations that are done leave it.
func (x *simRank) step() (done *Op, moved bool) {
	for i := 0; i < min(len(x.queue), x.w.shape.Depth); i++ {
		o := x.queue[i]
		switch st := x.comm.Step(o, i == 0); st {
		case Done, Failed:
			x.queue = x.queue[1:]
			return o, true
		case Moved:
			x.comm.Restart(o)
			return nil, true
		case Mismatch:
			x.w.t.Fatalf("rank %d: %v", x.rank, o.Err)
		case Progress:
			moved = true
		}
	}
	return nil, moved
}

// run steps all until every queue is empty.
func (w *sim) run(done func(x *simRank, o *Op)) {
	n := len(w.ranks)
	for idle := 0; idle < 100*n; {
		if idle++; idle > 10*n {
			time.Sleep(50 * time.Microsecond) // what is asked for is asked again by the clock
		}
		busy := false
		for i := range n {
			x := w.ranks[i]
			if w.rnd != nil {
				x = w.ranks[w.rnd.IntN(n)]
			}
			if x.dead {
				continue
			}
			o, moved := x.step()
			if o != nil {
				done(x, o)
			}
			if moved {
				idle = 0
			} else if w.rnd == nil || w.rnd.IntN(8) == 0 {
				x.comm.Tell()
			}
			for from := range n {
				if w.deliver(from, x.rank) {
					idle = 0
				}
			}
		}
		for _, x := range w.ranks {
			busy = busy || !x.dead && len(x.queue) > 0
		}
		if !busy {
			return
		}
		w.install(nil)
	}
	w.t.Fatalf("stuck: %s", w.state())
}

func (w *sim) state() (s string) {
	for _, x := range w.ranks {
		if !x.dead && len(x.queue) > 0 {
			o := x.queue[0]
			s += fmt.Sprintf("rank %d: op %d %v in version %d: published %d/%d sent %d arrived %d rounds %d/%d held %d decided %v, word %x, missing %v; ",
				x.rank, o.Seq, o.Kind, o.Ver.Epoch, o.published, o.chunks, o.sentTo, o.arrived, o.consumed, o.rounds, o.held, o.decided,
				x.comm.dec.Load(), x.comm.Missing(o.Ver.Epoch, o.Seq, 0).Slots())
		}
	}
	return s
}

// kill ends a rank. What it has sent arrives up to a point.
func (w *sim) kill(r int) {
	w.ranks[r].dead = true
	w.lost[r] = true
	for to := range w.ranks {
		q := &w.wire[r*len(w.ranks)+to]
		if w.rnd != nil && len(*q) > 0 {
			*q = (*q)[:w.rnd.IntN(len(*q)+1)]
		}
	}
	w.change()
}

// change decides the next view. Those who lived through the last one close before they say how far they are.
func (w *sim) change() {
	w.install(func() bool { return true }) // all of the views before
	in := &simInstall{epoch: w.epoch + 1, left: map[int]bool{}}
	for r, x := range w.ranks {
		if x.dead {
			continue
		}
		in.members = append(in.members, r)
		in.left[r] = true
	}
	// One of each host may speak for all of it, as if the others were stopped.
	for _, x := range w.ranks {
		if x.dead || w.rnd != nil && w.rnd.IntN(2) == 0 && w.mate(x) {
			continue
		}
		done := x.comm.CloseWord(in.epoch, func(r int) bool { return !w.ranks[r].dead })
		for r, seq := range done {
			if !w.ranks[r].dead {
				in.cut = max(in.cut, seq)
			}
		}
	}
	w.epoch = in.epoch
	w.todo = append(w.todo, in)
}

// mate says that somebody of x's host with a higher rank lives, who will speak for it.
func (w *sim) mate(x *simRank) bool {
	return slices.ContainsFunc(w.ranks, func(y *simRank) bool { return y.host == x.host && y.rank > x.rank && !y.dead && w.last(y) })
}

// last says that nobody of y's host has a higher rank and lives: it speaks for all.
func (w *sim) last(y *simRank) bool {
	return !slices.ContainsFunc(w.ranks, func(z *simRank) bool { return z.host == y.host && z.rank > y.rank && !z.dead })
}

// install gives views to ranks that lack them, some of them, or all of them.
func (w *sim) install(all func() bool) {
	for _, in := range w.todo {
		for r := range w.ranks {
			if !in.left[r] {
				continue
			}
			if w.ranks[r].dead {
				delete(in.left, r)
			} else if all != nil || w.rnd == nil || w.rnd.IntN(3) == 0 {
				delete(in.left, r)
				w.ranks[r].comm.Install(in.epoch, in.cut, w.members(r, in.members), "")
				w.ranks[r].comm.Reopen(in.epoch)
			}
		}
	}
	w.todo = slices.DeleteFunc(w.todo, func(in *simInstall) bool { return len(in.left) == 0 })
}

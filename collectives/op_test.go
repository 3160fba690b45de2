package collectives

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/dtype"

	"github.com/stretchr/testify/require"
)

const testSlot = 8192

func (k *task) String() string {
	return fmt.Sprintf("%v of %v %v, %d bytes, root %d, in place %v, uneven %v", k.kind, k.dt, k.op, k.n, k.root, k.inPlace, k.uneven)
}

// drawTask draws an operation of a group of size ranks.
func drawTask(r *rand.Rand, size int) *task {
	k := &task{
		kind: []Kind{Barrier, AllReduce, AllReduce, AllGather, AllToAll, Broadcast}[r.IntN(6)], dt: dtype.All()[r.IntN(5)],
		op: dtype.Ops()[r.IntN(3)], root: r.IntN(size), size: size, inPlace: r.IntN(2) == 0, uneven: r.IntN(2) == 0, seed: r.Uint64(),
	}
	es := k.dt.Size()
	switch r.IntN(4) {
	case 0:
		k.n = []int{testSlot - es, testSlot, testSlot + es, 3*testSlot + 5*es, testSlot / 2, testSlot/2 + es, testSlot + testSlot/2}[r.IntN(7)]
	case 1:
		k.n = r.IntN(4*testSlot) / es * es
	default:
		k.n = r.IntN(300) * es
	}
	if k.kind == AllToAll && r.IntN(2) == 0 {
		k.n = k.n / size / es * es
	}
	return k
}

// verify compares a result with the oracle's.
func (k *task) verify(x *simRank, o *Op) error {
	want, ok := k.want(x.rank, o.Ver.Active.Slots())
	switch {
	case !ok && o.Err == nil:
		return fmt.Errorf("rank %d: %v: succeeded without its root (set %v)", x.rank, k, o.Ver.Active.Slots())
	case !ok:
		return nil
	case o.Err != nil:
		return fmt.Errorf("rank %d: %v: %w", x.rank, k, o.Err)
	case k.kind != Barrier && !bytes.Equal(want, o.Out):
		i := 0
		for i < len(want) && i < len(o.Out) && want[i] == o.Out[i] {
			i++
		}
		return fmt.Errorf("rank %d: op %d in version %d (set %v): %v: %d bytes, want %d, differ from byte %d on",
			x.rank, o.Seq, o.Ver.Epoch, o.Ver.Active.Slots(), k, len(o.Out), len(want), i)
	}
	return nil
}

// TestSizes runs each operation at the boundaries of slots and chunks, on 1 to 6 ranks, on 1 to 3 hosts.
func TestSizes(t *testing.T) {
	for size := 1; size <= 6; size++ {
		for hosts := 1; hosts <= min(size, 3); hosts++ {
			t.Run(fmt.Sprintf("%d ranks on %d hosts", size, hosts), func(t *testing.T) {
				w := newSim(t, hosts, size, Shape{SlotBytes: testSlot, Depth: 3, Lanes: 1})
				r := rand.New(rand.NewPCG(uint64(size), uint64(hosts)))
				for _, kind := range []Kind{Barrier, AllReduce, AllGather, AllToAll, Broadcast} {
					for _, n := range []int{0, 8, testSlot/2 - 8, testSlot / 2, testSlot/2 + 8, testSlot - 8, testSlot, testSlot + 8, 3*testSlot + 40} {
						for v := range 4 {
							k := &task{kind: kind, dt: dtype.All()[r.IntN(5)], op: dtype.Ops()[r.IntN(3)], n: n, size: size,
								root: r.IntN(size), inPlace: v&1 == 0, uneven: v&2 == 0, seed: r.Uint64()}
							for _, x := range w.ranks {
								x.start(k.call(x.rank), v&1 == 0)
							}
							w.run(func(x *simRank, o *Op) { require.NoError(t, k.verify(x, o)) })
						}
					}
				}
			})
		}
	}
}

// TestSchedules runs random operations, several outstanding, in random schedules with deaths at random moments, and
// checks every result, and that the survivors agree.
func TestSchedules(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	count := 600
	if testing.Short() {
		count = 100
	}
	for i := range uint64(count) {
		if !t.Run(fmt.Sprint(seed+i), func(t *testing.T) { schedule(t, seed+i) }) {
			break
		}
	}
}

func schedule(t testing.TB, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 77))
	size := 1 + r.IntN(6)
	w := newSim(t, 1+r.IntN(min(size, 3)), size, Shape{SlotBytes: testSlot, Depth: 1 + r.IntN(4), Lanes: 1})
	w.rnd = r
	n := 3 + r.IntN(8)
	tasks := make([]*task, n)
	for i := range tasks {
		tasks[i] = drawTask(r, size)
	}
	deaths := map[int]bool{} // before how many completions somebody dies
	for range r.IntN(min(size, 4)) {
		deaths[r.IntN(n*size)] = true
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
	}
	completed := 0
	for deaths[0] {
		delete(deaths, 0)
		w.kill(r.IntN(size))
	}
	w.run(func(x *simRank, o *Op) {
		require.NoError(t, tasks[o.Seq-1].verify(x, o))
		got[x.rank][o.Seq] = outcome{o.Ver.Epoch, o.Err == nil}
		completed++
		if deaths[completed] {
			alive := []int{}
			for _, y := range w.ranks {
				if !y.dead {
					alive = append(alive, y.rank)
				}
			}
			if len(alive) > 1 {
				w.kill(alive[r.IntN(len(alive))])
			}
		}
	})
	var first map[uint64]outcome
	for _, x := range w.ranks {
		if x.dead {
			continue
		}
		require.Len(t, got[x.rank], n)
		if first == nil {
			first = got[x.rank]
		}
		require.Equal(t, first, got[x.rank], "rank %d", x.rank)
	}
}

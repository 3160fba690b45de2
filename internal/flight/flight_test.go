package flight

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
	"github.com/serry-project/serry/internal/slots"
)

var origin = time.Unix(1_700_000_000, 0)

func recorder(rank, entries int) *Recorder {
	return New(Config{Rank: rank, Incarnation: 1, World: 0xabc, Entries: entries, Origin: origin})
}

func world(r *Recorder, n int) *Group {
	var s slots.Set
	for i := range n {
		s.Add(i)
	}
	return r.Group(0xabc, "world", 30*time.Second, 1, n, s)
}

func reduce(seq uint64) *Call {
	return &Call{Seq: seq, Op: ops.AllReduce, DType: dtype.F32, In: 32, Out: 32}
}

func TestEntry(t *testing.T) {
	r := recorder(2, 8)
	g := world(r, 4)
	i := g.Begin(&Call{Seq: 7, Op: ops.Broadcast, DType: dtype.BF16, Peer: 3, In: 10, Out: 12}, 1, 100)
	want := Entry{Rank: 2, Incarnation: 1, Group: "abc", Name: "world", Seq: 7, Op: "broadcast", DType: "bf16", Peer: 3, Epoch: 1, Set: []int{0, 1, 2, 3},
		BytesIn: 10, BytesOut: 12, State: Scheduled, Created: origin.UnixNano() + 100}
	is := func() {
		t.Helper()
		var b bytes.Buffer
		require.NoError(t, r.WriteJSON(&b))
		got, err := ReadJSON(&b)
		require.NoError(t, err)
		require.Equal(t, []Entry{want}, got)
	}
	is()
	g.Started(i, 1, 200)
	want.State, want.Started = Started, origin.UnixNano()+200
	is()
	g.Waited(i, slots.Of(1))
	g.Waited(i, slots.Of(1, 3))
	want.WaitedFor = []int{1, 3}
	is()
	g.Version(5, 4, slots.Of(0, 2, 3))
	g.Started(i, 5, 300) // moved on; the time of the first stays
	want.Epoch, want.Set = 5, []int{0, 2, 3}
	is()
	g.End(i, ops.RankLost, 5, 400)
	want.State, want.Outcome, want.Ended = Ended, "rank_lost", origin.UnixNano()+400
	is()
}

func TestLarge(t *testing.T) {
	r := recorder(0, 8)
	g := world(r, 2)
	const big = 5 << 32
	for _, c := range []Call{{In: big, Out: 3}, {In: 1<<32 - 1, Out: 1<<32 - 1}, {In: 4, Out: big}, {Seq: 1<<48 - 1, Peer: 1023, Uneven: true}} {
		c.Op = ops.AllToAll
		g.Begin(&c, 1, 0)
		es := r.Entries()
		e := es[len(es)-1]
		require.Equal(t, c, Call{Seq: e.Seq, Op: e.op, DType: e.dt, Peer: e.Peer, In: e.BytesIn, Out: e.BytesOut, Uneven: e.uneven})
	}
}

func TestOnlyTheLast(t *testing.T) {
	r := recorder(0, 5) // becomes 8
	g := world(r, 2)
	var is []Index
	for seq := range uint64(1000) {
		is = append(is, g.Begin(reduce(seq), 1, time.Duration(seq)))
		if seq >= 2 {
			g.End(is[seq-2], ops.OK, 1, time.Duration(seq))
		}
	}
	g.End(is[999-8], ops.Failed, 9, 5) // its place is another's
	g.Started(is[0], 9, 5)
	es := r.Entries()
	require.Len(t, es, 8)
	for k, e := range es {
		require.EqualValues(t, 992+k, e.Seq)
		require.EqualValues(t, 1, e.Epoch)
		require.Equal(t, k < 6, e.Outcome == "ok", "%+v", e)
	}
}

// Sends and receives have a place of their own: any number of them pushes no operation out.
func TestLocal(t *testing.T) {
	r := recorder(0, 8)
	g := world(r, 2)
	g.End(g.Begin(reduce(1), 1, 0), ops.OK, 1, 1)
	for k := range 100 {
		i := g.Begin(&Call{Seq: uint64(k), Op: ops.Recv, Peer: 1, Out: k}, 1, time.Duration(2+k))
		g.Started(i, 1, time.Duration(3+k))
		g.End(i, ops.Late, 1, time.Duration(4+k))
	}
	es := r.Entries()
	require.Len(t, es, 9)
	require.Equal(t, "all_reduce", es[0].Op)
	require.Equal(t, "ok", es[0].Outcome)
	for k, e := range es[1:] {
		require.Equal(t, []any{"recv", 92 + k, "late", 1}, []any{e.Op, e.BytesOut, e.Outcome, e.Peer})
	}
}

// A dump while operations are recorded has each entry from one operation, or not at all.
func TestDumpWhileRecording(t *testing.T) {
	r := recorder(0, 8)
	g := world(r, 2)
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	write := func(op ops.Op, also func(i Index, n uint64)) {
		for n := uint64(1); n < 64 || !stop.Load(); n++ {
			i := g.Begin(&Call{Seq: n, Op: op, In: int(n), Out: int(2 * n), Peer: int(n % 1000)}, n%100, time.Duration(3*n))
			g.Started(i, n%100, time.Duration(4*n))
			g.End(i, ops.OK, n%100, time.Duration(5*n))
			also(i, n)
		}
	}
	writers.Go(func() { write(ops.AllReduce, func(Index, uint64) {}) }) // the driver
	for w := range 2 {
		writers.Go(func() {
			write(ops.Send, func(i Index, n uint64) {
				if n%1000 == 0 {
					g.Waited(i, slots.Of(w))
					g.Version(1000+n%1000*1000, 2, slots.Of(0, 1))
				}
			})
		})
	}
	for range 2 {
		readers.Go(func() {
			for range 1000 {
				for _, e := range r.Entries() {
					n, o := int64(e.Seq), origin.UnixNano()
					bad := int64(e.BytesIn) != n || int64(e.BytesOut) != 2*n || int64(e.Peer) != n%1000 || e.Created != o+3*n ||
						e.Started != 0 && e.Started != o+4*n || e.Ended != 0 && e.Ended != o+5*n || e.Epoch%1000 != uint64(n)%100 ||
						(e.Started != 0) != (e.State != Scheduled) || (e.Outcome == "ok") != (e.State == Ended)
					if bad {
						t.Errorf("torn: %+v", e)
						return
					}
				}
			}
		})
	}
	readers.Wait()
	stop.Store(true)
	writers.Wait()
	if n := len(r.ordered()); n != 8 {
		t.Errorf("%d operations are remembered at the end", n)
	}
}

// Whoever stands still between two stores has his place to himself: who comes round to it leaves it as it is.
func TestStandstill(t *testing.T) {
	g := world(recorder(0, 2), 2)
	send := func(n int) *Call { return &Call{Seq: uint64(n), Op: ops.Send, In: n, Out: n} }
	i := g.Begin(send(1), 1, 1)
	r := g.locals()
	e, was, ok := r.claimed(uint64(i &^ local)) // in End
	require.True(t, ok)
	g.Begin(send(2), 1, 2)
	late := g.Begin(send(3), 1, 3) // comes round
	g.Started(late, 1, 4)
	g.End(late, ops.OK, 1, 4)
	require.EqualValues(t, 1, e[wCall].Load()&seqMask)
	require.EqualValues(t, busy, e[wState].Load())
	e[wState].Store(was)
	es := g.r.Entries()
	require.Len(t, es, 1)
	require.EqualValues(t, 2, es[0].Seq)
	g.Begin(send(4), 1, 5)
	g.Begin(send(5), 1, 6)
	es = g.r.Entries()
	require.Len(t, es, 2)
	require.EqualValues(t, 5, es[1].Seq)
}

// ordered are the operations that are no sends and receives.
func (r *Recorder) ordered() []Entry {
	return slices.DeleteFunc(r.Entries(), func(e Entry) bool { return e.op.Local() })
}

func TestVersionsAreForgotten(t *testing.T) {
	r := recorder(0, 8)
	g := world(r, 4)
	first := g.Begin(reduce(1), 1, 0)
	for e := uint64(2); e < 1000; e++ {
		g.Version(e, 4, slots.Of(0, int(e%3)+1))
		require.LessOrEqual(t, len(g.versions), maxVersions)
	}
	g.Version(5, 4, slots.Of()) // old news
	g.End(first, ops.OK, 999, 1)
	last := g.Begin(reduce(2), 999, 2)
	for range 1000 {
		g.Waited(last, slots.Of(1))
		last++
	}
	require.LessOrEqual(t, len(g.waits), maxWaits)
	es := r.Entries()
	require.Equal(t, []int{0, 999%3 + 1}, es[0].Set)
	require.Equal(t, es[0].Set, es[1].Set)
}

// Groups that come and go cost the memory of about one ring.
func TestManyGroups(t *testing.T) {
	r := recorder(0, 256)
	w := world(r, 2)
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	now := time.Duration(0)
	cycle := func(n int) {
		for k := range n {
			g := r.Group(uint64(k), fmt.Sprint("g", k), 0, 1, 2, slots.Of(0, 1))
			for s := range uint64(k % 400) {
				g.End(g.Begin(reduce(s), 1, now), ops.OK, 1, now+1)
				now += 2
			}
			w.End(w.Begin(reduce(uint64(k)), 1, now), ops.OK, 1, now+1)
			now += 2
			g.Close()
			g.Close() // again: nothing
		}
	}
	cycle(500)
	before := heap()
	cycle(2000)
	require.Less(t, heap(), before+1<<20)
	require.Empty(t, r.open[1:])
	n := 0
	for i := range r.retired {
		n += r.retired[i].len()
	}
	require.LessOrEqual(t, n, 256)
	require.NotZero(t, n)

	// What torch gets is a part without gaps, placed by the world's sequence.
	d := r.torch()
	require.NotEmpty(t, d.Entries)
	require.EqualValues(t, 1999, d.Entries[len(d.Entries)-1].Record)
	subs := uint64(0)
	for i, e := range d.Entries {
		if e.Process[1] == "world" {
			require.Equal(t, e.Seq, e.Record)
			if i > 0 && subs > 0 { // its predecessors are those of the group with that number
				require.EqualValues(t, e.Seq%400, subs)
			}
			subs = 0
		} else {
			subs++
		}
	}
}

func TestOff(t *testing.T) {
	var r *Recorder
	g := r.Group(1, "", 0, 1, 1, slots.Of(0))
	require.Nil(t, g)
	i := g.Begin(reduce(1), 1, 0)
	g.Started(i, 1, 1)
	g.Waited(i, slots.Of(1))
	g.Version(2, 1, slots.Of(0))
	g.End(i, ops.OK, 1, 2)
	g.Close()
	require.Empty(t, r.Entries())
	paths, err := r.Dump(t.TempDir(), "")
	require.NoError(t, err)
	require.Empty(t, paths)
}

func TestRecordingAllocatesNothing(t *testing.T) {
	g := world(recorder(0, 64), 4)
	c := reduce(1)
	p := &Call{Op: ops.Send}
	g.Begin(p, 1, 0)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		i := g.Begin(c, 1, 1)
		g.Started(i, 1, 2)
		g.End(i, ops.OK, 1, 3)
		g.End(g.Begin(p, 1, 1), ops.OK, 1, 3)
	}))
}

// The hot path of an operation that ends at its first step.
func BenchmarkOperation(b *testing.B) {
	g := world(recorder(0, 0), 4)
	c := *reduce(1)
	b.ReportAllocs()
	for i := range b.N {
		c.Seq = uint64(i)
		g.End(g.Begin(&c, 1, time.Duration(i)), ops.OK, 1, time.Duration(i))
	}
}

func BenchmarkOff(b *testing.B) {
	var g *Group
	c := *reduce(1)
	b.ReportAllocs()
	for i := range b.N {
		c.Seq = uint64(i)
		g.End(g.Begin(&c, 1, time.Duration(i)), ops.OK, 1, time.Duration(i))
	}
}

func BenchmarkStarted(b *testing.B) {
	g := world(recorder(0, 0), 4)
	i := g.Begin(reduce(1), 1, 0)
	b.ReportAllocs()
	for n := range b.N {
		g.Started(i, 1, time.Duration(n))
	}
}

func BenchmarkDump(b *testing.B) {
	r := recorder(0, 0)
	g := world(r, 4)
	for i := range 2 * DefaultEntries {
		g.End(g.Begin(reduce(uint64(i)), 1, time.Duration(i)), ops.OK, 1, time.Duration(i))
	}
	dir := b.TempDir()
	for b.Loop() {
		if _, err := r.Dump(dir, ""); err != nil {
			b.Fatal(err)
		}
	}
}

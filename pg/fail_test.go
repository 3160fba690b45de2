package pg

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

// onAll runs f on every rank at once and returns the errors by rank.
func onAll(ws []*World, f func(w *World) error) []error {
	errs := make([]error, len(ws))
	var wg sync.WaitGroup
	for i, w := range ws {
		if w != nil {
			wg.Go(func() { errs[i] = f(w) })
		}
	}
	wg.Wait()
	return errs
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestMismatch(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		const n = 3
		ws := worlds(t, n, cfg)
		ctx := within(t, 30*time.Second)
		b := func(n int) []byte { return make([]byte, n) }
		reduce := func() *collectives.Call {
			return &collectives.Call{Kind: collectives.AllReduce, DType: dtype.F32, Reduce: dtype.Sum, In: b(64), Out: b(64)}
		}
		gather := func(parts ...int) *collectives.Call {
			return &collectives.Call{Kind: collectives.AllGather, DType: dtype.U8, In: b(parts[1]), Out: b(parts[0] + parts[1] + parts[2]), OutParts: parts}
		}
		root := func(r int) *collectives.Call {
			x := b(64)
			return &collectives.Call{Kind: collectives.Broadcast, DType: dtype.F32, Root: r, In: x, Out: x}
		}
		late := reduce()
		late.Deadline = 7 * time.Second
		all2all := func(in, out int) *collectives.Call {
			return &collectives.Call{Kind: collectives.AllToAll, DType: dtype.U8, In: b(3 * in), Out: b(3 * out), InParts: []int{in, in, in}, OutParts: []int{out, out, out}}
		}
		// Of one that gives too much to rank 2 alone, rank 0 sees nothing itself.
		pairOnly := &collectives.Call{Kind: collectives.AllToAll, DType: dtype.U8, In: b(49), Out: b(48), InParts: []int{16, 16, 17}, OutParts: []int{16, 16, 16}}
		for _, c := range []struct {
			field        string
			other, wrong *collectives.Call
		}{
			{"operation", reduce(), &collectives.Call{Kind: collectives.Barrier}},
			{"dtype", reduce(), &collectives.Call{Kind: collectives.AllReduce, DType: dtype.I32, Reduce: dtype.Sum, In: b(64), Out: b(64)}},
			{"reduce op", reduce(), &collectives.Call{Kind: collectives.AllReduce, DType: dtype.F32, Reduce: dtype.Max, In: b(64), Out: b(64)}},
			{"length", reduce(), &collectives.Call{Kind: collectives.AllReduce, DType: dtype.F32, Reduce: dtype.Sum, In: b(68), Out: b(68)}},
			{"length", reduce(), &collectives.Call{Kind: collectives.AllReduce, DType: dtype.F32, Reduce: dtype.Sum, In: b(300 << 10), Out: b(300 << 10)}},
			{"root", root(0), root(2)},
			{"deadline", reduce(), late},
			{"part sizes", gather(8, 8, 8), gather(9, 8, 7)},
			{"length", all2all(16, 16), all2all(17, 16)},
			{"length", all2all(16, 16), pairOnly},
			{"length", all2all(60<<10, 60<<10), all2all(60<<10, 61<<10)},
		} {
			t.Run(c.field, func(t *testing.T) {
				var gs [n]*Group
				for _, err := range onAll(ws, func(w *World) (err error) {
					gs[w.Rank()], err = w.Sub(ctx, nil, Options{SlotBytes: 64 << 10})
					return err
				}) {
					require.NoError(t, err)
				}
				for range 2 { // before, all is well
					for _, err := range onAll(ws, func(w *World) error { _, err := gs[w.Rank()].Do(ctx, reduce()); return err }) {
						require.NoError(t, err)
					}
				}
				call := func(w *World) *collectives.Call {
					x := *c.other
					if w.Rank() == 1 {
						x = *c.wrong
					}
					x.In = b(len(x.In))
					if x.Kind == collectives.AllGather {
						x.In = b(x.OutParts[w.Rank()])
					}
					if x.Out = b(len(x.Out)); x.Kind == collectives.Broadcast {
						x.In = x.Out
					}
					return &x
				}
				errs := onAll(ws, func(w *World) error { _, err := gs[w.Rank()].Do(ctx, call(w)); return err })
				var first *GroupFailed
				for r, err := range errs {
					require.ErrorIs(t, err, ErrMismatch, "rank %d", r)
					require.ErrorIs(t, err, ErrFailed)
					require.ErrorContains(t, err, "rank 1")
					require.ErrorContains(t, err, c.field)
					var f *GroupFailed
					require.ErrorAs(t, err, &f)
					if first == nil {
						first = f
					}
					require.Equal(t, first, f)
				}
				for r, err := range onAll(ws, func(w *World) error { _, err := gs[w.Rank()].Barrier(ctx); return err }) {
					require.ErrorIs(t, err, ErrMismatch, "rank %d: for good", r)
				}
				for r, err := range onAll(ws, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
					require.NoError(t, err, "rank %d: the world goes on", r)
				}
				for _, err := range onAll(ws, func(w *World) error { return gs[w.Rank()].Close(ctx) }) {
					require.ErrorIs(t, err, ErrMismatch)
				}
			})
		}
	})
}

func TestDeadlock(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for n := 2; n <= 3; n++ {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				ws := worlds(t, n, cfg)
				ctx := within(t, 30*time.Second)
				gs := make([][]*Group, n)
				for _, err := range onAll(ws, func(w *World) error {
					for i := range n { // group i is of ranks i and i+1
						g, err := w.Sub(ctx, []int{i, (i + 1) % n}, Options{Timeout: 700 * time.Millisecond})
						if err != nil {
							return err
						}
						gs[w.Rank()] = append(gs[w.Rank()], g)
					}
					return nil
				}) {
					require.NoError(t, err)
				}
				// Each rank begins with a group of its own.
				errs := onAll(ws, func(w *World) error { _, err := gs[w.Rank()][w.Rank()].Barrier(ctx); return err })
				for r, err := range errs {
					require.ErrorIs(t, err, ErrDeadlock, "rank %d", r)
					for other := range n {
						require.ErrorContains(t, err, fmt.Sprintf("rank %d waits", other), "the cycle is named")
					}
				}
				for _, err := range onAll(ws, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
					require.NoError(t, err)
				}
			})
		}
	})
}

func TestCancelIsAbort(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 3, cfg)
		ctx := within(t, 20*time.Second)
		gs := make([]*Group, 3)
		for _, err := range onAll(ws, func(w *World) (err error) { gs[w.Rank()], err = w.Sub(ctx, nil, Options{}); return err }) {
			require.NoError(t, err)
		}
		// The others come when rank 1 has given up. It has arrived, so this operation may still complete; the next do not.
		gaveUp := make(chan struct{})
		errs := onAll(ws, func(w *World) error {
			if w.Rank() == 1 {
				defer close(gaveUp)
				short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				_, err := gs[1].Barrier(short)
				return err
			}
			<-gaveUp
			for {
				if _, err := gs[w.Rank()].Barrier(ctx); err != nil {
					return err
				}
			}
		})
		require.ErrorIs(t, errs[1], context.DeadlineExceeded)
		require.ErrorIs(t, errs[1], ErrClosed)
		for _, r := range []int{0, 2} {
			require.ErrorIs(t, errs[r], ErrFailed)
			require.ErrorContains(t, errs[r], "aborted by rank 1")
		}
		for _, err := range onAll(ws, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
			require.NoError(t, err, "the world goes on")
		}

		// In the world it is the loss of that rank.
		gaveUp = make(chan struct{})
		errs = onAll(ws, func(w *World) error {
			if w.Rank() == 1 {
				defer close(gaveUp)
				short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				_, err := w.Barrier(short)
				return err
			}
			<-gaveUp
			for {
				if res, err := w.Barrier(ctx); err != nil || !res.Active.Has(1) {
					return err
				}
			}
		})
		require.ErrorIs(t, errs[1], context.DeadlineExceeded)
		require.NoError(t, errs[0])
		require.NoError(t, errs[2])
		_, err := ws[1].Barrier(ctx)
		require.Error(t, err, "rank 1 is out")
	})
}

func TestAbortFromOutside(t *testing.T) {
	ws := worlds(t, 3, Config{})
	ctx := within(t, 20*time.Second)
	gs := make([]*Group, 3)
	for _, err := range onAll(ws, func(w *World) (err error) { gs[w.Rank()], err = w.Sub(ctx, nil, Options{}); return err }) {
		require.NoError(t, err)
	}
	errs := onAll(ws, func(w *World) error {
		if w.Rank() == 2 {
			time.Sleep(50 * time.Millisecond)
			gs[2].Abort("the data ran out")
			return nil
		}
		_, err := gs[w.Rank()].Barrier(ctx)
		return err
	})
	for r, err := range errs[:2] {
		require.ErrorIs(t, err, ErrFailed, "rank %d", r)
		require.ErrorContains(t, err, "aborted by rank 2: the data ran out")
	}
	ws[0].Abort("enough")
	for r, err := range onAll(ws[1:], func(w *World) error { _, err := w.Barrier(ctx); return err }) {
		require.NoError(t, err, "rank %d", r+1)
	}
	_, err := ws[0].Barrier(ctx)
	require.ErrorIs(t, err, ErrClosed)
}

// TestWaitEnds: a Wait whose context ends gives up the waiting and nothing else.
func TestWaitEnds(t *testing.T) {
	ws := worlds(t, 2, Config{})
	ctx := within(t, 20*time.Second)
	x, y := []int64{1}, []int64{2}
	w, err := ws[0].Start(&collectives.Call{Kind: collectives.AllReduce, DType: dtype.I64, Reduce: dtype.Sum, In: I64(x).Data, Out: I64(x).Data})
	require.NoError(t, err)
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err = w.Wait(short)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.False(t, w.Done())
	_, err = ws[1].AllReduce(ctx, I64(y), I64(y), dtype.Sum)
	require.NoError(t, err)
	require.EqualValues(t, 3, y[0])
	res, err := w.Wait(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 3, x[0])
	require.EqualValues(t, 1, res.Seq)
}

func TestBadCalls(t *testing.T) {
	ws := worlds(t, 1, Config{})
	ctx := within(t, 10*time.Second)
	w := ws[0]
	var bad *collectives.ErrBadCall
	_, err := w.AllReduce(ctx, F32(make([]float32, 2)), F32(make([]float32, 3)), dtype.Sum)
	require.ErrorAs(t, err, &bad)
	_, err = w.AllReduce(ctx, F32(make([]float32, 2)), I32(make([]int32, 2)), dtype.Sum)
	require.ErrorAs(t, err, &bad)
	_, err = w.AllReduce(ctx, F32(make([]float32, 2)), F32(make([]float32, 2)), 77)
	require.ErrorAs(t, err, &bad)
	_, err = w.AllGather(ctx, F32(make([]float32, 2)), F32(make([]float32, 1)), []int{1, 1})
	require.ErrorAs(t, err, &bad)
	_, err = w.Broadcast(ctx, F32(nil), 5)
	require.ErrorAs(t, err, &bad)
	_, err = w.Sub(ctx, []int{0, 0}, Options{})
	require.ErrorAs(t, err, &bad)
	_, err = w.Sub(ctx, []int{3}, Options{})
	require.ErrorAs(t, err, &bad)
	require.Error(t, w.Send(ctx, U8(nil), 0, 1))
	require.Error(t, w.Recv(ctx, U8(nil), 1, 1))
	res, err := w.Barrier(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 1, res.Seq, "a bad call takes no place in the order")
}

func TestFoundingRefuses(t *testing.T) {
	st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	ctx := within(t, 30*time.Second)
	var wg sync.WaitGroup
	var got [3]error
	var founders [2]*World
	for r := range 2 {
		wg.Go(func() {
			founders[r], got[r] = Join(ctx, Config{Rank: r, Size: 2, Store: st})
		})
	}
	wg.Wait()
	require.NoError(t, got[0])
	require.NoError(t, got[1])
	defer founders[0].Close()
	defer founders[1].Close()
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Rank: 1, Size: 2}, "rank 1 is taken by another process"},
		{Config{Rank: 1, Size: 3}, "for a world of 3 (capacity 3), the others for 2 (capacity 2)"},
		{Config{Rank: 1, Size: 2, Capacity: 4}, "for a world of 2 (capacity 4), the others for 2 (capacity 2)"},
		{Config{Rank: 2, Size: 2}, "ranks of a world of 2 are 0 to 1"},
		{Config{Rank: -1, Size: 2}, "ranks of a world of 2 are 0 to 1"},
		{Config{Rank: 0, Size: 0}, "the world's size is 0"},
		{Config{Rank: 0, Size: 4, Capacity: 2}, "capacity 2 is less than size 4"},
		{Config{Rank: 0, Size: 2, Options: Options{SlotBytes: 1 << 30}}, "raise SERRY_SHM_BYTES or use smaller slots"},
	} {
		c.cfg.Store = st
		_, err := Join(ctx, c.cfg)
		var je *JoinError
		require.ErrorAs(t, err, &je)
		require.Equal(t, c.cfg.Rank, je.Rank)
		require.ErrorContains(t, err, c.want)
	}

	// One of three does not come: who it is is named.
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = Join(short, Config{Rank: 0, Size: 2, Store: st, Name: "other"})
	require.ErrorContains(t, err, "rank 1 of 2 did not come")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.False(t, strings.Contains(err.Error(), "  "))
}

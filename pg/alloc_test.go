package pg

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/serry-project/serry/internal/dtype"

	"github.com/stretchr/testify/require"
)

// TestSmallOperationsDoNotAllocate: in the steady state, for all ranks together.
func TestSmallOperationsDoNotAllocate(t *testing.T) {
	for _, mode := range []Mode{Continue, Raise} {
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprint(mode, n), func(t *testing.T) {
				ws := worlds(t, n, Config{Options: Options{Mode: mode}})
				ctx, cancel := context.WithCancel(context.Background()) // one that can end, as a caller's has
				defer cancel()
				loop := func(rounds int) {
					all(t, ws, func(w *World) error {
						x := []float32{1, 2, 3, 4}
						in, out := F32(x), F32(make([]float32, 4))
						for range rounds {
							if _, err := w.AllReduce(ctx, out, in, dtype.Sum); err != nil {
								return err
							}
							if _, err := w.AllReduce(ctx, in, in, dtype.Max); err != nil { // in place
								return err
							}
							if _, err := w.Barrier(ctx); err != nil {
								return err
							}
							if _, err := w.Broadcast(ctx, in, 0); err != nil {
								return err
							}
						}
						return nil
					})
				}
				loop(200)
				const rounds = 500
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				loop(rounds)
				runtime.ReadMemStats(&after)
				perOp := float64(after.Mallocs-before.Mallocs) / float64(4*rounds*n)
				t.Logf("%.4f allocations an operation", perOp)
				require.Less(t, perOp, 0.05) // starting the goroutines, and what sleeps
				if n == 1 {
					w, x := ws[0], F32(make([]float32, 4))
					require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = w.AllReduce(ctx, x, x, dtype.Sum) }))
					require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = w.Barrier(ctx) }))
				}
			})
		}
	}
}

// TestNoOperationAllocates: each of the blocking ones, in the steady state; the world can grow, so the sizes that the
// caller gives are not those that the operation needs.
func TestNoOperationAllocates(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ws := worlds(t, n, Config{Capacity: 4, Options: Options{Mode: Raise, Pairs: true}})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			each := make([][]func() error, n) // by rank
			for r, w := range ws {
				x, y, z := F32(make([]float32, 4)), F32(make([]float32, 4)), F32(make([]float32, 4*n))
				zz, counts := F32(make([]float32, 4*n)), make([]int, n)
				sizes := make([]int, n)
				for i := range n {
					counts[i], sizes[i] = 4, 16
				}
				ex := Exchange{Sizes: sizes, Fill: func(int, []byte) {}, Take: func([][]byte) error { return nil }}
				op := func(_ Result, err error) error { return err }
				each[r] = []func() error{
					func() error { return op(w.Barrier(ctx)) },
					func() error { return op(w.AllReduce(ctx, y, x, dtype.Sum)) },
					func() error { return op(w.Broadcast(ctx, x, 0)) },
					func() error { return op(w.AllGather(ctx, z, x, nil)) },
					func() error { return op(w.AllGather(ctx, z, x, counts)) },
					func() error { return op(w.AllToAll(ctx, z, zz, nil, nil)) },
					func() error { return op(w.AllToAll(ctx, z, zz, counts, counts)) },
					func() error { _, err := w.Boundary(ctx, nil); return err },
					func() error {
						p, err := w.StartPair(ctx, &ex)
						if err != nil {
							return err
						}
						if err := p.Dispatched(ctx); err != nil {
							return err
						}
						if err := p.StartCombine(ctx, &ex); err != nil {
							return err
						}
						return op(p.Combined(ctx))
					},
				}
			}
			for i := range each[0] {
				const runs = 200
				run := func(r, times int) error {
					for range times {
						if err := each[r][i](); err != nil {
							return err
						}
					}
					return nil
				}
				least := 1e9 // of several tries: the runtime and the loop allocate now and then
				for range 5 {
					done := make(chan error, n)
					for r := 1; r < n; r++ {
						go func() { done <- run(r, runs+1) }() // AllocsPerRun runs once more, to warm up
					}
					least = min(least, testing.AllocsPerRun(runs, func() { require.NoError(t, run(0, 1)) }))
					for r := 1; r < n; r++ {
						require.NoError(t, <-done)
					}
				}
				require.Less(t, least, 0.5, "operation %d of the list", i)
			}
		})
	}
}

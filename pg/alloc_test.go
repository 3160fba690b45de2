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

package pg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"

	"github.com/stretchr/testify/require"
)

// gone closes a world, which is a death to the others, and waits until all of them have a view without it.
func gone(t testing.TB, ws []*World, r int) {
	t.Helper()
	require.NoError(t, ws[r].Close())
	for i, w := range ws {
		if i == r || w.overErr() != nil {
			continue
		}
		require.Eventually(t, func() bool {
			a, _ := w.Active()
			return !a.Has(r)
		}, 10*time.Second, time.Millisecond)
	}
}

func sum64(w *Group, ctx context.Context, x int64) (int64, Result, error) {
	b := []int64{x}
	res, err := w.AllReduce(ctx, I64(b), I64(b), dtype.Sum)
	return b[0], res, err
}

// TestRaise: the first call after the cut returns the loss, the one after it goes on, on every survivor, whether an
// operation was in flight or not. Boundary neither reports nor resumes.
func TestRaise(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		cfg.Options.Mode = Raise
		ws := worlds(t, 4, cfg)
		ctx := within(t, 30*time.Second)
		for r, err := range onAll(ws, func(w *World) error {
			got, _, err := sum64(w.Group, ctx, 1<<w.Rank())
			if err == nil && got != 15 {
				err = fmt.Errorf("sum %d", got)
			}
			return err
		}) {
			require.NoError(t, err, "rank %d", r)
		}
		gone(t, ws, 2)
		left := []*World{ws[0], ws[1], nil, ws[3]}
		for r, err := range onAll(left, func(w *World) error { _, err := w.Boundary(ctx, nil); return err }) {
			require.NoError(t, err, "rank %d", r)
		}
		first := &RankLost{}
		for r, err := range onAll(left, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
			if r == 2 {
				continue
			}
			var e *RankLost
			require.ErrorAs(t, err, &e, "rank %d", r)
			require.Equal(t, []int{2}, e.Lost)
			require.Equal(t, []int{2}, e.Slots)
			if r == 0 {
				first = e
			}
			require.Equal(t, first, e)
		}
		for r, err := range onAll(left, func(w *World) error {
			got, res, err := sum64(w.Group, ctx, 1<<w.Rank())
			if err == nil && (got != 11 || res.Epoch != first.Epoch || res.Seq != 2) {
				err = fmt.Errorf("sum %d, %+v", got, res)
			}
			return err
		}) {
			require.NoError(t, err, "rank %d", r)
		}
	})
}

// TestRaiseAsync: what is in flight beyond the cut fails in its Work, whoever waits for it first, and is one loss.
func TestRaiseAsync(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		cfg.Options.Mode = Raise
		ws := worlds(t, 3, cfg)
		ctx := within(t, 30*time.Second)
		start := func(w *World, out []int64) *Work {
			k, err := w.Start(&collectives.Call{Kind: collectives.AllReduce, DType: dtype.I64, Reduce: dtype.Sum, In: I64(out).Data, Out: I64(out).Data})
			require.NoError(t, err)
			return k
		}
		var wg sync.WaitGroup
		var ready sync.WaitGroup
		ready.Add(2)
		for _, w := range []*World{ws[0], ws[2]} {
			wg.Go(func() {
				x := make([][]int64, 6) // more than have bytes in flight
				var ks []*Work
				for i := range x {
					x[i] = []int64{1}
					ks = append(ks, start(w, x[i]))
				}
				ready.Done()
				for i, k := range ks {
					_, err := k.Wait(ctx)
					var e *RankLost
					if !errors.As(err, &e) || len(e.Lost) != 1 || e.Lost[0] != 1 {
						t.Errorf("rank %d: work %d: %v", w.Rank(), i, err)
					}
				}
				got, res, err := sum64(w.Group, ctx, 1)
				if err != nil || got != 2 || res.Seq != 1 {
					t.Errorf("rank %d: after it %v %+v %v", w.Rank(), got, res, err)
				}
			})
		}
		ready.Wait()
		require.NoError(t, ws[1].Close())
		wg.Wait()
	})
}

// TestManualResume: nothing goes on before Resume, and each loss wants one.
func TestManualResume(t *testing.T) {
	ws := worlds(t, 3, Config{Options: Options{Mode: Raise, ManualResume: true}})
	ctx := within(t, 30*time.Second)
	gone(t, ws, 1)
	left := []*World{ws[0], nil, ws[2]}
	for range 3 {
		for r, err := range onAll(left, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
			if r != 1 {
				require.ErrorAs(t, err, new(*RankLost))
			}
		}
	}
	for r, err := range onAll(left, func(w *World) error {
		set, epoch, err := w.Resume(ctx)
		if err == nil && (set.Len() != 2 || epoch != 2) {
			err = fmt.Errorf("resumed with %v in epoch %d", set.Slots(), epoch)
		}
		return err
	}) {
		require.NoError(t, err, "rank %d", r)
	}
	for r, err := range onAll(left, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
		require.NoError(t, err, "rank %d", r)
	}
}

// TestTwoLosses: two losses that one rank finds at once and another one by one are two errors on both.
func TestTwoLosses(t *testing.T) {
	ws := worlds(t, 4, Config{Options: Options{Mode: Raise}})
	ctx := within(t, 30*time.Second)
	lost := func(w *World) int {
		_, err := w.Barrier(ctx)
		var e *RankLost
		require.ErrorAs(t, err, &e)
		require.Len(t, e.Lost, 1)
		return e.Lost[0]
	}
	gone(t, ws, 1)
	require.Equal(t, 1, lost(ws[0])) // has found the first
	gone(t, ws, 2)
	require.Equal(t, 1, lost(ws[3])) // finds both
	require.Equal(t, 2, lost(ws[3]))
	require.Equal(t, 2, lost(ws[0]))
	for r, err := range onAll([]*World{ws[0], nil, nil, ws[3]}, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
		require.NoError(t, err, "rank %d", r)
	}
}

// TestMessages: a message belongs to the version in which it was sent.
func TestMessages(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		cfg.Options.Mode = Raise
		ws := worlds(t, 3, cfg)
		ctx := within(t, 30*time.Second)
		b := make([]byte, 3)
		require.NoError(t, ws[0].Send(ctx, U8([]byte("old")), 2, 1))
		require.Eventually(t, func() bool { // it has come
			ws[2].p2p.mu.Lock()
			defer ws[2].p2p.mu.Unlock()
			return len(ws[2].p2p.in) == 1
		}, 5*time.Second, time.Millisecond)
		gone(t, ws, 1)
		require.ErrorAs(t, ws[0].Send(ctx, U8(b), 2, 1), new(*RankLost), "the version is closed")
		require.ErrorAs(t, ws[2].Recv(ctx, U8(b), 0, 2), new(*RankLost), "the version is closed")
		_, err := ws[0].Barrier(ctx)
		require.ErrorAs(t, err, new(*RankLost))
		require.NoError(t, ws[0].Send(ctx, U8([]byte("new")), 2, 1)) // comes before its receiver has resumed
		time.Sleep(20 * time.Millisecond)
		_, err = ws[2].Barrier(ctx)
		require.ErrorAs(t, err, new(*RankLost))
		require.NoError(t, ws[2].Recv(ctx, U8(b), 0, 1))
		require.Equal(t, "new", string(b))
		require.ErrorAs(t, ws[2].Send(ctx, U8(b), 1, 1), new(*RankLost))

		// Long ones, from two goroutines, do not mix.
		var wg sync.WaitGroup
		for k := range 2 {
			wg.Go(func() {
				x := make([]byte, 1<<20)
				for i := range x {
					x[i] = byte(k)
				}
				if err := ws[0].Send(ctx, U8(x), 2, 7); err != nil {
					t.Error(err)
				}
			})
		}
		seen := map[byte]bool{}
		for range 2 {
			x := make([]byte, 1<<20)
			require.NoError(t, ws[2].Recv(ctx, U8(x), 0, 7))
			seen[x[0]] = true
			for _, c := range x {
				require.Equal(t, x[0], c)
			}
		}
		wg.Wait()
		require.Len(t, seen, 2)
	})
}

// TestManyGroups makes and closes groups again and again, more than a host has words or a process memory for: it comes back.
func TestManyGroups(t *testing.T) {
	t.Parallel()
	links(t, func(t *testing.T, cfg Config) {
		cfg.ArenaBytes = 6 << 20 // for 20 of them
		n := 100
		if cfg.Links == "auto" {
			n = 2200
		}
		ws := worlds(t, 3, cfg)
		ctx := within(t, 60*time.Second)
		all(t, ws, func(w *World) error {
			for i := range n {
				g, err := w.Sub(ctx, nil, Options{SlotBytes: 64 << 10})
				if err != nil {
					return fmt.Errorf("group %d: %w", i, err)
				}
				if got, _, err := sum64(g, ctx, 1); err != nil || got != 3 {
					return fmt.Errorf("group %d: %d %w", i, got, err)
				}
				if err := g.Close(ctx); err != nil {
					return err
				}
				if _, err := g.Barrier(ctx); !errors.Is(err, ErrClosed) {
					return fmt.Errorf("after the close: %v", err)
				}
			}
			return nil
		})
	})
}

// TestLarge moves more than the links hold at once.
func TestLarge(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	ws := worlds(t, 2, Config{Links: "tcp"})
	ctx := within(t, 60*time.Second)
	all(t, ws, func(w *World) error {
		x := make([]byte, 40<<20)
		for i := range x {
			x[i] = byte(i * (w.Rank() + 1))
		}
		if _, err := w.AllReduce(ctx, U8(x), U8(x), dtype.Sum); err != nil {
			return err
		}
		for i := range x {
			if x[i] != byte(i*3) {
				return fmt.Errorf("byte %d is %d", i, x[i])
			}
		}
		_, err := w.Broadcast(ctx, U8(x), 1)
		return err
	})
}

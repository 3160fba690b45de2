package pg

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

func barrier() *collectives.Call { return &collectives.Call{Kind: collectives.Barrier} }

// sleeps waits until somebody drives the group and has nothing to do.
func sleeps(t testing.TB, g *Group) {
	t.Helper()
	require.Eventually(t, func() bool { return g.asleep.Load() }, 10*time.Second, 100*time.Microsecond)
}

// TestWaitOfWhatIsDone: it returns while another goroutine waits for a later operation, which the peer issues only when it
// hears of that.
func TestWaitOfWhatIsDone(t *testing.T) {
	for _, late := range []bool{false, true} { // it is done when Wait is called, or while it waits
		links(t, func(t *testing.T, cfg Config) {
			cfg.Options.Timeout = 3 * time.Second
			ws := worlds(t, 2, cfg)
			ctx := within(t, 30*time.Second)
			word := []byte{7}
			all(t, ws, func(w *World) error {
				if w.Rank() == 1 {
					if late {
						require.Eventually(t, func() bool { return ws[0].wants.Load() == 1 }, 10*time.Second, time.Millisecond)
					}
					if _, err := w.Barrier(ctx); err != nil {
						return err
					}
					if err := w.Recv(ctx, U8([]byte{0}), 0, 1); err != nil {
						return err
					}
					_, err := w.Barrier(ctx)
					return err
				}
				a, err := w.Start(barrier())
				if err != nil {
					return err
				}
				b, err := w.Start(barrier())
				if err != nil {
					return err
				}
				var eg errgroup.Group
				eg.Go(func() error { _, err := b.Wait(ctx); return err })
				if !late {
					require.Eventually(t, a.Done, 10*time.Second, time.Millisecond)
				}
				sleeps(t, w.Group) // in b
				if res, err := a.Wait(ctx); err != nil || res.Seq != 1 {
					return fmt.Errorf("result %+v, %w", res, err)
				}
				if err := w.Send(ctx, U8(word), 1, 1); err != nil {
					return err
				}
				return eg.Wait()
			})
		})
	}
}

// TestStartBehindAnother: issuing does not wait for the operations of other goroutines, sequences are in the order of the
// calls, and more than Depth may be outstanding.
func TestStartBehindAnother(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		g := ws[0].Group
		var eg errgroup.Group
		eg.Go(func() error { _, err := g.Barrier(ctx); return err }) // its peer is late
		sleeps(t, g)
		const n = 20
		var works []*Work
		xs := make([][]int64, n)
		for i := range n {
			if i%5 == 0 {
				sleeps(t, g)
			}
			xs[i] = []int64{int64(i)}
			begin := time.Now()
			w, err := g.Start(&collectives.Call{Kind: collectives.AllReduce, DType: dtype.I64, Reduce: dtype.Sum, In: I64(xs[i]).Data, Out: I64(xs[i]).Data})
			require.NoError(t, err)
			require.Less(t, time.Since(begin), 5*time.Second) // a sixth of the deadline, on a machine that is busy
			works = append(works, w)
			require.EqualValues(t, i+2, w.op.Seq)
			require.False(t, w.Done())
		}
		eg.Go(func() error { // a blocking one is issued too, and can be awaited in any order
			_, err := g.Barrier(ctx)
			return err
		})
		require.Eventually(t, func() bool { return g.issued.Load() == n+2 }, 10*time.Second, time.Millisecond)
		_, err := ws[1].Barrier(ctx)
		require.NoError(t, err)
		for i := range n {
			x := []int64{100}
			_, err := ws[1].AllReduce(ctx, I64(x), I64(x), dtype.Sum)
			require.NoError(t, err)
			require.EqualValues(t, 100+i, x[0])
		}
		_, err = ws[1].Barrier(ctx)
		require.NoError(t, err)
		for i := range n {
			w := works[n-1-i]
			res, err := w.Wait(ctx)
			require.NoError(t, err)
			require.EqualValues(t, n+1-i, res.Seq)
			require.EqualValues(t, 100+n-1-i, xs[n-1-i][0])
		}
		require.NoError(t, eg.Wait())
	})
}

// TestManyCallers: goroutines that issue, wait and give up waiting, all at once: each operation ends once, and nothing is
// left in line.
func TestManyCallers(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		const callers, rounds = 4, 60
		all(t, ws, func(w *World) error {
			var eg errgroup.Group
			seen := make([]atomic.Int32, 2*callers*rounds+1)
			for c := range callers {
				eg.Go(func() error { // every operation is a barrier, so that their order is no matter
					for i := range rounds {
						res, err := w.Barrier(ctx)
						if err != nil {
							return err
						}
						seen[res.Seq].Add(1)
						x, err := w.Start(barrier())
						if err != nil {
							return err
						}
						if (i+c)%3 == 0 {
							short, cancel := context.WithTimeout(ctx, 20*time.Microsecond)
							if _, err := x.Wait(short); err != nil && !errors.Is(err, context.DeadlineExceeded) {
								cancel()
								return err
							}
							cancel()
						}
						other := make(chan error, 1)
						go func() { _, err := x.Wait(ctx); other <- err }()
						if res, err = x.Wait(ctx); err != nil {
							return err
						}
						if err := <-other; err != nil {
							return err
						}
						seen[res.Seq].Add(1)
					}
					return nil
				})
			}
			if err := eg.Wait(); err != nil {
				return err
			}
			for i := range seen[1:] {
				if n := seen[i+1].Load(); n != 1 {
					return fmt.Errorf("operation %d was returned %d times", i+1, n)
				}
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			t := &w.turns
			t.mu.Lock()
			defer t.mu.Unlock()
			if len(t.line) != 0 || t.wants.Load() != 0 || t.urgent() || t.others.Load() != 0 {
				return fmt.Errorf("%d callers are left in line (%d, %d, %d)", len(t.line), t.wants.Load(), t.driver.Load(), t.others.Load())
			}
			return nil
		})
	})
}

// TestPairBehindAnother: a goroutine waits for an operation after a pair, which only its own goroutine can step; and two
// goroutines have a pair each.
func TestPairBehindAnother(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		cfg.Options.Mode, cfg.Options.Pairs = Raise, true
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		ex := func() *Exchange {
			return &Exchange{Sizes: []int{16, 16}, Fill: func(int, []byte) {}, Take: func([][]byte) error { return nil }}
		}
		rest := func(p *Pair, err error) error {
			if err == nil {
				err = p.Dispatched(ctx)
			}
			if err == nil {
				err = p.StartCombine(ctx, ex())
			}
			if err == nil {
				_, err = p.Combined(ctx)
			}
			return err
		}
		all(t, ws, func(w *World) error {
			for i := range 10 {
				p, err := w.StartPair(ctx, ex())
				if err != nil {
					return err
				}
				b, err := w.Start(barrier())
				if err != nil {
					return err
				}
				var eg errgroup.Group
				eg.Go(func() error { _, err := b.Wait(ctx); return err })
				if i == 0 && w.Rank() == 0 {
					sleeps(t, w.Group)
				}
				if err := rest(p, nil); err != nil {
					return err
				}
				if err := eg.Wait(); err != nil {
					return err
				}

				if i == 0 && w.Rank() == 1 { // both goroutines of rank 0 wait
					sleeps(t, ws[0].Group)
					time.Sleep(20 * time.Millisecond)
				}
				p, err = w.StartPair(ctx, ex())
				if err != nil {
					return err
				}
				q, err := w.StartPair(ctx, ex())
				if err != nil {
					return err
				}
				first := make(chan struct{})
				eg.Go(func() error {
					return errors.Join(q.Dispatched(ctx), func() error { <-first; return q.StartCombine(ctx, ex()) }())
				})
				if err := rest(p, nil); err != nil {
					return err
				}
				close(first)
				if err := eg.Wait(); err != nil {
					return err
				}
				if _, err := q.Combined(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// TestGivenUpInLine: a blocking operation whose context ends while another goroutine drives aborts the group, as one that
// drives itself does; what the other one waits for fails with it.
func TestGivenUpInLine(t *testing.T) {
	ws := worlds(t, 2, Config{})
	ctx := within(t, 30*time.Second)
	gs := make([]*Group, 2)
	all(t, ws, func(w *World) (err error) { gs[w.Rank()], err = w.Sub(ctx, nil, Options{}); return err })
	g := gs[0]
	short, cancel := context.WithCancel(ctx)
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { _, err := g.Barrier(short); first <- err }()
	sleeps(t, g)
	go func() { _, err := g.Barrier(ctx); second <- err }()
	require.Eventually(t, func() bool { return g.issued.Load() == 2 && g.wants.Load() == 1 }, 10*time.Second, time.Millisecond)
	sleeps(t, g)
	cancel()
	require.ErrorIs(t, <-first, context.Canceled)
	require.ErrorIs(t, <-second, ErrClosed)
	for err := error(nil); err == nil; { // it had arrived in the first, and perhaps in the second
		if _, err = gs[1].Barrier(ctx); err != nil {
			require.ErrorIs(t, err, ErrFailed)
		}
	}
}

// TestLossInLine: a loss ends the waits of all goroutines, one call returns it, and the group goes on.
func TestLossInLine(t *testing.T) {
	ws := worlds(t, 3, Config{Options: Options{Mode: Raise}})
	ctx := within(t, 30*time.Second)
	all(t, ws, func(w *World) error {
		if w.Rank() == 2 {
			sleeps(t, ws[0].Group)
			sleeps(t, ws[1].Group)
			return w.Close()
		}
		a, err := w.Start(barrier())
		if err != nil {
			return err
		}
		b, err := w.Start(barrier())
		if err != nil {
			return err
		}
		errs := make(chan error, 2)
		for _, x := range []*Work{a, b} {
			go func() { _, err := x.Wait(ctx); errs <- err }()
		}
		for range 2 {
			if err := <-errs; !errors.As(err, new(*RankLost)) {
				return fmt.Errorf("want a loss, got %w", err)
			}
		}
		_, err = w.Barrier(ctx)
		return err
	})
}

// TestAbortRefuses: from the return of Abort on nothing of the caller is issued, and it gets the error of the others.
func TestAbortRefuses(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			for range 30 {
				ws := worlds(t, n, Config{Options: Options{Mode: Raise}})
				ctx := within(t, 30*time.Second)
				gs := make([]*Group, n)
				all(t, ws, func(w *World) (err error) {
					gs[w.Rank()], err = w.Sub(ctx, nil, Options{Mode: Raise, Pairs: true})
					return err
				})
				g := gs[0]
				g.Abort("enough")
				x, err := g.Start(barrier())
				require.NoError(t, err)
				_, err = x.Wait(ctx)
				require.ErrorIs(t, err, ErrFailed)
				if n > 1 {
					require.ErrorIs(t, g.Send(ctx, U8([]byte{1}), 1, 1), ErrFailed)
					require.ErrorIs(t, g.Recv(ctx, U8([]byte{1}), 1, 1), ErrFailed)
				}
				_, err = g.StartPair(ctx, &Exchange{})
				require.ErrorIs(t, err, ErrFailed)
				require.Zero(t, g.issued.Load())
				var first *GroupFailed
				for _, g := range gs {
					_, err = g.Barrier(ctx)
					var f *GroupFailed
					require.ErrorAs(t, err, &f)
					require.Contains(t, f.Reason, "aborted by rank 0: enough")
					if first == nil {
						first = f
					}
					require.Equal(t, first, f)
				}
				for _, w := range ws {
					require.NoError(t, w.Close())
				}
			}
		})
	}
}

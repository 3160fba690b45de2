package pg

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"

	"github.com/stretchr/testify/require"
)

// TestFailedGroupIsReleased: a member of a failed group that never returned from what the others have keeps their memory
// for it; once it is lost, that is free.
func TestFailedGroupIsReleased(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for _, mode := range []Mode{Continue, Raise} {
			t.Run(mode.String(), func(t *testing.T) {
				ws := worlds(t, 3, cfg)
				ctx := within(t, 30*time.Second)
				gs := make([]*Group, 3)
				for _, err := range onAll(ws, func(w *World) (err error) {
					gs[w.Rank()], err = w.Sub(ctx, nil, Options{Mode: mode})
					return err
				}) {
					require.NoError(t, err)
				}
				last := gs[2] // arrives at an operation, and is never seen again
				require.True(t, last.try())
				x, err := last.issue(&collectives.Call{Kind: collectives.Barrier}, nil)
				require.NoError(t, err)
				last.comm.Step(&x.op, false)
				for _, err := range onAll(ws[:2], func(w *World) error { _, err := gs[w.Rank()].Barrier(ctx); return err }) {
					require.NoError(t, err)
				}
				gs[0].Abort("enough")
				var first *GroupFailed
				for _, g := range gs[:2] {
					_, err := g.Barrier(ctx)
					require.ErrorAs(t, err, &first)
				}
				require.ErrorIs(t, gs[0].Close(ctx), ErrFailed)
				time.Sleep(3 * tidyEvery)
				require.NotNil(t, ws[0].group(gs[0].id), "the last one may need what rank 0 has")

				gone(t, ws, 2)
				require.Eventually(t, func() bool { return ws[0].group(gs[0].id) == nil }, 5*time.Second, 10*time.Millisecond)
				_, err = gs[1].Barrier(ctx)
				var again *GroupFailed
				require.ErrorAs(t, err, &again)
				require.Equal(t, *first, *again, "what it failed of stays the same")
				require.ErrorIs(t, gs[1].Close(ctx), ErrFailed)
				require.Eventually(t, func() bool { return ws[1].group(gs[1].id) == nil }, 5*time.Second, 10*time.Millisecond)
			})
		}
	})
}

// TestCloseAfterGivingUp closes a group of which an operation was given up, or gives up at the close itself: it fails on all
// members, who are told so, and nobody takes anybody else for late.
func TestCloseAfterGivingUp(t *testing.T) {
	for _, at := range []string{"operation", "close"} {
		t.Run(at, func(t *testing.T) {
			links(t, func(t *testing.T, cfg Config) {
				ws := worlds(t, 3, cfg)
				ctx := within(t, 30*time.Second)
				gs := make([]*Group, 3)
				for _, err := range onAll(ws, func(w *World) (err error) {
					gs[w.Rank()], err = w.Sub(ctx, nil, Options{Timeout: time.Second})
					return err
				}) {
					require.NoError(t, err)
				}
				gaveUp := make(chan struct{})
				errs := onAll(ws, func(w *World) error {
					g := gs[w.Rank()]
					if w.Rank() == 1 {
						defer close(gaveUp)
						short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
						defer cancel()
						if at == "operation" {
							_, err := g.Barrier(short)
							require.ErrorIs(t, err, context.DeadlineExceeded)
						}
						return g.Close(short)
					}
					<-gaveUp
					for {
						if _, err := g.Barrier(ctx); err != nil {
							return err
						}
					}
				})
				require.Error(t, errs[1])
				for _, r := range []int{0, 2} {
					require.ErrorIs(t, errs[r], ErrFailed)
					require.ErrorContains(t, errs[r], "rank 1")
					require.Error(t, gs[r].Close(ctx))
				}
				require.ErrorIs(t, gs[0].Close(ctx), ErrClosed, "once more")
				for _, err := range onAll(ws, func(w *World) error { _, err := w.Barrier(ctx); return err }) {
					require.NoError(t, err, "the world goes on")
				}
				for _, w := range ws {
					require.Equal(t, 3, func() int { s, _ := w.Active(); return s.Len() }(), "nobody was taken for late")
					require.Eventually(t, func() bool { return w.group(gs[0].id) == nil }, 5*time.Second, 10*time.Millisecond)
				}
			})
		})
	}
}

// TestManyFailedGroups makes groups that fail, more than a host has words.
func TestManyFailedGroups(t *testing.T) {
	t.Parallel()
	ws := worlds(t, 2, Config{})
	ctx := within(t, 60*time.Second)
	all(t, ws, func(w *World) error {
		for i := range 2200 {
			g, err := w.Sub(ctx, nil, Options{SlotBytes: 64 << 10})
			if err != nil {
				return fmt.Errorf("group %d: %w", i, err)
			}
			if w.Rank() == i%2 {
				g.Abort("enough")
			}
			if err := g.Close(ctx); err != nil && !errors.Is(err, ErrFailed) {
				return fmt.Errorf("group %d: %w", i, err)
			}
		}
		return nil
	})
}

package pg

import (
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

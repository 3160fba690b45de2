//go:build faultpoint

package bench

import (
	"testing"

	"github.com/serry-project/serry/internal/faultpoint"

	"github.com/stretchr/testify/require"
)

func TestFailover(t *testing.T) {
	c := FailoverDefaults()
	c.Kills, c.Resident = 12, 1<<20
	r, err := Failover(t.Context(), options(t), c)
	clean(t, r, err)
	require.EqualValues(t, 12, r.row(t, "all").Count)
	require.EqualValues(t, 6, r.row(t, "in ep").Count)
	require.EqualValues(t, 3, r.row(t, "rank 0").Count)
	require.Empty(t, r.Bars)
	require.Len(t, r.Kills, 12)
}

// One point that only dispatch passes: all kills are there.
func TestFailoverAtOnePoint(t *testing.T) {
	c := FailoverDefaults()
	c.Ranks, c.Kills, c.Resident, c.Points, c.Links = 3, 3, 0, []string{faultpoint.EPDispatchWait}, "tcp"
	r, err := Failover(t.Context(), options(t), c)
	clean(t, r, err)
	require.EqualValues(t, 3, r.row(t, "ep "+faultpoint.EPDispatchWait).Count)
}

// The tables of what a step passes are right: every point is reached in its phase.
func TestEveryPointIsReached(t *testing.T) {
	if testing.Short() {
		t.Skip("minutes under the race detector")
	}
	c := FailoverDefaults()
	c.Resident = 0
	c.Kills = 40 // each rank in each phase at five points, and those of the next rank begin three further
	r, err := Failover(t.Context(), options(t), c)
	clean(t, r, err)
	for p := range epPoints {
		r.row(t, "ep "+p)
	}
	for p := range worldPoints {
		if p == faultpoint.BoundaryEnter {
			r.row(t, "boundary "+p)
		} else {
			r.row(t, "world "+p)
		}
	}
	require.Len(t, r.Kills, c.Kills, "%v", r.Notes)
}

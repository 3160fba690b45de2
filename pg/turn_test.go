package pg

import (
	"context"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"

	"github.com/stretchr/testify/require"
)

// TestStartWaitsForItsTurn: not for ever, and it has issued nothing then; the end of the world ends it too.
func TestStartWaitsForItsTurn(t *testing.T) {
	ws := worlds(t, 2, Config{Options: Options{Timeout: 500 * time.Millisecond}})
	ctx := within(t, 30*time.Second)
	g := ws[0].Group
	call := &collectives.Call{Kind: collectives.Barrier}
	require.True(t, g.try()) // a call that does not end
	begin := time.Now()
	_, err := g.Start(call)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "serry: nothing was issued: another call is in an operation of group 1 since 500ms")
	require.Less(t, time.Since(begin), 5*time.Second)
	require.Zero(t, g.seq)

	started := make(chan error, 1)
	go func() { // its turn comes
		w, err := g.Start(call)
		if err == nil {
			_, err = w.Wait(ctx)
		}
		started <- err
	}()
	time.Sleep(20 * time.Millisecond)
	g.release()
	_, err = ws[1].Barrier(ctx)
	require.NoError(t, err)
	require.NoError(t, <-started)

	require.True(t, g.try())
	go func() { _, err := g.Start(call); started <- err }()
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, ws[0].Close())
	require.ErrorIs(t, <-started, ErrClosed)
}

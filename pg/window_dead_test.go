package pg

import (
	"context"
	"testing"

	"github.com/serry-project/serry/device"

	"github.com/stretchr/testify/require"
)

// TestWindowOfTheDead: of all the processes that a rank has had, Window bytes are kept, those of the last ones, whole or
// not at all; the living one has a window of its own.
func TestWindowOfTheDead(t *testing.T) {
	w := worlds(t, 2, Config{Options: Options{Mode: Continue}})[0]
	p, in := &w.p2p, &w.p2p.flows[1].in
	var sent uint64
	part := func(inc, tag uint32, n, total int) { // the beginning of a message
		if in.inc != inc {
			sent = 0
		}
		sent += uint64(total) + messageCost
		f := &device.Frame{Payload: make([]byte, n)}
		f.Inc, f.Tag, f.Seq, f.Total, f.Length = inc, tag, sent, uint64(total), uint32(n)
		w.p2pFrame(1, f)
	}
	bytes := func() (n uint64) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for k, q := range p.in {
			for _, m := range q {
				if k.rank == 1 {
					n += cost(m)
				}
			}
		}
		require.Equal(t, n, in.held+in.dead)
		return n
	}
	const quarter = Window/4 - messageCost
	for inc := uint32(1); inc <= 6; inc++ {
		for range 3 {
			part(inc, 1, quarter, quarter)
		}
		part(inc, 2+inc%2, 1, quarter) // its rest does not come
		require.EqualValues(t, Window, holds(t, w.Group, 1))
		require.LessOrEqual(t, bytes(), uint64(2*Window))
	}
	require.EqualValues(t, 3*Window/4, in.dead, "of the last one that has died, without what was not whole")
	for _, m := range p.in[p2pKey{1, 1}] {
		require.Contains(t, []uint32{5, 6}, m.inc)
	}

	// Those that fit together stay, and are received in order.
	for inc := uint32(7); inc <= 9; inc++ {
		part(inc, 4, 10, 10)
	}
	require.EqualValues(t, 3*Window/4+3*(10+messageCost), bytes(), "the sixth and all after it")
	for range 3 {
		require.NoError(t, w.Recv(context.Background(), U8(make([]byte, quarter)), 1, 1))
	}
	for range 3 {
		require.NoError(t, w.Recv(context.Background(), U8(make([]byte, 10)), 1, 4))
	}
	require.Zero(t, bytes())
	require.Empty(t, p.in)
}

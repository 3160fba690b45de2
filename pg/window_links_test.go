package pg

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"

	"github.com/stretchr/testify/require"
)

// choosy is a link that has no room for some frames.
type choosy struct {
	device.Link
	full func(f *device.Frame) bool
}

func (l choosy) Send(f *device.Frame) error {
	if f.Kind == wire.KindP2P && l.full(f) {
		return fmt.Errorf("%w: as the test wants", device.ErrFull)
	}
	return l.Link.Send(f)
}

// TestWindowOverFullLinks: what a link has no room for (parts, questions, credits) is sent again.
func TestWindowOverFullLinks(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		var n atomic.Int32
		cfg.Wrap = func(l device.Link) device.Link {
			return choosy{l, func(f *device.Frame) bool {
				k := n.Add(1)
				return f.Flags != 0 && k%4 != 0 || k%7 == 0
			}}
		}
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		const size, count = 5 << 20, 12
		sent := make(chan error, 1)
		go func() {
			b := make([]byte, size)
			for i := range count {
				b[size-1] = byte(i)
				if err := ws[0].Send(ctx, U8(b), 1, 3); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		stuck(t, ws[0].Group, 1)
		b := make([]byte, size)
		for i := range count {
			require.NoError(t, ws[1].Recv(ctx, U8(b), 0, 3))
			require.Equal(t, byte(i), b[size-1])
		}
		require.NoError(t, <-sent)
		require.NoError(t, ws[0].Send(ctx, U8(make([]byte, Window)), 1, 3)) // needs all the credit
		require.NoError(t, ws[1].Recv(ctx, U8(make([]byte, Window)), 0, 3))
	})
}

// TestSendGivenUpInTheMiddle: its part takes no room, also if the receiver could not be told at once.
func TestSendGivenUpInTheMiddle(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for _, told := range []bool{true, false} {
			t.Run(fmt.Sprint("told ", told), func(t *testing.T) {
				var cut atomic.Bool
				cfg := cfg
				cfg.Wrap = func(l device.Link) device.Link {
					return choosy{l, func(f *device.Frame) bool {
						return cut.Load() && (f.Offset > 0 || f.Flags == p2pCancel && !told)
					}}
				}
				ws := worlds(t, 2, cfg)
				ctx := within(t, 60*time.Second)
				for range 3 {
					cut.Store(true)
					short, cancel := context.WithTimeout(ctx, 150*time.Millisecond)
					require.ErrorIs(t, ws[0].Send(short, U8(make([]byte, Window/2)), 1, 1), context.DeadlineExceeded)
					cancel()
					require.Equal(t, !told, ws[0].p2p.flows[1].out.torn)
					cut.Store(false)
					fill(t, ctx, ws[0].Group, 1)
					require.False(t, ws[0].p2p.flows[1].out.torn)
					for range 4 {
						require.NoError(t, ws[1].Recv(ctx, U8(make([]byte, Window/4-messageCost)), 0, 1))
					}
				}
				require.Zero(t, holds(t, ws[1].Group, 0))
			})
		}
	})
}

package pg

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// TestFounderComesBack: a rank that dies before the founding, and is started again as a replacement, founds the world.
func TestFounderComesBack(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for _, dead := range []int{0, 1, 2} {
			for _, late := range []bool{false, true} { // the others come before the restart, and wait for it
				t.Run(fmt.Sprint(dead, late), func(t *testing.T) {
					t.Parallel()
					st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
					require.NoError(t, err)
					ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
					defer cancel()
					join := func(ctx context.Context, r int, again bool) (*World, error) {
						c := cfg
						c.Rank, c.Size, c.Store, c.Rejoin = r, 3, st, again
						return Join(ctx, c)
					}
					life, crash := context.WithCancel(ctx)
					first := make(chan error, 1)
					go func() { _, err := join(life, dead, false); first <- err }()
					_, err = st.Get(ctx, fmt.Sprintf("serry/world/rank/%d", dead))
					require.NoError(t, err)
					crash()
					require.Error(t, <-first)

					ws := make([]*World, 3)
					t.Cleanup(func() {
						for _, w := range ws {
							if w != nil {
								_ = w.Close()
							}
						}
					})
					var eg errgroup.Group
					for r := range ws {
						eg.Go(func() (err error) {
							if r == dead && late {
								time.Sleep(300 * time.Millisecond)
							}
							ws[r], err = join(ctx, r, r == dead)
							return err
						})
					}
					require.NoError(t, eg.Wait())
					all(t, ws, func(w *World) error {
						out := make([]float32, 1)
						_, err := w.AllReduce(ctx, F32(out), F32([]float32{1}), dtype.Sum)
						if err == nil && (out[0] != 3 || w.Epoch() != 1) {
							err = fmt.Errorf("%v in epoch %d", out, w.Epoch())
						}
						return err
					})
				})
			}
		}
	})
}

// TestFoundedOnce: of two processes of one rank that are met by different founders, the founding takes one.
func TestFoundedOnce(t *testing.T) {
	st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	ctx := t.Context()
	w := &World{slot: 1}
	ms := func(nonces ...byte) (ms []fault.Member) {
		for _, n := range nonces {
			ms = append(ms, fault.Member{Nonce: [16]byte{n}})
		}
		return ms
	}
	require.NoError(t, w.settle(ctx, st, ms(1, 2, 3)))
	require.NoError(t, w.settle(ctx, st, ms(1, 2, 3)))
	require.ErrorIs(t, w.settle(ctx, st, ms(9, 8, 3)), errFounded)
	require.ErrorContains(t, w.settle(ctx, st, ms(1, 2, 4)), "rank 2")
}

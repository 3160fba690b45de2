package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// TestGroupThatOneCannotMake: where one member has no room for a new group, the others' fails for good.
func TestGroupThatOneCannotMake(t *testing.T) {
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			ws := make([]*World, 3)
			var eg errgroup.Group
			for r := range ws {
				eg.Go(func() (err error) {
					arena := int64(16 << 20)
					if r == 1 {
						arena = 1 << 20
					}
					ws[r], err = Join(ctx, Config{Rank: r, Size: 3, Store: st, Links: l, ArenaBytes: arena, Options: Options{SlotBytes: 16 << 10}})
					return err
				})
			}
			require.NoError(t, eg.Wait())
			defer func() {
				for _, w := range ws {
					_ = w.Close()
				}
			}()
			for range 2 {
				all(t, ws, func(w *World) error {
					g, err := w.Sub(ctx, nil, Options{SlotBytes: 1 << 20})
					if w.Rank() == 1 {
						if err == nil || !strings.Contains(err.Error(), "no room") || strings.Count(err.Error(), "serry: ") != 1 {
							return fmt.Errorf("Sub: %w", err)
						}
					} else {
						if err != nil {
							return err
						}
						_, err = g.Barrier(ctx)
						var f *GroupFailed
						if !errors.As(err, &f) || !strings.Contains(f.Reason, "rank 1") || !strings.Contains(f.Reason, "no room") {
							return fmt.Errorf("Barrier: %w", err)
						}
					}
					_, err = w.Barrier(ctx)
					return err
				})
			}
			require.Eventually(t, func() bool {
				n := make(chan int, 1)
				ws[1].agent.Do(func() { n <- len(ws[1].without) })
				return <-n == 0
			}, 5*time.Second, time.Millisecond)
		})
	}
}

// TestLeaveWaitsForTheOthers: who leaves is there until the others have completed what it has.
func TestLeaveWaitsForTheOthers(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 3, cfg)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		all(t, ws, func(w *World) error {
			if _, err := w.Barrier(ctx); err != nil {
				return err
			}
			if w.Rank() != 0 {
				time.Sleep(time.Duration(w.Rank()) * 20 * time.Millisecond)
			} else if err := w.Leave(ctx); err != nil {
				return err
			} else {
				return nil
			}
			for {
				res, err := w.Barrier(ctx)
				if err != nil || res.Active.Len() == 2 {
					return err
				}
			}
		})
	})
}

// TestTwoCallersTakeTurns: goroutines that use one group wait for each other, and for what runs by itself.
func TestTwoCallersTakeTurns(t *testing.T) {
	ws := worlds(t, 1, Config{})
	w := ws[0]
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var eg errgroup.Group
	for range 4 {
		eg.Go(func() error {
			for i := range 500 {
				if i%10 == 0 {
					x, err := w.Start(&collectives.Call{Kind: collectives.Barrier})
					if err != nil {
						return err
					}
					if i%20 == 0 {
						for !x.Done() {
							time.Sleep(10 * time.Microsecond)
						}
					} else if _, err := x.Wait(ctx); err != nil {
						return err
					}
				}
				if _, err := w.Barrier(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, eg.Wait())
	// One that waits for its turn leaves with its context, and the turn is not lost.
	require.NoError(t, w.acquire(ctx))
	short, stop := context.WithTimeout(ctx, 10*time.Millisecond)
	defer stop()
	_, err := w.Barrier(short)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	w.release()
	_, err = w.Barrier(ctx)
	require.NoError(t, err)
}

// TestMessagesOfAnotherLength stay where they are.
func TestMessagesOfAnotherLength(t *testing.T) {
	ws := worlds(t, 2, Config{})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	require.NoError(t, ws[0].Send(ctx, U8([]byte{1, 2, 3}), 1, 7))
	require.ErrorContains(t, ws[1].Recv(ctx, U8(make([]byte, 2)), 0, 7), "it sent 3 bytes, the buffer has 2")
	b := make([]byte, 3)
	require.NoError(t, ws[1].Recv(ctx, U8(b), 0, 7))
	require.Equal(t, []byte{1, 2, 3}, b)
}

// TestWaitingInRecv: who waits in Recv is not late for an operation, its peer is asked; a ring of both is a deadlock.
func TestWaitingInRecv(t *testing.T) {
	ws := worlds(t, 2, Config{Options: Options{Timeout: 300 * time.Millisecond}})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	recv := make(chan error, 1)
	go func() { recv <- ws[0].Recv(ctx, U8(make([]byte, 1)), 1, 0) }()
	require.Eventually(t, func() bool {
		x := worldHost{ws[0]}.Waiting(worldID)
		return x.Group == worldID && x.Seq > p2pSeq && x.Missing.Has(1) && x.Missing.Len() == 1
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, ws[1].Send(ctx, U8([]byte{1}), 0, 0))
	require.NoError(t, <-recv)
	require.Zero(t, worldHost{ws[0]}.Waiting(worldID).Group)
	err := ws[0].Recv(ctx, U8(make([]byte, 1)), 1, 0)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, "serry: receive from rank 1, tag 0: nothing came in 300ms: context deadline exceeded", err.Error())
}

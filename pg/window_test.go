package pg

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/serry-project/serry/device"

	"github.com/stretchr/testify/require"
)

// holds is what a group holds of a rank's messages, and asserts that its books say the same.
func holds(t testing.TB, g *Group, rank int) (n uint64) {
	t.Helper()
	p := &g.p2p
	p.mu.Lock()
	defer p.mu.Unlock()
	in := &p.flows[rank].in
	for k, q := range p.in {
		for _, m := range q {
			if k.rank == rank && m.inc == in.inc {
				n += cost(m)
			}
		}
	}
	require.Equal(t, n, in.held)
	return n
}

// stuck waits until a call of g waits for a rank, and says in what.
func stuck(t testing.TB, g *Group, rank int) (what string) {
	t.Helper()
	require.Eventually(t, func() bool {
		x, ok := g.p2p.waiting()
		what = plain(fmt.Sprintf("op %d", x.seq))
		return ok && x.rank == rank
	}, 10*time.Second, time.Millisecond)
	return what
}

// TestWindow: what a rank does not receive is held up to Window; the sender goes on as it is received.
func TestWindow(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		for _, size := range []int{0, 1000, 1<<20 - 7, 3 << 20} {
			n := 3 * Window / (size + messageCost)
			n = min(n, 70_000) // more than a window of empty ones
			sent := make(chan error, 1)
			go func() {
				b := make([]byte, size)
				for i := range n {
					if size > 0 {
						binary.LittleEndian.PutUint64(b, uint64(i))
					}
					if err := ws[0].Send(ctx, U8(b), 1, uint32(size+i%2)); err != nil {
						sent <- err
						return
					}
				}
				sent <- nil
			}()
			require.Eventually(t, func() bool { return holds(t, ws[1].Group, 0)+uint64(size)+messageCost > Window }, 20*time.Second, time.Millisecond)
			next := fmt.Sprintf("in a send with tag %d", size+Window/(size+messageCost)%2)
			require.Eventually(t, func() bool { return stuck(t, ws[0].Group, 1) == next }, 5*time.Second, time.Millisecond)
			x := worldHost{ws[0]}.Waiting(worldID)
			require.True(t, x.Seq > p2pSeq && x.Missing.Has(1) && x.Missing.Len() == 1)
			time.Sleep(10 * time.Millisecond)
			b := make([]byte, size)
			for i := range n {
				if size > 1000 || i%1000 == 0 {
					require.LessOrEqual(t, holds(t, ws[1].Group, 0), uint64(Window))
				}
				require.NoError(t, ws[1].Recv(ctx, U8(b), 0, uint32(size+i%2)))
				if size > 0 {
					require.Equal(t, uint64(i), binary.LittleEndian.Uint64(b))
				}
			}
			require.NoError(t, <-sent)
			require.Zero(t, holds(t, ws[1].Group, 0))
		}
	})
}

// TestLargerThanWindow: such a message goes when nothing else is held, also if its receiver has not said so by itself;
// both sides may send one before they receive.
func TestLargerThanWindow(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 2, cfg)
		ctx := within(t, 60*time.Second)
		all(t, ws, func(w *World) error {
			other := 1 - w.Rank()
			in, out := make([]byte, Window+1000), bytes.Repeat([]byte{byte(w.Rank())}, Window+1000)
			small := make([]byte, 3)
			for range 2 {
				if err := w.Send(ctx, U8(small), other, 1); err != nil {
					return err
				}
				if err := w.Recv(ctx, U8(small), other, 1); err != nil {
					return err
				}
				if err := w.Send(ctx, U8(out), other, 2); err != nil {
					return err
				}
				if err := w.Recv(ctx, U8(in), other, 2); err != nil {
					return err
				}
				if in[0] != byte(other) || in[len(in)-1] != byte(other) {
					return fmt.Errorf("got %d .. %d", in[0], in[len(in)-1])
				}
			}
			return nil
		})
	})
}

// fill sends until nothing more fits.
func fill(t testing.TB, ctx context.Context, g *Group, to int) {
	for range 4 {
		require.NoError(t, g.Send(ctx, U8(make([]byte, Window/4-messageCost)), to, 1))
	}
}

// TestBlockedSendEnds: by its context, its deadline, the loss of the receiver, a loss that has to be returned first
// (Raise), the end of the group or of the world; where the group goes on, the window is whole again.
func TestBlockedSendEnds(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		cfg.Options.Mode = Raise
		cfg.Options.Timeout = 400 * time.Millisecond
		ws := worlds(t, 4, cfg)
		ctx := within(t, 60*time.Second)
		one := U8([]byte{1})
		blocked := func(g *Group, to int) chan error {
			ch := make(chan error, 1)
			go func() { ch <- g.Send(ctx, one, to, 9) }()
			stuck(t, g, to)
			return ch
		}
		fill(t, ctx, ws[0].Group, 1)
		err := ws[0].Send(ctx, one, 1, 9)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, "serry: send to rank 1, tag 9: rank 1 has not received what was sent before in 400ms: context deadline exceeded", err.Error())
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		require.ErrorIs(t, ws[0].Send(short, one, 1, 9), context.DeadlineExceeded)
		cancel()

		// Rank 3 is lost: who waits for rank 1 must return that first, and what was sent before it is dropped.
		ch := blocked(ws[0].Group, 1)
		require.NoError(t, ws[2].Send(ctx, one, 1, 9)) // another sender has a window of its own
		gone(t, ws, 3)
		lost := new(RankLost)
		require.ErrorAs(t, <-ch, &lost)
		require.Equal(t, []int{3}, lost.Lost)
		for _, w := range ws[:3] {
			_, err := w.Barrier(ctx)
			require.ErrorAs(t, err, &lost)
		}
		require.Zero(t, holds(t, ws[1].Group, 0))
		fill(t, ctx, ws[0].Group, 1)

		// The receiver is lost.
		ch = blocked(ws[0].Group, 1)
		gone(t, ws, 1)
		require.ErrorAs(t, <-ch, &lost)
		require.Equal(t, []int{1}, lost.Lost)
		for _, r := range []int{0, 2} {
			_, err := ws[r].Barrier(ctx)
			require.ErrorAs(t, err, &lost)
		}

		// The group is aborted, the world is left.
		gs := make([]*Group, 3)
		errs := onAll([]*World{ws[0], ws[2]}, func(w *World) (err error) {
			gs[w.Rank()], err = w.Sub(ctx, nil, Options{})
			return err
		})
		require.Equal(t, []error{nil, nil}, errs)
		g := gs[0]
		fill(t, ctx, g, 2)
		ch = blocked(g, 2)
		gs[2].Abort("no more")
		require.ErrorIs(t, <-ch, ErrFailed)
		fill(t, ctx, ws[0].Group, 2)
		ch = blocked(ws[0].Group, 2)
		require.NoError(t, ws[0].Close())
		require.ErrorIs(t, <-ch, ErrClosed)
	})
}

// TestWindowBooks gives frames to a group by hand: messages given up in the middle, of a version that is over, of one that
// was replaced, and lost ones leave no hole in the window.
func TestWindowBooks(t *testing.T) {
	w := worlds(t, 2, Config{})[0]
	p := &w.p2p
	part := func(inc uint32, tag uint32, sent uint64, off, n, total int) {
		f := &device.Frame{Payload: make([]byte, n)}
		f.Inc, f.Tag, f.Seq, f.Offset, f.Total, f.Length, f.Version = inc, tag, sent, uint64(off), uint64(total), uint32(n), 5
		w.p2pFrame(1, f)
	}
	flag := func(inc uint32, flags uint8, sent, taken uint64) {
		f := &device.Frame{}
		f.Inc, f.Flags, f.Seq, f.Completed = inc, flags, sent, taken
		w.p2pFrame(1, f)
	}
	taken := func() uint64 { in := &p.flows[1].in; return in.sent - in.held }
	const c = messageCost
	part(1, 1, 100+c, 0, 60, 100)
	require.EqualValues(t, 100+c, holds(t, w.Group, 1))
	flag(1, p2pCancel, 100+c, 0)
	part(1, 1, 100+c, 60, 40, 100) // its rest does not come
	require.Zero(t, holds(t, w.Group, 1))
	require.Empty(t, p.in)
	require.EqualValues(t, 100+c, taken())

	part(1, 1, 200+2*c, 0, 60, 100)
	part(1, 2, 230+3*c, 0, 30, 30) // another one begins, under another tag
	require.EqualValues(t, 30+c, holds(t, w.Group, 1))
	require.EqualValues(t, 200+2*c, taken())
	part(1, 2, 1230+5*c, 0, 30, 30) // one between them has got lost
	require.EqualValues(t, 60+2*c, holds(t, w.Group, 1))
	require.EqualValues(t, 1170+3*c, taken())

	p.resume(6, p.at.Load())
	require.Zero(t, holds(t, w.Group, 1))
	part(1, 2, 1330+6*c, 0, 100, 100) // of a version that is over
	require.Zero(t, holds(t, w.Group, 1))
	require.EqualValues(t, 1330+6*c, taken())

	p.min = 0
	part(1, 3, 1430+7*c, 0, 100, 100)
	part(1, 3, 1530+8*c, 0, 50, 100)
	part(2, 3, 100+c, 0, 100, 100) // the next incarnation
	require.EqualValues(t, 100+c, holds(t, w.Group, 1))
	require.Len(t, p.in[p2pKey{1, 3}], 2, "whole ones of the dead can be received")
	part(1, 3, 1630+9*c, 0, 100, 100)
	require.Len(t, p.in[p2pKey{1, 3}], 2)
	flag(2, p2pAsk, 100+c, 0)
	require.True(t, p.flows[1].in.asked)
	for range 2 {
		require.NoError(t, w.Recv(context.Background(), U8(make([]byte, 100)), 1, 3))
	}
	require.Zero(t, holds(t, w.Group, 1))
	require.False(t, p.flows[1].in.asked)
	require.EqualValues(t, 100+c, taken())

	out := &p.flows[1].out
	out.inc, out.sent = 4, 1000
	flag(3, p2pCredit, 0, 500)
	require.Zero(t, out.taken, "of another process")
	flag(4, p2pCredit, 0, 500)
	flag(4, p2pCredit, 0, 400)
	flag(4, p2pCredit, 0, 1001)
	require.EqualValues(t, 500, out.taken)
}

func TestPlainReasons(t *testing.T) {
	text := fmt.Sprintf("deadlock: rank 0 waits in group 1 op %d for rank 1, rank 1 waits in group 1 op %d for rank 2, rank 2 waits in group 1 op 17 for rank 0",
		waitSeq(1<<40+5, 1<<32-1, false), waitSeq(3, 7, true))
	require.Equal(t, "deadlock: rank 0 waits in group 1 in a receive with tag 4294967295 for rank 1, "+
		"rank 1 waits in group 1 in a send with tag 7 for rank 2, rank 2 waits in group 1 op 17 for rank 0", plain(text))
}

// rejoined lets a process take a free slot at a Boundary of the others.
func rejoined(t testing.TB, ctx context.Context, ws []*World, r int, cfg Config) {
	t.Helper()
	for _, w := range ws {
		if w != nil && w.overErr() == nil {
			cfg.Peers = append(cfg.Peers, w.Invite())
		}
	}
	cfg.Rank, cfg.Rejoin = r, true
	ws[r] = nil
	in := make(chan error, 1)
	var w *World
	go func() {
		var err error
		w, err = Join(ctx, cfg)
		in <- err
	}()
	all(t, ws, func(w *World) error {
		for ctx.Err() == nil {
			p, err := w.Boundary(ctx, nil)
			if err != nil || len(p.Joined) > 0 {
				return err
			}
			time.Sleep(time.Millisecond)
		}
		return ctx.Err()
	})
	require.NoError(t, <-in)
	ws[r] = w
	t.Cleanup(func() { _ = w.Close() })
}

// TestWindowAfterRejoin: neither what the old process of a rank has not received nor what it has sent takes room of the new
// one's windows, in both directions, again and again.
func TestWindowAfterRejoin(t *testing.T) {
	for _, mode := range []Mode{Continue, Raise} {
		t.Run(mode.String(), func(t *testing.T) {
			links(t, func(t *testing.T, cfg Config) {
				cfg.Options.Mode, cfg.Options.Timeout = mode, 10*time.Second
				cfg.HeartbeatLimit = 200 * time.Millisecond
				ws := worlds(t, 3, cfg)
				ctx := within(t, 60*time.Second)
				for range 3 {
					fill(t, ctx, ws[0].Group, 1)
					fill(t, ctx, ws[1].Group, 0)
					full := make(chan error, 1)
					go func() { full <- ws[0].Send(ctx, U8([]byte{1}), 1, 1) }()
					stuck(t, ws[0].Group, 1)
					require.Eventually(t, func() bool { // all of it has come, to the end
						p := &ws[0].p2p
						p.mu.Lock()
						defer p.mu.Unlock()
						in := &p.flows[1].in
						return in.held == Window && in.open == nil
					}, 10*time.Second, time.Millisecond)
					gone(t, ws, 1)
					require.ErrorAs(t, <-full, new(*RankLost))
					rejoined(t, ctx, ws, 1, cfg)
					all(t, ws, func(w *World) error {
						if _, err := w.Barrier(ctx); err != nil && !errors.As(err, new(*RankLost)) {
							return err
						}
						return nil
					})
					if mode == Continue { // what the dead has sent is there
						for range 4 {
							require.NoError(t, ws[0].Recv(ctx, U8(make([]byte, Window/4-messageCost)), 1, 1))
						}
					}
					all(t, ws[:2], func(w *World) error {
						other := 1 - w.Rank()
						b := make([]byte, Window/4-messageCost)
						for i := range 4 {
							if err := w.Send(ctx, U8(b), other, uint32(i)); err != nil {
								return err
							}
						}
						for i := range 4 {
							if err := w.Recv(ctx, U8(b), other, uint32(i)); err != nil {
								return err
							}
						}
						return nil
					})
					require.Zero(t, holds(t, ws[0].Group, 1))
					require.Zero(t, holds(t, ws[1].Group, 0))
				}
			})
		})
	}
}

// TestDeadlockWithMessages: a ring of a barrier, a receive and a send names each in words.
func TestDeadlockWithMessages(t *testing.T) {
	ws := worlds(t, 3, Config{})
	ctx := within(t, 60*time.Second)
	gs := make([][]*Group, 3)
	for _, err := range onAll(ws, func(w *World) error {
		for _, limit := range []time.Duration{300 * time.Millisecond, 30 * time.Second} {
			g, err := w.Sub(ctx, nil, Options{Timeout: limit})
			if err != nil {
				return err
			}
			gs[w.Rank()] = append(gs[w.Rank()], g)
		}
		return nil
	}) {
		require.NoError(t, err)
	}
	fill(t, ctx, gs[1][1], 2)
	for _, err := range onAll(ws, func(w *World) (err error) {
		switch g := gs[w.Rank()]; w.Rank() {
		case 0:
			_, err = g[0].Barrier(ctx)
		case 1:
			err = g[1].Send(ctx, U8([]byte{1}), 2, 4)
		case 2:
			err = g[1].Recv(ctx, U8([]byte{1}), 0, 5)
		}
		return err
	}) {
		require.ErrorIs(t, err, ErrDeadlock)
		require.ErrorContains(t, err, "in a receive with tag 5 for rank 0")
		require.NotContains(t, err.Error(), "op 4")
	}
}

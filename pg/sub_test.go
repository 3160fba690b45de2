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

// hold stops the loop of a world until the function that it returns is called.
func hold(w *World) (goOn func()) {
	in, out := make(chan struct{}), make(chan struct{})
	w.agent.Do(func() { close(in); <-out })
	<-in
	return func() { close(out) }
}

// TestSubGivenUp: a rank gives Sub up after it has taken part, so that the others make the group. It fails for good on
// them, and nobody is lost.
func TestSubGivenUp(t *testing.T) {
	for _, mode := range []Mode{Continue, Raise} {
		t.Run(mode.String(), func(t *testing.T) {
			links(t, func(t *testing.T, cfg Config) {
				ws := worlds(t, 4, cfg)
				ctx := within(t, 60*time.Second)
				ps := make([]*Group, 4)
				all(t, ws, func(w *World) (err error) {
					ps[w.Rank()], err = w.Sub(ctx, nil, Options{SlotBytes: 8 << 10, Mode: mode, Timeout: 20 * time.Second})
					if err == nil {
						_, err = ps[w.Rank()].Barrier(ctx)
					}
					return err
				})
				_ = ws[3].Close() // so that the version is not that of the founding
				ws = ws[:3]
				all(t, ws, func(w *World) error {
					for {
						res, err := ps[w.Rank()].Barrier(ctx)
						if err != nil && !errors.As(err, new(*RankLost)) {
							return err
						}
						if err == nil && res.Active.Len() == 3 {
							return nil
						}
					}
				})
				// Rank 0 gives up at once. It says so when its loop goes on: until then the others make the group.
				goOn := hold(ws[0])
				over, cancel := context.WithCancel(ctx)
				cancel()
				_, err := ps[0].Sub(over, []int{0, 1, 2}, Options{SlotBytes: 8 << 10, Timeout: 10 * time.Second})
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, ErrClosed)
				gs := make([]*Group, 3)
				all(t, ws[1:], func(w *World) (err error) {
					gs[w.Rank()], err = ps[w.Rank()].Sub(ctx, []int{0, 1, 2}, Options{SlotBytes: 8 << 10, Timeout: 10 * time.Second})
					return err
				})
				goOn()
				begin := time.Now()
				for _, err := range onAll(ws[1:], func(w *World) error { _, err := gs[w.Rank()].Barrier(ctx); return err }) {
					require.ErrorIs(t, err, ErrFailed)
					require.ErrorContains(t, err, "could not be made there: closed: rank 0 gave up making a group")
				}
				require.Less(t, time.Since(begin), 5*time.Second)
				for _, err := range onAll(ws[1:], func(w *World) error { _, err := ps[w.Rank()].Barrier(ctx); return err }) {
					require.ErrorIs(t, err, ErrFailed) // as after any operation that one gave up
				}
				for _, err := range onAll(ws[1:], func(w *World) error { return gs[w.Rank()].Close(ctx) }) {
					require.ErrorIs(t, err, ErrFailed)
				}
				all(t, ws, func(w *World) error {
					res, err := w.Barrier(ctx)
					if err == nil && res.Active.Len() != 3 {
						err = fmt.Errorf("active: %v", res.Active.Slots())
					}
					return err
				})
				nothingWithout(t, ws[0])
			})
		})
	}
}

// nothingWithout: no group waits to be failed for this rank.
func nothingWithout(t *testing.T, w *World) {
	require.Eventually(t, func() bool {
		var n int
		done := make(chan struct{})
		w.agent.Do(func() { n = len(w.without); close(done) })
		<-done
		return n == 0
	}, 10*time.Second, time.Millisecond)
}

// TestSubGivenUpBefore: as TestSubGivenUp, but the others do not come to it before the parent has failed: no group is made.
func TestSubGivenUpBefore(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		ws := worlds(t, 3, cfg)
		ctx := within(t, 60*time.Second)
		ps := make([]*Group, 3)
		all(t, ws, func(w *World) (err error) {
			ps[w.Rank()], err = w.Sub(ctx, nil, Options{SlotBytes: 8 << 10})
			return err
		})
		over, cancel := context.WithCancel(ctx)
		cancel()
		_, err := ps[0].Sub(over, nil, Options{SlotBytes: 8 << 10})
		require.ErrorIs(t, err, context.Canceled)
		nothingWithout(t, ws[0])
		for _, err := range onAll(ws[1:], func(w *World) error {
			_, err := ps[w.Rank()].Sub(ctx, nil, Options{SlotBytes: 8 << 10})
			return err
		}) {
			require.ErrorIs(t, err, ErrFailed)
			require.ErrorContains(t, err, "making a group (operation 1): context canceled")
		}
		all(t, ws, func(w *World) error { _, err := w.Barrier(ctx); return err })
		require.Len(t, ws[1].Groups(), 2)
		a, _ := ws[0].Active()
		require.Equal(t, 3, a.Len())
	})
}

func TestChildIDs(t *testing.T) {
	w := &World{}
	w.identity.world = [16]byte{1, 2, 3}
	seen := map[uint64]bool{0: true, worldID: true}
	put := func(id uint64) {
		require.False(t, seen[id])
		require.Less(t, id, uint64(1<<63))
		seen[id] = true
	}
	for _, parent := range []uint64{worldID, 2, 1 << 62} {
		c := &Group{w: w, id: parent}
		r := &Group{w: w, id: parent, opts: Options{Mode: Raise}}
		for seq := range uint64(300) {
			put(c.childID(seq+1, 7))
			require.Equal(t, c.childID(seq+1, 7), c.childID(seq+1, 8)) // redone
			for epoch := range uint64(30) {
				put(r.childID(seq+1, epoch+1))
			}
		}
	}
	w.identity.world[15]++
	put((&Group{w: w, id: worldID}).childID(1, 7))
}

// TestSubTooSlow: more views come while a rank makes a group than it remembers. It cannot know the group's versions, so
// the group fails for good.
func TestSubTooSlow(t *testing.T) {
	ctx := within(t, 60*time.Second)
	ws := worlds(t, 4, Config{ArenaBytes: 16 << 20, Options: Options{SlotBytes: 64 << 10, Timeout: 20 * time.Second}})
	o := Options{SlotBytes: 4096, Timeout: 10 * time.Second}
	views := func(n int) {
		for range n {
			all(t, ws[:2], func(w *World) error {
				g, err := w.Groups()[1].Sub(ctx, nil, o)
				if err != nil {
					return err
				}
				g.Abort("so that a view comes")
				for err == nil {
					_, err = g.Barrier(ctx)
				}
				_ = g.Close(ctx)
				return nil
			})
		}
	}
	all(t, ws, func(w *World) error { _, err := w.Sub(ctx, []int{0, 1}, o); return err })
	views(keepPast + 6) // before: that is nothing to the group

	gs := make([]*Group, 4)
	var b birth
	var p proposed
	opts := o.withDefaults(0)
	slots := []int{0, 1, 2, 3}
	all(t, ws, func(w *World) (err error) {
		if w.Rank() == 3 {
			b, p, err = w.agree(ctx, slots, opts)
		} else {
			gs[w.Rank()], err = w.Sub(ctx, nil, o)
		}
		return err
	})
	_ = ws[2].Close()
	require.Eventually(t, func() bool { a, _ := gs[0].Active(); return a.Len() == 3 }, 10*time.Second, time.Millisecond)
	views(keepPast + 6)
	g, err := ws[3].create(ctx, b, slots, opts, p)
	require.Nil(t, g)
	require.ErrorContains(t, err, "rank 3 was too slow")
	begin := time.Now()
	for _, err := range onAll(ws[:2], func(w *World) error { _, err := gs[w.Rank()].Barrier(ctx); return err }) {
		require.ErrorIs(t, err, ErrFailed)
		require.ErrorContains(t, err, "could not be made there: rank 3 was too slow")
	}
	require.Less(t, time.Since(begin), 5*time.Second)

	ws = []*World{ws[0], ws[1], ws[3]}
	all(t, ws, func(w *World) error { // and others are made, in a version of long ago
		g, err := w.Sub(ctx, []int{0, 1, 3}, o)
		if err == nil {
			_, err = g.Barrier(ctx)
		}
		return err
	})
}

// TestSubOptions: what makes no sense is refused by name, before anything is issued.
func TestSubOptions(t *testing.T) {
	ws := worlds(t, 2, Config{ArenaBytes: 4 << 20, Options: Options{SlotBytes: 64 << 10}})
	ctx := within(t, 30*time.Second)
	for _, c := range []struct {
		opts Options
		want string
	}{
		{Options{SlotBytes: 1 << 62}, "Options.SlotBytes is 4611686018427387904: at most"},
		{Options{SlotBytes: 1<<63 - 1}, "Options.SlotBytes is 9223372036854775807: at most"},
		{Options{SlotBytes: -5}, "Options.SlotBytes is -5: it cannot be negative"},
		{Options{Depth: 1 << 51}, "Options.Depth is 2251799813685248: at most"},
		{Options{Depth: maxDepth/2 + 1, Pairs: true}, "Options.Depth is 513: at most 1024 can be, or 512 with Pairs"},
		{Options{Depth: -3}, "Options.Depth is -3: it cannot be negative"},
		{Options{Timeout: -1}, "Options.Timeout is -1ns: it cannot be negative"},
		{Options{Mode: 9}, "Options.Mode is 9"},
	} {
		for _, err := range onAll(ws, func(w *World) error { _, err := w.Sub(ctx, nil, c.opts); return err }) {
			require.ErrorAs(t, err, new(*collectives.ErrBadCall))
			require.ErrorContains(t, err, "new group: "+c.want)
		}
	}
	// As much as may be asked for, and is not there.
	for _, opts := range []Options{{SlotBytes: maxSlotBytes, Depth: maxDepth / 2, Pairs: true}, {SlotBytes: 4096, Depth: maxDepth}} {
		for _, err := range onAll(ws, func(w *World) error { _, err := w.Sub(ctx, nil, opts); return err }) {
			require.ErrorContains(t, err, "no room for a group")
		}
	}
	all(t, ws, func(w *World) error { _, err := w.Barrier(ctx); return err })
	require.Len(t, ws[0].Groups(), 1)
}

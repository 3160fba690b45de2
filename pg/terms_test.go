package pg

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

// TestTermsDiffer: a founder or a newcomer that was started with other terms than the world is told which, and by whom;
// a newcomer that was given none takes over the members'.
func TestTermsDiffer(t *testing.T) {
	st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	ctx := within(t, 60*time.Second)
	world := Config{Size: 2, Capacity: 3, Retain: 4096, Options: Options{Depth: 2, SlotBytes: 16 << 10, Mode: Raise, Timeout: 20 * time.Second}}
	ws := make([]*World, 3)
	// begin makes rank 1 the first: what it has counts.
	begin := func(st rendezvous.Store) chan error {
		others := make(chan error, 1)
		go func() {
			cfg := world
			cfg.Rank, cfg.Store = 1, st
			var err error
			ws[1], err = Join(ctx, cfg)
			others <- err
		}()
		require.Eventually(t, func() bool {
			b, err := peek(ctx, rendezvous.Prefix(st, "serry/world"), "world")
			return err == nil && b != nil
		}, 10*time.Second, time.Millisecond)
		return others
	}
	join := func(st rendezvous.Store, r int, cfg Config) (*World, error) {
		cfg.Rank, cfg.Store = r, st
		return Join(ctx, cfg)
	}
	for i, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Options.Depth = 0 }, "SERRY_DEPTH (Config.Options.Depth) is 4 here, on rank 0, and 2 in the world that rank 1 began: give all ranks the same"},
		{func(c *Config) { c.Retain = 0 }, "SERRY_RETAIN_BYTES (Config.Retain) is 65536 here, on rank 0, and 4096 in the world that rank 1 began"},
		{func(c *Config) { c.Retain = -1 }, "SERRY_RETAIN_BYTES (Config.Retain) is -1 here, on rank 0, and 4096 in"},
		{func(c *Config) { c.Options.SlotBytes = 32 << 10 }, "Config.Options.SlotBytes is 32768 here, on rank 0, and 16384 in"},
		{func(c *Config) { c.Options.Timeout = time.Second }, "Config.Options.Timeout is 1s here, on rank 0, and 20s in"},
		{func(c *Config) { c.Options.Mode = Continue }, "Config.Options.Mode is continue here, on rank 0, and raise in"},
		{func(c *Config) { c.Options.Pairs = true }, "Config.Options.Pairs is true here, on rank 0, and false in"},
		{func(c *Config) { c.Options.ManualResume = true }, "Config.Options.ManualResume is true here, on rank 0, and false in"},
		{func(c *Config) { c.Size = 3 }, "this rank was started for a world of 3 (capacity 3), the others for 2 (capacity 3): give all the same"},
		{func(c *Config) { c.ArenaBytes = 64 << 10 }, "the world's slots take 114688 bytes, the arena has 65536: raise SERRY_SHM_BYTES or use smaller slots"},
		{func(c *Config) { c.ArenaBytes = -1 }, "Config.ArenaBytes is -1: it cannot be negative"},
		{func(c *Config) { c.HeartbeatLimit = -1 }, "Config.HeartbeatLimit is -1ns: it cannot be negative"},
		{func(c *Config) { c.HeartbeatEvery = -1 }, "Config.HeartbeatEvery is -1ns: it cannot be negative"},
		{func(c *Config) { c.Options.Timeout = -1 }, "Config.Options.Timeout is -1ns: it cannot be negative"},
		{func(c *Config) { c.Options.SlotBytes = -1 }, "Config.Options.SlotBytes is -1: it cannot be negative"},
		{func(c *Config) { c.Options.SlotBytes = 1 << 62 }, "Config.Options.SlotBytes is 4611686018427387904: at most 1099511627776 can be"},
		{func(c *Config) { c.Options.Depth = -1 }, "Config.Options.Depth is -1: it cannot be negative"},
		{func(c *Config) { c.Options.Depth = 1 << 32 }, "Config.Options.Depth is 4294967296: at most 1024 can be"},
		{func(c *Config) { c.Options.Mode = 9 }, "Config.Options.Mode is 9"},
		{func(c *Config) { c.Links = "shm" }, `Config.Links is "shm": it is auto or tcp`},
	} {
		st, err := rendezvous.Open(ctx, fmt.Sprintf("mem://%s-%d-%d", t.Name(), i, time.Now().UnixNano()))
		require.NoError(t, err)
		others := begin(st)
		cfg := world
		c.change(&cfg)
		_, err = join(st, 0, cfg)
		require.ErrorAs(t, err, new(*JoinError))
		require.ErrorContains(t, err, c.want)
		select { // who waits for it is told at once
		case err = <-others:
			require.ErrorContains(t, err, "rank 0 does not take part: "+c.want)
		case <-time.After(5 * time.Second):
			t.Fatal("rank 1 waits for rank 0, which does not come")
		}
	}
	others := begin(st)
	cfg := world
	cfg.NoChecksum = true // may differ
	ws[0], err = join(st, 0, cfg)
	require.NoError(t, err)
	require.NoError(t, <-others)
	defer ws[0].Close()
	defer ws[1].Close()

	_, err = join(st, -1, Config{Rejoin: true, Options: Options{Depth: 3}})
	require.ErrorContains(t, err, "SERRY_DEPTH (Config.Options.Depth) is 3 here, on rank -1, and 2 in the world that rank 1 began")
	_, err = Join(ctx, Config{Rank: -1, Rejoin: true, Peers: []string{ws[0].Invite()}, Retain: 5})
	require.ErrorContains(t, err, "SERRY_RETAIN_BYTES (Config.Retain) is 5 here")
	rejoined(t, ctx, ws, 2, Config{Options: Options{Depth: 2}})
	require.Equal(t, ws[0].Options(), ws[2].Options())
	require.Equal(t, 4096, ws[2].cfg.Retain)
}

// TestSubOptionsDiffer: no group is made, and both ranks are told.
func TestSubOptionsDiffer(t *testing.T) {
	ws := worlds(t, 2, Config{})
	ctx := within(t, 30*time.Second)
	for _, o := range []Options{{Mode: Raise}, {Timeout: time.Second}, {SlotBytes: 8 << 10}, {Depth: 2}, {Pairs: true}, {ManualResume: true}} {
		for r, err := range onAll(ws, func(w *World) error {
			opts := Options{}
			if w.Rank() == 1 {
				opts = o
			}
			g, err := w.Sub(ctx, nil, opts)
			require.Nil(t, g)
			return err
		}) {
			require.ErrorIs(t, err, ErrMismatch)
			require.ErrorContains(t, err, fmt.Sprintf("rank %d makes a group of other slots or with other Options than rank %d", 1-r, r))
		}
		require.Len(t, ws[0].Groups(), 1)
	}
	all(t, ws, func(w *World) error { _, err := w.Barrier(ctx); return err })
}

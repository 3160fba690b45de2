package bench

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"

	"github.com/stretchr/testify/require"
)

func TestAllReduce(t *testing.T) {
	for _, c := range []AllReduceConfig{
		{Ranks: 2, Bytes: 8, Links: "auto", N: 200},
		{Ranks: 3, Bytes: 4096, Links: "tcp", N: 20},
		{Ranks: 1, Bytes: 3 << 20, Links: "auto", N: 5},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.Links, c.Ranks), func(t *testing.T) {
			r, err := AllReduce(t.Context(), options(t), c)
			clean(t, r, err)
			for _, name := range []string{rowApart, rowInPlace, rowBack} {
				require.EqualValues(t, c.Ranks*c.N, r.row(t, name).Count)
			}
			if c.Bytes == 8 {
				require.Len(t, r.Bars, 1)
				require.Equal(t, r.Bars[0].OK, r.Bars[0].Measured <= time.Microsecond)
			} else {
				require.Empty(t, r.Bars)
			}
		})
	}
}

func TestEP(t *testing.T) {
	c := EPDefaults()
	c.N = 50
	r, err := EP(t.Context(), options(t), c)
	clean(t, r, err)
	require.EqualValues(t, 200, r.row(t, rowStep).Count)
	require.Len(t, r.Bars, 1)
	c = EPConfig{Ranks: 3, Links: "tcp", N: 5, Shape: shape{Tokens: 3, Hidden: 5, TopK: 4, Experts: 5, Replicas: 2}}
	r, err = EP(t.Context(), options(t), c)
	clean(t, r, err)
	require.Empty(t, r.Bars)
}

func TestIdle(t *testing.T) {
	c := IdleDefaults()
	c.For = 100 * time.Millisecond
	r, err := Idle(t.Context(), options(t), c)
	clean(t, r, err)
	require.Len(t, r.Notes, 5)
}

func TestJoin(t *testing.T) {
	c := JoinDefaults()
	c.N = 2
	r, err := Join(t.Context(), options(t), c)
	clean(t, r, err)
	require.EqualValues(t, 2, r.row(t, "Join to first step").Count)
	require.GreaterOrEqual(t, r.row(t, "process start to first step").Max, r.row(t, "Join to first step").Max)
}

func TestFailoverNeedsPoints(t *testing.T) {
	if faultpoint.Enabled {
		t.Skip("this binary has them")
	}
	_, err := Failover(t.Context(), options(t), FailoverDefaults())
	require.ErrorIs(t, err, ErrNoFaultpoints)
	require.ErrorContains(t, err, "go build -tags faultpoint -o serry-faultpoint ./cmd/serry, then --faultpoint")
}

// Each error names the flag, its value and what is wanted.
func TestBadNumbersAreRefused(t *testing.T) {
	o, ctx := options(t), context.Background()
	allReduce := func(change func(*AllReduceConfig)) error {
		c := AllReduceDefaults()
		change(&c)
		_, err := AllReduce(ctx, o, c)
		return err
	}
	for want, err := range map[string]func() error{
		"--bytes 9: want a multiple of 8":      func() error { return allReduce(func(c *AllReduceConfig) { c.Bytes = 9 }) },
		"--ranks 0: want a number from 1":      func() error { return allReduce(func(c *AllReduceConfig) { c.Ranks = 0 }) },
		"--ranks 9999: want a number from 1":   func() error { return allReduce(func(c *AllReduceConfig) { c.Ranks = 9999 }) },
		"--n -3: want a number from 1":         func() error { return allReduce(func(c *AllReduceConfig) { c.N = -3 }) },
		"--links rope: want auto or tcp":       func() error { return allReduce(func(c *AllReduceConfig) { c.Links = "rope" }) },
		"--topk 17: want a number from 1":      func() error { c := EPDefaults(); c.Shape.TopK = 17; _, err := EP(ctx, o, c); return err },
		"--tokens 0: want a number from 1":     func() error { c := EPDefaults(); c.Shape.Tokens = 0; _, err := EP(ctx, o, c); return err },
		"--replicas 5: want a number from 1":   func() error { c := EPDefaults(); c.Shape.Replicas = 5; _, err := EP(ctx, o, c); return err },
		"--ranks 2: want a number from 3":      func() error { c := JoinDefaults(); c.Ranks = 2; _, err := Join(ctx, o, c); return err },
		"--replicas 1: want a number from 2":   func() error { c := JoinDefaults(); c.Shape.Replicas = 1; _, err := Join(ctx, o, c); return err },
		"--for 0s: want a time from 1ms":       func() error { _, err := Idle(ctx, o, IdleConfig{Ranks: 1, Links: "auto"}); return err },
		"--kills 0: want a number from 1":      func() error { c := FailoverDefaults(); c.Kills = 0; return c.check() },
		"--pace -1s: want a time from 0 to 1s": func() error { c := FailoverDefaults(); c.Pace = -time.Second; return c.check() },
		`--points "join.hello": want points`:   func() error { c := FailoverDefaults(); c.Points = []string{"join.hello"}; return c.check() },
		"--part 2: want more than 0":           func() error { _, err := All(ctx, o, 2); return err },
		"--part NaN: want more than 0":         func() error { _, err := All(ctx, o, math.NaN()); return err },
	} {
		var usage *UsageError
		require.ErrorAs(t, err(), &usage, want)
		require.ErrorContains(t, usage, want)
		require.NotContains(t, usage.Error(), "\n", "the only one")
	}
}

// A rank that cannot start ends the measurement with what it said.
func TestRankFails(t *testing.T) {
	c, o := AllReduceDefaults(), options(t)
	o.Profile = "/nowhere/at/all"
	_, err := AllReduce(t.Context(), o, c)
	require.ErrorContains(t, err, "ended")
	require.ErrorContains(t, err, o.Profile)
}

func TestAll(t *testing.T) {
	rs, err := All(t.Context(), options(t), 0.01)
	require.NoError(t, err)
	var names []string
	for _, r := range rs {
		names = append(names, r.Name)
		require.Equal(t, r.Name == "failover" && !faultpoint.Enabled, r.Skipped != "", r.Name)
		clean(t, r, nil)
	}
	require.Equal(t, []string{"allreduce", "ep", "failover", "failover", "failover", "join", "idle"}, names)
}

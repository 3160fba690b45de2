package collectives

import (
	"fmt"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every reachable state of the protocol on shared words is visited here: two or three ranks of one host run two operations
// one after the other, the second in the slot of the first (seal, propose, swap, publish, sleep, wake, reuse), while a rank
// dies before any step, or is excluded as one that was stopped and goes on at any time, or a change closes the word for
// nothing; the survivors' loops close, install and reopen, step by step as well.
//
// It is the production code that runs (stThread). A state is the shared words, the bytes of the slots, and for each thread a
// hash of what its call depends on; what cannot make a difference any more is left out of it, so that somebody who looks
// again and sees the same is in the same state. In every state it is checked that
//
//   - what was returned is what the reported set makes of its contributions, and the set is that of its version (P2, P3),
//   - living members of the newest view have returned the same (P1), and nothing that a cut leaves to a later version (P3),
//   - nobody returns from an operation that others had done again when he last looked (P4),
//   - the area of a rank changes only while that rank runs (P4),
//   - survivors who have not returned can still move: nobody sleeps for ever (P5), and no state comes back on a path, so
//     that every path ends (P5).
//
// A sleeper is woken by others only, never by the clock. All contributions lie whole in slots, and nothing goes over links.
//
// The complete explorations of three ranks with faults are too many states to visit in minutes. There all schedules are
// visited that set a thread aside at most so many times while it could go on (what it may do where it sleeps or ends is
// free, and so are faults): mistakes of this kind need few.

// stConfigs are the explorations of the ordinary run, and with the tag "long" of the long one.
func stConfigs() []stConfig {
	two := []Kind{AllReduce, AllReduce}
	cs := []stConfig{
		{ranks: 2, depth: 1, ops: two, switches: -1},
		{ranks: 2, depth: 1, ops: two, switches: 1, faults: 1, stop: true},
		{ranks: 2, depth: 1, ops: two, switches: 2, faults: 1, stop: true},
		{ranks: 2, depth: 1, ops: two, switches: -1, fine: true},
		{ranks: 2, depth: 1, ops: two, switches: -1, faults: 1, crash: true},
		{ranks: 2, depth: 1, ops: two, switches: 0, faults: 1, empty: true},
		{ranks: 2, depth: 1, ops: []Kind{Barrier, AllReduce}, switches: -1},
		{ranks: 3, depth: 1, ops: two, switches: 0, faults: 1, crash: true},
		{ranks: 3, depth: 1, ops: two, switches: 0, faults: 1, stop: true},
		{ranks: 2, depth: 2, ops: append(two, AllReduce), switches: 1, faults: 1, crash: true, ahead: true},
	}
	if testing.Short() {
		return cs[:2]
	}
	if long {
		cs = append(cs,
			stConfig{ranks: 2, depth: 1, ops: two, switches: -1, faults: 1, stop: true, limit: 20_000_000},
			stConfig{ranks: 2, depth: 1, ops: two, switches: 2, faults: 1, stop: true, all: true, fine: true},
			stConfig{ranks: 2, depth: 1, ops: two, switches: 2, faults: 1, empty: true},
			stConfig{ranks: 2, depth: 2, ops: append(two, AllReduce), switches: -1, ahead: true},
			stConfig{ranks: 3, depth: 1, ops: two, switches: 2},
			stConfig{ranks: 3, depth: 1, ops: two, switches: -1, limit: 20_000_000},
			stConfig{ranks: 3, depth: 1, ops: two, switches: 1, faults: 1, crash: true},
			stConfig{ranks: 3, depth: 1, ops: two, switches: 1, faults: 1, stop: true},
			stConfig{ranks: 3, depth: 1, ops: two, switches: 0, faults: 2, crash: true, stop: true},
		)
	}
	return cs
}

// String names an exploration by what may happen in it.
func (c stConfig) String() string {
	s := fmt.Sprintf("%d ranks, %d operations", c.ranks, len(c.ops))
	if c.ops[0] == Barrier {
		s += ", a barrier first"
	}
	if c.ahead {
		s += fmt.Sprintf(", %d at once", c.depth)
	}
	for _, f := range []struct {
		may  bool
		name string
	}{{c.crash, "crash"}, {c.stop, "stop"}, {c.empty, "change for nothing"}} {
		if f.may {
			s += ", " + f.name
		}
	}
	if c.faults > 1 {
		s += fmt.Sprintf(" (%d faults)", c.faults)
	}
	if c.fine {
		s += ", fine"
	}
	if c.switches >= 0 {
		s += fmt.Sprintf(", at most %d switches", c.switches)
	}
	return s
}

func TestStates(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	for _, cfg := range stConfigs() {
		t.Run(cfg.String(), func(t *testing.T) {
			rep := explore(cfg)
			t.Log(rep)
			if rep.bad != "" {
				t.Fatal(rep.bad)
			}
			require.True(t, rep.complete || cfg.limit > 0)
			require.Greater(t, rep.states, 1000)
		})
	}
}

// TestStatesAreTheSame: an exploration has no chance in it, and what stops it is told with the way there.
func TestStatesAreTheSame(t *testing.T) {
	cfg := stConfig{ranks: 2, depth: 1, ops: []Kind{Barrier, Barrier}, switches: -1}
	a, b := explore(cfg), explore(cfg)
	require.Equal(t, a.states, b.states)
	require.Equal(t, a.edges, b.edges)
	require.True(t, a.complete)
	cfg.limit = 100
	require.False(t, explore(cfg).complete)
}

// TestNothingOfUseIsForgotten: what a thread's hash leaves out makes no difference to what paths come to.
func TestNothingOfUseIsForgotten(t *testing.T) {
	if testing.Short() {
		t.Skip("a matter of how states are told apart, not of the protocol")
	}
	two := []Kind{AllReduce, AllReduce}
	for _, cfg := range []stConfig{
		{ranks: 2, depth: 1, ops: two, switches: -1},
		{ranks: 2, depth: 1, ops: two, switches: 1, faults: 1, stop: true},
		{ranks: 2, depth: 1, ops: two, switches: 1, faults: 1, crash: true},
	} {
		less := explore(cfg)
		cfg.exact = true
		all := explore(cfg)
		t.Logf("%v: %d states instead of %d, %d ends", cfg, less.states, all.states, len(all.ends))
		require.Empty(t, less.bad+all.bad)
		require.True(t, cfg.faults == 0 || len(all.ends) > 10)
		for e := range all.ends {
			require.Contains(t, less.ends, e)
		}
		require.Len(t, less.ends, len(all.ends))
	}
}

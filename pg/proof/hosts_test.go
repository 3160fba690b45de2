package proof

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

// hostOf is where a rank is.
func hostOf(rank int) int { return rank / 2 }

// hosted puts ranks 0 and 1 on one host and 2 and 3 on another.
func hosted(hosts []*harness.Host) (where func(rank int) *harness.Host, opts func(rank int) []harness.Option) {
	where = func(rank int) *harness.Host { return hosts[hostOf(rank)] }
	return where, func(rank int) []harness.Option { return []harness.Option{where(rank).In()} }
}

func twoHosts(t *testing.T, args rankArgs) (*world, []*harness.Host) {
	hosts := harness.Hosts(t, 2)
	w := newWorld(t, args)
	where, opts := hosted(hosts)
	w.opts = opts
	w.Host = hostOf
	w.Edit = func(a *rankArgs) { a.Listen = where(a.Rank).IP }
	return w, hosts
}

// TestTwoHosts kills each rank at varied moments where two of four ranks do not share memory.
func TestTwoHosts(t *testing.T) {
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 3))
	for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
		for victim := range founders {
			at := time.Duration(rnd.IntN(80_000)) * time.Microsecond
			t.Run(fmt.Sprintf("%v/rank%d", mode, victim), func(t *testing.T) {
				w, _ := twoHosts(t, rankArgs{Links: "auto", Mode: mode, Seed: seed})
				for r := range founders {
					w.start(r, nil)
				}
				_, err := w.Live[0].Line("joined", 20*time.Second)
				require.NoError(t, err)
				time.Sleep(at)
				w.Kill(w.Live[victim])
				_, _ = w.Live[victim].Wait(5 * time.Second)
				time.Sleep(100 * time.Millisecond)
				count := w.finish(victim)
				t.Log(at, count)
			})
		}
	}
}

// TestHostIsLost kills all ranks of a host at once, or cuts it off: the half with the lowest rank goes on.
func TestHostIsLost(t *testing.T) {
	seed := seedOf(t)
	for _, cut := range []bool{false, true} {
		for lost := range 2 {
			if !cut && lost == 0 {
				continue // then the others have no quorum: as with cut
			}
			t.Run(fmt.Sprintf("cut%v/host%d", cut, lost), func(t *testing.T) {
				w, hosts := twoHosts(t, rankArgs{Links: "auto", Mode: pg.Continue, Seed: seed, Limit: 500 * time.Millisecond})
				for r := range founders {
					w.start(r, nil)
				}
				for _, p := range w.Live {
					_, err := p.Line("step 10", 20*time.Second)
					require.NoError(t, err)
				}
				began := time.Now()
				if cut {
					for _, r := range []int{2, 3} {
						w.Deed(w.Live[r], history.Cut, true)
						w.Deed(w.Live[r], history.Minority, false)
					}
					require.NoError(t, hosts[lost].Cut(true))
				} else {
					w.Kill(w.Live[2*lost])
					w.Kill(w.Live[2*lost+1])
				}
				if cut { // the half without rank 0
					for _, r := range []int{2, 3} {
						line, err := w.Live[r].Line("over ", 15*time.Second)
						require.NoError(t, err)
						require.Contains(t, line, "no quorum")
					}
					t.Log("no quorum after", time.Since(began))
				}
				for _, r := range []int{0, 1} {
					for _, gone := range []string{"lost=2", "lost=3"} {
						_, err := w.Live[r].Line(gone, 15*time.Second)
						require.NoError(t, err)
					}
				}
				t.Log("the others go on after", time.Since(began))
				time.Sleep(20 * time.Millisecond)
				count := w.finish(2, 3)
				t.Log(count)
			})
		}
	}
}

// TestStoppedOnAnotherHost stops a rank that no lower one shares a host with until it is excluded, and continues it: it is
// told that it was evicted, though nobody has a link to it any more.
func TestStoppedOnAnotherHost(t *testing.T) {
	t.Skip("open: it finds its links closed, and gives up with ErrNoQuorum after the heartbeat limit")
	w, _ := twoHosts(t, rankArgs{Links: "auto", Mode: pg.Continue, Seed: seedOf(t), Late: 500 * time.Millisecond})
	for r := range founders {
		w.start(r, nil)
	}
	_, err := w.Live[3].Line("begins", 20*time.Second)
	require.NoError(t, err)
	w.Stop(w.Live[3], true)
	_, err = w.Live[0].Line("lost=3", 20*time.Second)
	require.NoError(t, err)
	w.Cont(w.Live[3])
	line, err := w.Live[3].Line("over ", 20*time.Second)
	require.NoError(t, err)
	require.Contains(t, line, "evicted (slot 3")
	t.Log(w.finish(3))
}

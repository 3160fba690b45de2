package proof

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/chaos"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

// tagged is the test binary in which points can be armed: this one, or one that is built with the tag.
var tagged = sync.OnceValues(func() (string, error) {
	if faultpoint.Enabled {
		return os.Executable()
	}
	dir, err := os.MkdirTemp("", "proof")
	if err != nil {
		return "", err
	}
	exe := filepath.Join(dir, "proof.test")
	args := []string{"test", "-c", "-tags", "faultpoint", "-o", exe}
	if race {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go test -c -tags faultpoint: %w\n%s", err, out)
	}
	return exe, nil
})

func useBinary(t testing.TB) func(int) []harness.Option {
	exe, err := tagged()
	require.NoError(t, err)
	return func(int) []harness.Option {
		return []harness.Option{func(c *exec.Cmd) { c.Path, c.Args[0] = exe, exe }}
	}
}

// dying is one case of the matrix.
type dying struct {
	point  string
	nth    int // 0: to be drawn
	victim int
	first  []int // ranks that die before, at step 4
	joins  bool  // rank 3 dies before and comes back
	joiner bool  // the victim is the one that comes back
	stage  *stage
	mode   pg.Mode
}

// scene says how a point is reached by a victim (0 or 2). same: as by victim 0.
func scene(point string, victim int, hosts bool) (d dying, same bool) {
	d = dying{point: point, victim: victim, nth: 1}
	switch point {
	case faultpoint.AgentPromise, faultpoint.AgentCommit:
		d.first = []int{3}
	case faultpoint.AgentPrepare, faultpoint.AgentAccept: // the coordinator, who is the lowest that lives
		d.first = []int{3}
		if victim == 2 && hosts { // without the host of rank 0 there is no quorum
			d.victim, same = 0, true
		} else if victim == 2 {
			d.first = []int{0, 1}
		}
	case faultpoint.BoundaryStop:
		d.joins = true
	case faultpoint.JoinHello, faultpoint.JoinWelcome:
		d.joins, d.joiner, d.victim = true, true, 3
		same = victim == 2
	default:
		d.nth = 0
	}
	return d, same
}

// mayMiss says that the victim comes to the point only if it is not slower than the others: they overtake a coordinator that
// says nothing, and need no promise of everybody. It has one chance, the death of first.
func (d dying) mayMiss() bool {
	return slices.Contains([]string{faultpoint.AgentPrepare, faultpoint.AgentPromise, faultpoint.AgentAccept}, d.point)
}

// run runs one case: the victim comes to the point and dies there, or lives if it may miss it.
func (d dying) run(t testing.TB, seed uint64) (fired bool, count map[string]int) {
	w := d.stage.world(t, rankArgs{Mode: d.mode, Seed: seed})
	dead := slices.Clone(d.first)
	for r := range founders {
		w.start(r, func(a *rankArgs) {
			if r == d.victim && !d.joiner {
				a.Point, a.Nth = d.point, d.nth
			}
			if slices.Contains(d.first, r) || d.joins && r == 3 {
				a.DieAt = 4
			}
		})
	}
	dies := func(p *chaos.Member) {
		_, err := p.Wait(20 * time.Second)
		require.ErrorContains(t, err, "signal: killed", "%v: %s", d, p.Name)
	}
	for _, r := range d.first {
		dies(w.Live[r])
	}
	if d.joins {
		dies(w.Live[3])
		p := w.start(3, func(a *rankArgs) {
			a.Rejoin = true
			if d.joiner {
				a.Point, a.Nth = d.point, d.nth
			}
		})
		if d.joiner {
			dies(p)
			p = w.start(3, func(a *rankArgs) { a.Rejoin = true })
		}
		_, err := p.Line("joined", 20*time.Second)
		require.NoError(t, err, "the replacement")
	}
	fired = true
	switch {
	case d.joiner:
	case d.mayMiss():
		_, err := w.Live[d.victim].Wait(5 * time.Second)
		if fired = err != nil && strings.Contains(err.Error(), "signal: killed"); fired {
			dead = append(dead, d.victim)
		}
	default:
		dies(w.Live[d.victim])
		dead = append(dead, d.victim)
	}
	time.Sleep(30 * time.Millisecond)
	count = w.finish(dead...)
	return fired, count
}

// runStopped stops the victim at the point until the others have gone on without it, and continues it: what it does then
// changes nothing for them, and its next call says that it is out.
func (d dying) runStopped(t testing.TB, seed uint64) (count map[string]int) {
	w := d.stage.world(t, rankArgs{Mode: d.mode, Seed: seed, Late: time.Second})
	for r := range founders {
		w.start(r, func(a *rankArgs) {
			if r == d.victim {
				a.Point, a.Nth, a.Stop = d.point, d.nth, true
			}
			if slices.Contains(d.first, r) {
				a.DieAt = 4
			}
		})
	}
	victim := w.Live[d.victim]
	stopped := func() bool { return victim.State() == "T" }
	for end := time.Now().Add(30 * time.Second); !stopped(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the victim did not come to the point")
	}
	other := w.Live[(d.victim+1)%founders]
	if slices.Contains(d.first, (d.victim+1)%founders) {
		other = w.Live[(d.victim+2)%founders]
	}
	out := fmt.Sprintf("lost=%d", d.victim)
	_, err := other.Line(out, 20*time.Second)
	require.NoError(t, err, "the victim is not excluded")
	w.Cont(victim)
	line, err := victim.Line("over ", 20*time.Second)
	require.NoError(t, err)
	require.Contains(t, line, "evicted (slot")
	time.Sleep(20 * time.Millisecond)
	count = w.finish(append(d.first, d.victim)...)
	return count
}

package proof

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

var (
	full = flag.Bool("proof.full", long, "every point with every rank, link and mode, several times")
	only = flag.String("proof.point", "", "only this point")
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
	nth    int
	victim int
	first  []int // ranks that die before, at step 4
	joins  bool  // rank 3 dies before and comes back
	joiner bool  // the victim is the one that comes back
	links  string
	mode   pg.Mode
}

func (d dying) String() string {
	s := fmt.Sprintf("%s/%d/rank%d/%s/%v", d.point, d.nth, d.victim, d.links, d.mode)
	if len(d.first) > 0 {
		s += fmt.Sprintf("/after%v", d.first)
	}
	if d.joins {
		s += "/join"
	}
	return strings.ReplaceAll(s, " ", "")
}

// scene says how a point is reached.
func scene(point string, victim int) (d dying, ok bool) {
	d = dying{point: point, victim: victim, nth: 1}
	switch point {
	case faultpoint.AgentPromise, faultpoint.AgentCommit:
		d.first = []int{3}
	case faultpoint.AgentPrepare, faultpoint.AgentAccept: // the coordinator, who is the lowest that lives
		d.first = []int{3}
		if victim == 2 {
			d.first = []int{0, 1}
		}
	case faultpoint.BoundaryStop:
		d.joins = true
	case faultpoint.JoinHello, faultpoint.JoinWelcome:
		d.joins, d.joiner, d.victim = true, true, 3
		if victim == 2 {
			return d, false // the same again
		}
	case faultpoint.EPDispatchEncode, faultpoint.EPDispatchWait, faultpoint.EPCombineEncode, faultpoint.EPCombineWait:
		return d, false // package ep has its own
	default:
		d.nth = 0 // to be drawn
	}
	return d, true
}

const calmSteps = 10

// places says where a rank listens, if not on the loopback.
var places func(rank int) string

func place(w *world) {
	w.edit = func(a *rankArgs) {
		if places != nil {
			a.Listen = places(a.Rank)
		}
	}
}

// calm runs the program without a death, and returns how often each rank came to each point up to about calmSteps.
func calm(t testing.TB, seed uint64, links string, mode pg.Mode, opts func(int) []harness.Option) map[int]map[string]int {
	w := newWorld(t, rankArgs{Links: links, Mode: mode, Seed: seed})
	w.opts = opts
	place(w)
	for r := range founders {
		w.start(r, nil)
	}
	for _, p := range w.procs {
		_, err := p.Line(fmt.Sprintf("step %d", calmSteps), 20*time.Second)
		require.NoError(t, err)
	}
	ss, _ := w.finish()
	hits := map[int]map[string]int{}
	for _, s := range ss {
		hits[s.slot] = s.hits
	}
	return hits
}

// run runs one case and says whether the victim came to the point.
func (d dying) run(t testing.TB, seed uint64, opts func(int) []harness.Option) (fired bool, count map[string]int) {
	w := newWorld(t, rankArgs{Links: d.links, Mode: d.mode, Seed: seed})
	w.opts = opts
	place(w)
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
	for _, r := range d.first {
		_, _ = w.procs[r].Wait(20 * time.Second)
	}
	if d.joins {
		_, _ = w.procs[3].Wait(20 * time.Second)
		p := w.start(3, func(a *rankArgs) {
			a.Rejoin = true
			if d.joiner {
				a.Point, a.Nth = d.point, d.nth
			}
		})
		if d.joiner {
			_, err := p.Wait(15 * time.Second)
			require.Error(t, err)
			p = w.start(3, func(a *rankArgs) { a.Rejoin = true })
			fired = true
		}
		_, err := p.Line("joined", 15*time.Second)
		require.NoError(t, err, "the replacement")
	}
	if !d.joiner {
		_, err := w.procs[d.victim].Wait(10 * time.Second)
		fired = err != nil && strings.Contains(err.Error(), "signal: killed")
		if fired {
			dead = append(dead, d.victim)
		}
	}
	time.Sleep(30 * time.Millisecond)
	_, count = w.finish(dead...)
	return fired, count
}

// runStopped stops the victim at the point until the others have gone on without it, and continues it: what it does then
// changes nothing for them, and its next call says that it is out.
func (d dying) runStopped(t testing.TB, seed uint64, opts func(int) []harness.Option) (fired bool, count map[string]int) {
	w := newWorld(t, rankArgs{Links: d.links, Mode: d.mode, Seed: seed, Late: time.Second})
	w.opts = opts
	place(w)
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
	victim := w.procs[d.victim]
	stopped := func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", victim.Pid()))
		require.NoError(t, err, "%v", victim.Lines())
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		return f[0] == "T"
	}
	for end := time.Now().Add(30 * time.Second); !stopped(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the victim did not come to the point")
	}
	other := w.procs[(d.victim+1)%founders]
	if slices.Contains(d.first, (d.victim+1)%founders) {
		other = w.procs[(d.victim+2)%founders]
	}
	out := fmt.Sprintf("lost=%d", d.victim)
	_, err := other.Line(out, 20*time.Second)
	require.NoError(t, err, "the victim is not excluded")
	victim.Signal(syscall.SIGCONT)
	line, err := victim.Line("over ", 20*time.Second)
	require.NoError(t, err)
	require.Contains(t, line, "evicted (slot")
	time.Sleep(20 * time.Millisecond)
	_, count = w.finish(append(d.first, d.victim)...)
	return true, count
}

// TestStoppedAtEachPoint is the matrix with a victim that is stopped in the middle of what it does, and continued.
func TestStoppedAtEachPoint(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	opts := useBinary(t)
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 4))
	hits := map[string]map[int]map[string]int{}
	for _, links := range []string{"auto", "tcp"} {
		hits[links] = calm(t, seed, links, pg.Raise, opts)
	}
	turn := rnd.IntN(5)
	for _, point := range []string{
		faultpoint.PublishBefore, faultpoint.PublishMid, faultpoint.SealBefore, faultpoint.SealAfter, faultpoint.WakeBefore,
		faultpoint.DecideBefore, faultpoint.DecideAfter, faultpoint.PullMid, faultpoint.PullAfter, faultpoint.ReturnBefore,
		faultpoint.NewGroup, faultpoint.AgentPromise, faultpoint.AgentCommit, faultpoint.TCPFrameMid,
	} {
		for _, links := range []string{"auto", "tcp"} {
			for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
				turn++
				if *only != "" && *only != point || *only == "" && !*full && turn%5 != 0 {
					continue
				}
				victim := []int{0, 2}[rnd.IntN(2)]
				d, _ := scene(point, victim)
				d.links, d.mode = links, mode
				if d.nth == 0 {
					n := hits[links][victim][point]
					if n == 0 {
						continue
					}
					d.nth = 1 + rnd.IntN(n)
				}
				t.Run(d.String(), func(t *testing.T) {
					t.Parallel()
					fired, count := d.runStopped(t, seed, opts)
					t.Log(fired, count)
				})
			}
		}
	}
}

// TestKilledAtEachPoint is the matrix: the victim dies at a point, and the survivors agree.
func TestKilledAtEachPoint(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	matrix(t, useBinary(t))
}

func matrix(t *testing.T, opts func(int) []harness.Option, linksOf ...string) {
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 2))
	if len(linksOf) == 0 {
		linksOf = []string{"auto", "tcp"}
	}
	var cases []dying
	hits := map[string]map[int]map[string]int{}
	for _, links := range linksOf {
		hits[links] = calm(t, seed, links, pg.Raise, opts)
	}
	every := 4
	if race {
		every = 16
	}
	turn := rnd.IntN(every)
	for _, point := range faultpoint.All() {
		if *only != "" && *only != point {
			continue
		}
		for _, victim := range []int{0, 2} {
			for _, links := range linksOf {
				for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
					turn++
					if !*full && *only == "" && turn%every != 0 {
						continue
					}
					turn += rnd.IntN(2) // so that all come in turn
					for range map[bool]int{false: 1, true: 3}[*full && !race] {
						d, ok := scene(point, victim)
						d.links, d.mode = links, mode
						if !ok || places != nil && len(d.first) == 2 {
							continue
						}
						if d.nth == 0 {
							n := hits[links][victim][point]
							if n == 0 {
								continue // not with these links
							}
							d.nth = 1 + rnd.IntN(n)
							if rnd.IntN(3) == 0 {
								d.first = []int{1 + 2*rnd.IntN(2)} // another dies at about the same time
							}
							if places != nil && victim == 0 && d.first != nil {
								d.first = []int{3} // not both of the host of rank 0: the others would have no quorum
							}
						}
						cases = append(cases, d)
					}
				}
			}
		}
	}
	fired, ran := map[string]int{}, map[string]int{}
	for _, d := range cases {
		t.Run(d.String(), func(t *testing.T) {
			f, count := d.run(t, seed, opts)
			ran[d.point]++
			if f {
				fired[d.point]++
			} else {
				t.Logf("%v did not come to the point", d)
			}
			t.Log(count)
		})
	}
	for _, p := range faultpoint.All() {
		t.Logf("%-20s %3d cases, %3d deaths", p, ran[p], fired[p])
	}
}

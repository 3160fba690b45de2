package proof

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

var (
	full = flag.Bool("proof.full", long, "every point with every rank, link and mode, several times")
	only = flag.String("proof.point", "", "only this point, with every rank, link and mode")
)

// stage is how ranks are linked, and where they run.
type stage struct {
	name   string
	number int // what it chooses differs from the others' by it
	links  string
	opts   func(rank int) []harness.Option
	listen func(rank int) string // nil: on the loopback
}

func (st *stage) hosts() bool { return st.listen != nil }

func (st *stage) world(t testing.TB, args rankArgs) *world {
	args.Links = st.links
	w := newWorld(t, args)
	w.opts = st.opts
	if st.listen != nil {
		w.Edit, w.Host = func(a *rankArgs) { a.Listen = st.listen(a.Rank) }, hostOf
	}
	return w
}

func oneHost(t testing.TB) (shm, tcp *stage) {
	opts := useBinary(t)
	return &stage{name: "shm", links: "auto", opts: opts}, &stage{name: "tcp", number: 1, links: "tcp", opts: opts}
}

// cannot says why a rank never comes to a point with these links; empty: it must.
func cannot(point string, st *stage) string {
	if point == faultpoint.TCPFrameMid && st.name == "shm" {
		return "with shared memory no frame has a payload that is sent in two"
	}
	return ""
}

// calm lets the program run without a death, to see how often each rank comes to each point.
func calm(t testing.TB, seed uint64, st *stage) (hits [founders]map[string]int) {
	w := st.world(t, rankArgs{Mode: pg.Raise, Seed: seed})
	for r := range founders {
		w.start(r, nil)
	}
	for r, p := range w.Live {
		line, err := p.Line("hits ", 20*time.Second)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal([]byte(line), &hits[r]))
	}
	w.finish()
	return hits
}

// turn is one way to meet a point.
type turn struct {
	base  int // the rank, or one of the other of its host
	mode  pg.Mode
	times int
}

// turns says how a stage meets the points: in the full matrix each with both hosts' ranks and both modes, three times; by
// default every other one, on a host the others by the other links (serry chaos meets them all, in each operation); and a
// small part of that under -short. at is the number of the point, with a stage's number added: the other choices alternate with it.
func turns(at int) (ts []turn) {
	modes := []pg.Mode{pg.Raise, pg.Continue}
	pick := func(j int) turn { return turn{base: 2 * ((at + j) % 2), mode: modes[(at/2+j)%2], times: 1} }
	switch {
	case *full || *only != "":
		times := 3
		if race {
			times = 1
		}
		for _, base := range []int{0, 2} {
			for _, mode := range modes {
				ts = append(ts, turn{base: base, mode: mode, times: times})
			}
		}
	case testing.Short():
		if at%4 == 0 {
			ts = append(ts, pick(0))
		}
	default:
		if at%2 == 0 {
			ts = append(ts, pick(0))
		}
	}
	return ts
}

// draw makes a case of a turn: which hit of the point, of which rank, and who dies besides. ok is false if it would be the
// same as another turn's.
func (st *stage) draw(point string, x turn, rnd *rand.Rand, hits [founders]map[string]int) (d dying, ok bool) {
	d, same := scene(point, x.base, st.hosts())
	d.stage, d.mode = st, x.mode
	if same && (*full || *only != "") {
		return d, false
	}
	if d.nth > 0 {
		return d, true
	}
	d.victim += rnd.IntN(2)
	if hits[d.victim][point] == 0 {
		d.victim = x.base
	}
	d.nth = 1 + rnd.IntN(max(1, hits[d.victim][point]))
	if rnd.IntN(3) == 0 { // another dies at about the same time
		others := slices.DeleteFunc([]int{0, 1, 2, 3}, func(r int) bool {
			// Not both of the host of rank 0: the others would have no quorum.
			return r == d.victim || st.hosts() && max(r, d.victim) < 2
		})
		d.first = []int{others[rnd.IntN(len(others))]}
	}
	return d, true
}

// matrix kills a rank at each point. A point to which no rank came where one had to is a failure.
func matrix(t *testing.T, stages ...*stage) {
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 2))
	deaths := map[string]int{}
	sum := map[string]int{}
	ran := 0
	for _, st := range stages {
		hits := calm(t, seed, st)
		for i, point := range faultpoint.All() {
			if *only != "" && *only != point {
				continue
			}
			ever := 0
			for _, h := range hits {
				ever += h[point]
			}
			if why := cannot(point, st); why != "" {
				t.Logf("%-5s %-20s never: %s", st.name, point, why)
				require.Zero(t, ever, "%s: ranks come to %s after all", st.name, point)
				continue
			}
			cases, met := 0, 0
			for _, x := range turns(i + st.number + int(seed%4)) {
				for range x.times {
					d, ok := st.draw(point, x, rnd, hits)
					if !ok {
						continue
					}
					cases++
					t.Run(d.String(), func(t *testing.T) {
						for try, fired := 1, false; !fired; try++ {
							require.LessOrEqual(t, try, 4, "the victim did not come to the point")
							var count map[string]int
							fired, count = d.run(t, seed) // fails if it had to
							for k, n := range count {
								sum[k] += n
							}
							t.Log(fired, count)
						}
						met++
					})
				}
			}
			ran += cases
			deaths[st.name] += met
			switch {
			case cases > 0:
				t.Logf("%-5s %-20s %2d cases, %2d deaths", st.name, point, cases, met)
				require.Positive(t, met, "%s: nobody died at %s", st.name, point)
			case *full || *only != "":
				t.Errorf("%s: nobody was to die at %s", st.name, point)
			}
		}
	}
	t.Log(ran, "cases, deaths:", deaths, sum)
	if *only == "" && !testing.Short() {
		require.Positive(t, sum["send rank_lost"], "nobody sent to the dead")
		require.Positive(t, sum["recv rank_lost"], "nobody received from the dead")
	}
}

// TestKilledAtEachPoint is the matrix on one host: the victim dies at a point, and the survivors agree.
func TestKilledAtEachPoint(t *testing.T) {
	shm, tcp := oneHost(t)
	matrix(t, shm, tcp)
}

// TestTwoHostsAtEachPoint is the matrix over two hosts.
func TestTwoHostsAtEachPoint(t *testing.T) {
	hosts := harness.Hosts(t, 2)
	where, inHost := hosted(hosts)
	binary := useBinary(t)
	matrix(t, &stage{
		name: "hosts", number: 2, links: "auto",
		opts:   func(rank int) []harness.Option { return append(binary(rank), inHost(rank)...) },
		listen: func(rank int) string { return where(rank).IP },
	})
}

// TestStoppedAtEachPoint is the matrix with a victim that is stopped in the middle of what it does, and continued.
func TestStoppedAtEachPoint(t *testing.T) {
	if testing.Short() {
		t.Skip("short: it waits for deadlines")
	}
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 4))
	shm, tcp := oneHost(t)
	stages := []*stage{shm, tcp}
	hits := map[*stage][founders]map[string]int{}
	for _, st := range stages {
		hits[st] = calm(t, seed, st)
	}
	for i, point := range []string{
		faultpoint.PublishBefore, faultpoint.PublishMid, faultpoint.SealBefore, faultpoint.SealAfter, faultpoint.WakeBefore,
		faultpoint.DecideBefore, faultpoint.DecideAfter, faultpoint.PullMid, faultpoint.PullAfter, faultpoint.ReturnBefore,
		faultpoint.NewGroup, faultpoint.AgentPromise, faultpoint.AgentCommit, faultpoint.TCPFrameMid,
	} {
		if *only != "" && *only != point {
			continue
		}
		able := slices.DeleteFunc(slices.Clone(stages), func(st *stage) bool { return cannot(point, st) != "" })
		if !*full && *only == "" { // one of the links, in turn
			able = []*stage{able[i%len(able)]}
		}
		for _, st := range able {
			for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
				if !*full && *only == "" && (mode == pg.Raise) != (i/2%2 == 0) {
					continue
				}
				d, _ := scene(point, 2*rnd.IntN(2), false)
				d.stage, d.mode = st, mode
				if d.nth == 0 {
					d.nth = 1 + rnd.IntN(max(1, hits[st][d.victim][point]))
				}
				t.Run(d.String(), func(t *testing.T) {
					t.Parallel()
					t.Log(d.runStopped(t, seed))
				})
			}
		}
	}
}

func (d dying) String() string {
	s := fmt.Sprintf("%s/%d/rank%d/%s/%v", d.point, d.nth, d.victim, d.stage.name, d.mode)
	if len(d.first) > 0 {
		s += fmt.Sprintf("/after%v", d.first)
	}
	if d.joins {
		s += "/join"
	}
	return strings.ReplaceAll(s, " ", "")
}

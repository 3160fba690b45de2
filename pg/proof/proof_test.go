package proof

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]harness.Program{"rank": rankProgram})
}

// world is the processes of one case.
type world struct {
	t     testing.TB
	dir   string
	args  rankArgs
	procs [founders]*harness.Proc
	ever  []*harness.Proc
	opts  func(rank int) []harness.Option
	edit  func(a *rankArgs)
}

func newWorld(t testing.TB, args rankArgs) *world {
	dir, err := os.MkdirTemp("", "proof") // the name of the test would not do in a URL
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{t: t, dir: dir, args: args}
	w.args.Dir = w.dir
	if w.args.Debug = os.Getenv("SERRY_LOG") != ""; w.args.Debug {
		t.Cleanup(func() {
			for _, p := range w.ever {
				if t.Failed() {
					t.Logf("%s (pid %d):\n%s", p.Name, p.Pid(), p.Stderr())
				}
			}
		})
	}
	return w
}

// start starts a rank; edit changes its arguments.
func (w *world) start(rank int, edit func(*rankArgs)) *harness.Proc {
	a := w.args
	a.Rank = rank
	if w.edit != nil {
		w.edit(&a)
	}
	if edit != nil {
		edit(&a)
	}
	b, err := json.Marshal(a)
	require.NoError(w.t, err)
	var opts []harness.Option
	if w.opts != nil {
		opts = w.opts(rank)
	}
	p := harness.Start(w.t, fmt.Sprintf("rank %d", rank), "rank", []string{string(b)}, opts...)
	w.procs[rank] = p
	w.ever = append(w.ever, p)
	return p
}

func (w *world) stop() {
	require.NoError(w.t, os.WriteFile(filepath.Join(w.dir, "stop"), nil, 0o644))
}

// finish ends the program and checks the ranks that are not dead.
func (w *world) finish(dead ...int) (ss []survivor, count map[string]int) {
	w.t.Helper()
	w.stop()
	var bad []string
	for r, p := range w.procs {
		if p == nil || contains(dead, r) {
			continue
		}
		if _, err := p.Wait(25 * time.Second); err != nil {
			bad = append(bad, err.Error())
		}
		s, err := parse(r, p)
		require.NoError(w.t, err)
		ss = append(ss, s)
	}
	more, count := check(w.args, ss)
	bad = append(bad, more...)
	if len(bad) > 0 {
		for r, p := range w.procs {
			if p != nil && !contains(dead, r) {
				w.t.Logf("rank %d says:\n%s", r, p.Stderr())
			}
		}
		w.t.Fatalf("%d problems:\n%s", len(bad), strings.Join(bad[:min(len(bad), 30)], "\n"))
	}
	return ss, count
}

func contains(s []int, x int) bool {
	for _, y := range s {
		if x == y {
			return true
		}
	}
	return false
}

var seedFlag = flag.Uint64("proof.seed", map[bool]uint64{false: 1, true: 0}[long], "what all is drawn from; 0: another one each time")

func seedOf(t testing.TB) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = 1 + uint64(time.Now().UnixNano())%1_000_000
	}
	t.Logf("-proof.seed=%d", seed)
	return seed
}

func variants(f func(links string, mode pg.Mode)) {
	for _, links := range []string{"auto", "tcp"} {
		for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
			f(links, mode)
		}
	}
}

func TestNobodyDies(t *testing.T) {
	seed := seedOf(t)
	variants(func(links string, mode pg.Mode) {
		t.Run(fmt.Sprintf("%s/%v", links, mode), func(t *testing.T) {
			w := newWorld(t, rankArgs{Links: links, Mode: mode, Seed: seed})
			for r := range founders {
				w.start(r, nil)
			}
			for _, p := range w.procs {
				_, err := p.Line("step 30", 20*time.Second)
				require.NoError(t, err)
			}
			_, count := w.finish()
			require.Zero(t, count["lost"]+count["source"]+count["failed"], "%v", count)
			t.Log(count)
		})
	})
}

// TestKilledAnyTime kills a rank from outside at varied moments.
func TestKilledAnyTime(t *testing.T) {
	seed := seedOf(t)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for i := range 3 {
		variants(func(links string, mode pg.Mode) {
			victim := rnd.IntN(founders)
			at := time.Duration(rnd.IntN(60_000)) * time.Microsecond
			t.Run(fmt.Sprintf("%d/%s/%v/rank%d", i, links, mode, victim), func(t *testing.T) {
				w := newWorld(t, rankArgs{Links: links, Mode: mode, Seed: seed + uint64(i)})
				for r := range founders {
					w.start(r, nil)
				}
				_, err := w.procs[0].Line("joined", 20*time.Second)
				require.NoError(t, err)
				time.Sleep(at)
				w.procs[victim].Signal(syscall.SIGKILL)
				_, _ = w.procs[victim].Wait(5 * time.Second)
				time.Sleep(50 * time.Millisecond)
				_, count := w.finish(victim)
				t.Log(at, count)
			})
		})
	}
}

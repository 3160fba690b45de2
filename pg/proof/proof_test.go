package proof

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/chaos"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

const founders = 4

func TestMain(m *testing.M) {
	harness.Main(m, map[string]harness.Program{"rank": func(args []string, out io.Writer) error {
		return chaos.Rank(context.Background(), args[0], os.Stdin, out)
	}})
}

// rankArgs is what a rank is started with.
type rankArgs = chaos.RankArgs

// world is the processes of one case.
type world struct {
	*chaos.World
	t    testing.TB
	opts func(rank int) []harness.Option
}

func newWorld(t testing.TB, args rankArgs) *world {
	args.Ranks, args.Debug = founders, os.Getenv("SERRY_LOG") != ""
	w := &world{t: t}
	var err error
	w.World, err = chaos.NewWorld(args, func(rank int, args string) (*harness.Proc, error) {
		var opts []harness.Option
		if w.opts != nil {
			opts = w.opts(rank)
		}
		return harness.Start(t, fmt.Sprintf("rank %d", rank), "rank", []string{args}, opts...), nil
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			dir := t.ArtifactDir()
			t.Logf("the histories are in %s: %v", dir, w.Keep(dir))
		}
		w.Close()
	})
	return w
}

// start starts a rank; edit changes its arguments.
func (w *world) start(rank int, edit func(*rankArgs)) *chaos.Member {
	m, err := w.Start(rank, edit)
	require.NoError(w.t, err)
	return m
}

// finish ends the program and checks what all have seen.
func (w *world) finish(dead ...int) (count map[string]int) {
	w.t.Helper()
	r, err := w.Finish(dead...)
	require.NoError(w.t, err)
	if n := len(r.Problems); n > 0 {
		w.t.Fatalf("%d problems:\n%s", n, strings.Join(r.Problems[:min(n, 30)], "\n"))
	}
	return r.Count
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
			for _, p := range w.Live {
				_, err := p.Line("step 30", 20*time.Second)
				require.NoError(t, err)
			}
			count := w.finish()
			require.Zero(t, count["rank_lost"]+count["source_lost"]+count["failed"], "%v", count)
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
				_, err := w.Live[0].Line("joined", 20*time.Second)
				require.NoError(t, err)
				time.Sleep(at)
				w.Kill(w.Live[victim])
				_, _ = w.Live[victim].Wait(5 * time.Second)
				time.Sleep(50 * time.Millisecond)
				count := w.finish(victim)
				t.Log(at, count)
			})
		})
	}
}

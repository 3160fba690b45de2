package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]harness.Program{"loop": loopProgram, "speed": speedProgram, "idles": idlesProgram, "ring": ringProgram})
}

type loopArgs struct {
	Rank, Size, Capacity int
	Dir                  string
	Links                string
	Mode                 Mode
	Rejoin               bool
	Ballast              int // MiB
	Steps                int
	Timeout              time.Duration // of an operation
	Listen               string
	Invite               string // instead of the rendezvous
	Pause                time.Duration
}

func (a loopArgs) start(t testing.TB, opts ...harness.Option) *harness.Proc {
	b, _ := json.Marshal(a)
	return harness.Start(t, fmt.Sprintf("rank %d", a.Rank), "loop", []string{string(b)}, opts...)
}

// loopProgram reduces its rank in a loop and prints every change of the set with the time since boot at which the first
// operation of the new version was complete.
func loopProgram(args []string, out io.Writer) error {
	var a loopArgs
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, "file://"+a.Dir)
	if err != nil {
		return err
	}
	level := slog.LevelWarn
	if os.Getenv("SERRY_LOG") != "" {
		level = slog.LevelDebug
	}
	ballast := make([]byte, a.Ballast<<20)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	var peers []string
	if a.Invite != "" {
		st, peers = nil, []string{a.Invite}
	}
	w, err := Join(ctx, Config{
		Rank: a.Rank, Size: a.Size, Capacity: a.Capacity, Store: st, Peers: peers, Links: a.Links, Rejoin: a.Rejoin, Listen: a.Listen,
		Options: Options{Mode: a.Mode, Timeout: a.Timeout},
		Log:     slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", a.Rank),
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "joined %d as %d\n", w.Joined().Boundary, w.Rank())
	fmt.Fprintf(out, "invite %s\n", w.Invite())
	last := uint64(0)
	x, y := make([]int64, 2), make([]int64, 2)
	step, fresh := 0, w.Joined().Replacement
	if fresh {
		step, _ = strconv.Atoi(string(w.Joined().Attach))
	}
	for ; a.Steps == 0 || step < a.Steps; step++ {
		p, err := w.Boundary(ctx, func() []byte { return []byte(strconv.Itoa(step)) })
		if err != nil {
			fmt.Fprintf(out, "error %v\n", err)
			return err
		}
		if fresh && (p.Count != w.Joined().Boundary || !slices.Contains(p.Joined, w.Rank())) {
			return fmt.Errorf("rank %d came in at Boundary %d, its first says %+v", w.Rank(), w.Joined().Boundary, p)
		}
		fresh = false
		time.Sleep(a.Pause)
		x[0], x[1] = 1<<w.Rank(), int64(step)
		res, err := w.AllReduce(ctx, I64(y), I64(x), dtype.Sum)
		if err != nil {
			fmt.Fprintf(out, "error %v\n", err)
			if _, ok := err.(*RankLost); ok {
				continue
			}
			return err
		}
		if res.Epoch != last {
			last = res.Epoch
			fmt.Fprintf(out, "epoch %d %d %v seq %d\n", res.Epoch, time.Now().UnixNano(), res.Active.Slots(), res.Seq)
		}
		want := int64(0)
		for _, s := range res.Active.Slots() {
			want += 1 << s
		}
		if y[0] != want || y[1] != int64(step)*int64(res.Active.Len()) {
			return fmt.Errorf("step %d: sum %v, want %d and %d (set %v)", step, y, want, int64(step)*int64(res.Active.Len()), res.Active.Slots())
		}
	}
	if len(ballast) == 1 {
		fmt.Fprintln(out, ballast)
	}
	return w.Leave(ctx)
}

func TestKillAndRejoin(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		for victim := range 3 {
			t.Run(fmt.Sprintf("%s/rank%d", l, victim), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				ps := make([]*harness.Proc, 3)
				for r := range ps {
					ps[r] = loopArgs{Rank: r, Size: 3, Dir: dir, Links: l}.start(t)
				}
				for _, p := range ps {
					_, err := p.Line("epoch 1 ", 20*time.Second)
					require.NoError(t, err)
				}
				begin := time.Now()
				ps[victim].Signal(syscall.SIGKILL)
				for r, p := range ps {
					if r == victim {
						continue
					}
					line, err := p.Line("epoch 2 ", 5*time.Second)
					require.NoError(t, err)
					var ns int64
					fmt.Sscan(line, &ns)
					t.Logf("rank %d: first step after %v: %s", r, time.Unix(0, ns).Sub(begin), line)
				}
				begin = time.Now()
				p := loopArgs{Rank: victim, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
				line, err := p.Line("epoch 3 ", 10*time.Second)
				require.NoError(t, err)
				t.Logf("rejoined after %v (process start included): %s", time.Since(begin), line)
				for r, q := range ps {
					if r != victim {
						_, err := q.Line("epoch 3 ", 5*time.Second)
						require.NoError(t, err)
					}
				}
			})
		}
	}
}

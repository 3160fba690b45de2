package ep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

func TestMain(m *testing.M) {
	harness.Main(m, map[string]harness.Program{"ep": stepProgram, "bench": benchProgram})
}

// pairs makes a group for ep of all ranks of a world.
func pairs(ctx context.Context, w *pg.World, cfg *Config) (Group, error) {
	g, err := w.Sub(ctx, nil, pg.Options{Mode: pg.Raise, Pairs: true, SlotBytes: cfg.SlotBytes(w.Size())})
	if err != nil {
		return nil, err
	}
	return FromGroup(g), nil
}

// Over real process groups (in one process): shapes, poison, overlap, against the oracle.
func TestOverProcessGroup(t *testing.T) {
	for _, links := range []string{"auto", "tcp"} {
		for n := 1; n <= 4; n++ {
			t.Run(fmt.Sprintf("%s/%d", links, n), func(t *testing.T) {
				cfg := config(t, 9, 3, 33, 6, n, min(n, 2))
				cfg.Layout, cfg.Align = ExpertMajor, 4
				ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
				defer cancel()
				st, err := rendezvous.Open(ctx, fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
				if err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				for r := range n {
					wg.Go(func() {
						if err := overProcessGroup(ctx, t, pg.Config{Rank: r, Size: n, Store: st, Links: links}, cfg); err != nil {
							t.Errorf("rank %d: %v", r, err)
							cancel()
						}
					})
				}
				wg.Wait()
			})
		}
	}
}

func overProcessGroup(ctx context.Context, t *testing.T, pc pg.Config, cfg Config) error {
	w, err := pg.Join(ctx, pc)
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	g, err := pairs(ctx, w, &cfg)
	if err != nil {
		return err
	}
	buf, err := Open(ctx, g, cfg)
	if err != nil {
		return err
	}
	for i := range 20 {
		b := randomBatch(1, uint64(buf.rank), uint64(i), &cfg, (buf.rank*3+i*5)%7)
		if i == 7 && buf.rank == pc.Size-1 {
			b = randomBatch(1, uint64(buf.rank), uint64(i), &cfg, 7)
		}
		r := step(ctx, buf, b)
		if i == 7 {
			wantPoison(t, buf, r.err, pc.Size-1, ReasonTooManyTokens)
			continue
		}
		if err := checkResult(&cfg, b, r); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	in := func(rank, step int) batch { return randomBatch(2, uint64(rank), uint64(step), &cfg, (rank+step)%7) }
	for i, r := range pipeline(ctx, buf, &cfg, 8, in) {
		if err := checkResult(&cfg, in(buf.rank, i), r); err != nil {
			return fmt.Errorf("overlapped step %d: %w", i, err)
		}
	}
	if err := buf.Close(ctx); err != nil {
		return err
	}
	_, err = w.Barrier(ctx)
	return err
}

type stepArgs struct {
	Rank, Size, Steps, Replicas int
	Dir, Links                  string
	Rejoin                      bool
	Point                       string // dies there,
	Nth                         int    // the Nth time
	Pause                       time.Duration
}

func (a stepArgs) config() (Config, error) {
	p, err := route.Contiguous(9, a.Size, a.Replicas)
	return Config{Experts: 9, TopK: 3, Hidden: 32, DType: F32, MaxTokens: 6, Placement: p, Policy: Rerun}, err
}

func (a stepArgs) in(cfg *Config, rank, step int) batch {
	return randomBatch(77, uint64(rank), uint64(step), cfg, (rank+step)%7)
}

func hash(f []float32) string {
	h := fnv.New64a()
	_, _ = h.Write(bytesOf(f))
	return strconv.FormatUint(h.Sum64(), 16)
}

func (a stepArgs) start(t testing.TB, program string) *harness.Proc {
	b, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	return harness.Start(t, fmt.Sprintf("rank %d", a.Rank), program, []string{string(b)})
}

// stepProgram runs steps and prints, for each, the step, the version, who took part, and a hash of the output.
func stepProgram(args []string, out io.Writer) error {
	var a stepArgs
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cfg, err := a.config()
	if err != nil {
		return err
	}
	st, err := rendezvous.Open(ctx, "file://"+a.Dir)
	if err != nil {
		return err
	}
	level := slog.LevelWarn
	if os.Getenv("SERRY_LOG") != "" {
		level = slog.LevelDebug
	}
	w, err := pg.Join(ctx, pg.Config{Rank: a.Rank, Size: a.Size, Store: st, Links: a.Links, Rejoin: a.Rejoin,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", a.Rank)})
	if err != nil {
		return err
	}
	var g Group
	first := 0
	cfg.Joining = w.Joined().Replacement
	if cfg.Joining {
		if first, err = strconv.Atoi(string(w.Joined().Attach)); err != nil {
			return err
		}
		for _, x := range w.Groups() {
			if x.Options().Pairs {
				g = FromGroup(x)
			}
		}
	} else if g, err = pairs(ctx, w, &cfg); err != nil {
		return err
	}
	buf, err := Open(ctx, g, cfg)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "open")
	if a.Point != "" {
		faultpoint.Arm(a.Point, a.Nth, nil)
	}
	for i := first; i < a.Steps; i++ {
		if i > first || !cfg.Joining {
			if _, err := w.Boundary(ctx, func() []byte { return []byte(strconv.Itoa(i)) }); err != nil {
				return err
			}
		}
		b := a.in(&cfg, a.Rank, i)
		r := step(ctx, buf, b)
		if err := checkResult(&cfg, b, r); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		fmt.Fprintf(out, "step %d epoch %d active %x hash %s\n", i, r.rep.Epoch, r.rep.Active[0], hash(r.out))
		time.Sleep(a.Pause)
	}
	if err := buf.Close(ctx); err != nil {
		return err
	}
	return w.Leave(ctx)
}

// checkSteps waits for steps from..to of a rank and compares their bits with the run in which nobody dies. It returns
// "epoch active" of the steps.
func checkSteps(t *testing.T, a stepArgs, p *harness.Proc, rank, from, to int) (seen []string) {
	t.Helper()
	cfg, err := a.config()
	if err != nil {
		t.Fatal(err)
	}
	for i := from; i < to; i++ {
		line, err := p.Line(fmt.Sprintf("step %d ", i), 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		var epoch uint64
		var active, got string
		if _, err := fmt.Sscanf(line, "epoch %d active %s hash %s", &epoch, &active, &got); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		want, _, _ := oracle(&cfg, a.in(&cfg, rank, i), nil)
		if got != hash(want) {
			t.Errorf("rank %d, step %d: bits differ from the run without a failure", rank, i)
		}
		seen = append(seen, fmt.Sprintf("%d: %d %s", i, epoch, active))
	}
	return seen
}

func sameReports(t *testing.T, seen map[int][]string) {
	t.Helper()
	first := -1
	for r, s := range seen {
		if first < 0 {
			first = r
		}
		for i := range s {
			if s[i] != seen[first][i] {
				t.Errorf("rank %d reports %q, rank %d %q", r, s[i], first, seen[first][i])
			}
		}
	}
}

// Ranks as processes; one is killed while it steps, and a replacement comes in: no bit changes.
func TestKillAndRejoinOverProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, links := range []string{"auto", "tcp"} {
		t.Run(links, func(t *testing.T) {
			const n, steps = 3, 400
			a := stepArgs{Size: n, Steps: steps, Replicas: 2, Dir: t.TempDir(), Links: links, Pause: 5 * time.Millisecond}
			ps := make([]*harness.Proc, n)
			for r := range ps {
				a.Rank = r
				ps[r] = a.start(t, "ep")
			}
			const victim = 1
			if _, err := ps[victim].Line("step 20 ", 60*time.Second); err != nil {
				t.Fatal(err)
			}
			ps[victim].Signal(syscall.SIGKILL)
			if _, err := ps[0].Line("step 60 ", 60*time.Second); err != nil {
				t.Fatal(err)
			}
			b := a
			b.Rank, b.Rejoin = victim, true
			ps[victim] = b.start(t, "ep")
			seen := map[int][]string{}
			for _, r := range []int{0, 2} {
				seen[r] = checkSteps(t, a, ps[r], r, 0, steps)
			}
			sameReports(t, seen)
			for r, p := range ps {
				if code, err := p.Wait(60 * time.Second); code != 0 || err != nil {
					t.Errorf("rank %d ended with %d, %v", r, code, err)
				}
			}
			t.Log(ps[victim].Lines()[:3], seen[0][steps-1])
		})
	}
}

// A rank is killed at each point of ours and of the layers below; the second time it gets there after Open.
func TestKillAtFaultPoints(t *testing.T) {
	if !faultpoint.Enabled {
		t.Skip("needs -tags faultpoint")
	}
	points := []string{faultpoint.EPDispatchEncode, faultpoint.EPDispatchWait, faultpoint.EPCombineEncode, faultpoint.EPCombineWait,
		faultpoint.PublishBefore, faultpoint.PublishMid, faultpoint.SealBefore, faultpoint.SealAfter, faultpoint.DecideBefore,
		faultpoint.DecideAfter, faultpoint.WakeBefore, faultpoint.PullMid, faultpoint.PullAfter, faultpoint.ReturnBefore}
	const n, steps = 3, 12
	for _, links := range []string{"auto", "tcp"} {
		for i, point := range points {
			t.Run(links+"/"+point, func(t *testing.T) {
				a := stepArgs{Size: n, Steps: steps, Replicas: 2, Dir: t.TempDir(), Links: links}
				victim := i % n
				ps := make([]*harness.Proc, n)
				for r := range ps {
					b := a
					if b.Rank = r; r == victim {
						b.Point, b.Nth = point, 5
					}
					ps[r] = b.start(t, "ep")
				}
				if code, err := ps[victim].Wait(60 * time.Second); code != -1 {
					t.Fatalf("the victim ended with %d, %v", code, err)
				}
				seen := map[int][]string{}
				for r, p := range ps {
					if r != victim {
						seen[r] = checkSteps(t, a, p, r, 0, steps)
						if code, err := p.Wait(60 * time.Second); code != 0 || err != nil {
							t.Errorf("rank %d ended with %d, %v", r, code, err)
						}
					}
				}
				sameReports(t, seen)
			})
		}
	}
}

// One replica only: the survivors go on, and say what is missing.
func TestUncoveredLossOverProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	const n, steps = 3, 120
	a := stepArgs{Size: n, Steps: steps, Replicas: 1, Dir: t.TempDir(), Links: "auto", Pause: 5 * time.Millisecond}
	ps := make([]*harness.Proc, n)
	for r := range ps {
		a.Rank = r
		ps[r] = a.start(t, "ep")
	}
	if _, err := ps[2].Line("step 20 ", 60*time.Second); err != nil {
		t.Fatal(err)
	}
	ps[2].Signal(syscall.SIGKILL)
	for r := range 2 { // each compares with the oracle that knows what is lost
		if code, err := ps[r].Wait(60 * time.Second); code != 0 || err != nil {
			t.Errorf("rank %d ended with %d, %v", r, code, err)
		}
	}
	if _, err := ps[0].Line(fmt.Sprintf("step %d epoch 2 active 3 ", steps-1), time.Second); err != nil {
		t.Error(err)
	}
}

// benchProgram times Steps steps whose experts copy, and prints the mean.
func benchProgram(args []string, out io.Writer) error {
	var a stepArgs
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	ctx := context.Background()
	p, err := route.Contiguous(64, a.Size, 1)
	if err != nil {
		return err
	}
	tokens := a.Nth
	cfg := Config{Experts: 64, TopK: 4, Hidden: 1024, DType: F32, MaxTokens: tokens, Placement: p, Policy: Rerun, MaxRows: tokens * 8}
	st, err := rendezvous.Open(ctx, "file://"+a.Dir)
	if err != nil {
		return err
	}
	w, err := pg.Join(ctx, pg.Config{Rank: a.Rank, Size: a.Size, Store: st, Links: a.Links, ArenaBytes: 1 << 30})
	if err != nil {
		return err
	}
	g, err := pairs(ctx, w, &cfg)
	if err != nil {
		return err
	}
	buf, err := Open(ctx, g, cfg)
	if err != nil {
		return err
	}
	b := randomBatch(1, uint64(a.Rank), 0, &cfg, tokens)
	y := &Output{Y: make([]float32, len(b.x))}
	var begin time.Time
	for i := range a.Steps + a.Steps/10 {
		if i == a.Steps/10 {
			begin = time.Now()
		}
		h, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
		if err != nil {
			return err
		}
		if _, err = buf.Combine(ctx, h, h.X(), y); err != nil {
			return err
		}
		h.Release()
	}
	fmt.Fprintf(out, "mean %d\n", time.Since(begin).Nanoseconds()/int64(a.Steps))
	return errors.Join(buf.Close(ctx), w.Leave(ctx))
}

// BenchmarkStep runs the ranks as processes: E=64, K=4, H=1024 f32, one replica (with
// two of two ranks nothing would travel), experts that do nothing. GB/s counts each choice's row, there and back.
func BenchmarkStep(b *testing.B) {
	for _, links := range []string{"auto", "tcp"} {
		for _, n := range []int{2, 4} {
			for _, tokens := range []int{1, 32, 256} {
				b.Run(fmt.Sprintf("%s/R=%d/T=%d", links, n, tokens), func(b *testing.B) {
					a := stepArgs{Size: n, Steps: max(b.N, 20), Dir: b.TempDir(), Links: links, Nth: tokens}
					ps := make([]*harness.Proc, n)
					for r := range ps {
						a.Rank = r
						ps[r] = a.start(b, "bench")
					}
					var worst int64
					for _, p := range ps {
						line, err := p.Line("mean ", 5*time.Minute)
						if err != nil {
							b.Fatal(err)
						}
						ns, _ := strconv.ParseInt(line, 10, 64)
						worst = max(worst, ns)
					}
					b.ReportMetric(float64(worst), "ns/op")
					b.ReportMetric(float64(2*n*tokens*4*4096)/float64(worst), "GB/s")
				})
			}
		}
	}
}

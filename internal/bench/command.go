package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/serry-project/serry/internal/faultpoint"

	"github.com/spf13/cobra"
)

// Command is `serry bench`.
func Command() *cobra.Command {
	c := &command{}
	root := &cobra.Command{
		Use:   "bench",
		Short: "Measure serry on this machine",
		Long: `Measure serry on this machine. Every rank is a process of its own, started by this one and ended with it.

Times are written with their median, 99th percentile, mean and maximum. Where the project asks for a time, the
result is held against it; a time that is missed changes no exit code, because a busy machine misses it too. A
promise that is not kept (a wrong result, a hang, a wrong rank blamed) is a violation, and the exit code is 1.

Other exit codes: 1 if a measurement fails, 2 for a wrong command line, 130 after Ctrl-C, 143 after SIGTERM, 129
after SIGHUP.`,
	}
	f := root.PersistentFlags()
	f.StringVar(&c.json, "json", "", "write the result as JSON to this file, at the end (-: stdout, instead of the table)")
	f.BoolVarP(&c.quiet, "quiet", "q", false, "no progress on stderr")
	f.StringVar(&c.o.Profile, "profile", "", "write a CPU profile of each rank into this directory (allreduce, ep)")
	f.StringVar(&c.o.Keep, "keep", "", "write what ranks said, and their goroutines, into this directory when something goes wrong")
	f.StringVar(&c.killable, "faultpoint", "", "a serry built with -tags faultpoint, for failover: the points cost time where it is not asked about them")
	root.AddCommand(c.allreduce(), c.ep(), c.failover(), c.join(), c.idle(), c.all(), rankCommand())
	return root
}

// rankCommand is what a process of a measurement runs.
func rankCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rank JSON", Hidden: true, Args: cobra.ExactArgs(1), SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return Rank(context.Background(), args[0], os.Stdin, os.Stdout)
		},
	}
}

type command struct {
	o     Options
	json  string
	file  *resultFile // of json
	quiet bool

	killable string // --faultpoint
}

// sub makes a subcommand that runs one measurement, or several.
func (c *command) sub(use, short, long string, run func(ctx context.Context) ([]*Result, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cmd.SilenceUsage = true
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			for flag, dir := range map[string]string{"profile": c.o.Profile, "keep": c.o.Keep} {
				if dir != "" {
					if err := os.MkdirAll(dir, 0o755); err != nil {
						return fmt.Errorf("--%s: %w", flag, err)
					}
				}
			}
			if c.json != "" && c.json != "-" {
				if c.file, err = openResult(c.json); err != nil {
					return err
				}
				defer c.file.giveUp()
			}
			path := strings.Fields(cmd.Parent().CommandPath())[1:]
			c.o.Self = append(append([]string{exe}, path...), "rank")
			if c.killable != "" {
				if _, err := exec.LookPath(c.killable); err != nil {
					return fmt.Errorf("--faultpoint %s: %w", c.killable, err)
				}
				c.o.Killable = append(append([]string{c.killable}, path...), "rank")
			}
			if !c.quiet {
				c.o.Progress = cmd.ErrOrStderr()
			}
			rs, err := run(ctx)
			var i *Interrupted
			if err != nil && errors.As(context.Cause(ctx), &i) {
				return i
			}
			if err != nil {
				return err
			}
			return c.finish(cmd.OutOrStdout(), rs, use == "all")
		},
	}
}

// Interrupted is a measurement that a signal has ended.
type Interrupted struct{ Signal syscall.Signal }

func (e *Interrupted) Error() string { return fmt.Sprintf("interrupted (%v)", e.Signal) }

// ExitStatus is that of a shell for a program which the signal has ended.
func (e *Interrupted) ExitStatus() int { return 128 + int(e.Signal) }

// untilSignal returns a context that the first signal to end ends, with an Interrupted as its cause. The second one ends
// the process.
func untilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	want := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		want = append(want, syscall.SIGHUP)
	}
	got := make(chan os.Signal, 1)
	signal.Notify(got, want...)
	go func() {
		select {
		case sig := <-got:
			signal.Stop(got)
			cancel(&Interrupted{sig.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(nil)
	}
}

func (c *command) finish(w io.Writer, rs []*Result, all bool) error {
	var doc any = rs
	if !all {
		doc = rs[0]
	}
	if c.json != "-" {
		for i, r := range rs {
			if i > 0 {
				fmt.Fprintln(w)
			}
			r.print(w)
		}
		if all {
			fmt.Fprintln(w)
			printBars(w, rs)
		}
	}
	if c.json != "" {
		b, err := json.MarshalIndent(doc, "", "  ")
		if err != nil {
			return err
		}
		b = append(b, '\n')
		if c.json == "-" {
			_, err = w.Write(b)
		} else {
			err = c.file.write(b)
		}
		if err != nil {
			return err
		}
	}
	for _, r := range rs {
		if len(r.Violations) > 0 {
			return ErrViolations
		}
	}
	return nil
}

func single(r *Result, err error) ([]*Result, error) {
	if r != nil {
		r.end()
	}
	return []*Result{r}, err
}

func (c *command) allreduce() *cobra.Command {
	cfg := AllReduceDefaults()
	cmd := c.sub("allreduce", "Time all_reduce", `Time an all_reduce of int64, as each rank sees it: between barriers that are not timed, out of place and in place
in turn; then one after another. Asked for: 2 ranks, 8 bytes, median at most 1 µs.`,
		func(ctx context.Context) ([]*Result, error) { return single(AllReduce(ctx, c.o, cfg)) })
	f := cmd.Flags()
	f.IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of processes")
	bytes := size(cfg.Bytes)
	f.Var(&bytes, "bytes", "length of the buffers")
	f.IntVar(&cfg.N, "n", cfg.N, "number of calls of each kind")
	links(cmd, &cfg.Links)
	cmd.PreRun = func(*cobra.Command, []string) { cfg.Bytes = int(bytes) }
	return cmd
}

func links(cmd *cobra.Command, s *string) {
	cmd.Flags().StringVar(s, "links", *s, "auto: shared memory; tcp: sockets only")
}

func shapeFlags(cmd *cobra.Command, s *shape) {
	f := cmd.Flags()
	f.IntVar(&s.Tokens, "tokens", s.Tokens, "tokens of each rank in a step")
	f.IntVar(&s.Hidden, "hidden", s.Hidden, "f32 elements of a token")
	f.IntVar(&s.TopK, "topk", s.TopK, "experts of a token")
	f.IntVar(&s.Experts, "experts", s.Experts, "number of experts")
	f.IntVar(&s.Replicas, "replicas", s.Replicas, "copies of each expert")
}

func (c *command) ep() *cobra.Command {
	cfg := EPDefaults()
	cmd := c.sub("ep", "Time dispatch and combine", `Time dispatch and combine, as each rank sees them, between barriers that are not timed. The experts give back what
they get. Asked for: with the defaults, median at most 100 µs.`,
		func(ctx context.Context) ([]*Result, error) { return single(EP(ctx, c.o, cfg)) })
	cmd.Flags().IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of processes")
	cmd.Flags().IntVar(&cfg.N, "n", cfg.N, "number of steps")
	links(cmd, &cfg.Links)
	shapeFlags(cmd, &cfg.Shape)
	return cmd
}

func (c *command) failover() *cobra.Command {
	cfg := FailoverDefaults()
	bytes, points := size(cfg.Resident), "all"
	cmd := c.sub("failover", "Kill ranks and time the pause of the others", `Kill ranks while all run steps: a Boundary, an expert-parallel step, an all_reduce or all_gather. The victim kills
itself with SIGKILL at a named point of the code, half of the times in dispatch or combine, after it has touched
--resident bytes, which the kernel has to take back. The pause is from the kill until the last survivor has
completed its first step without the dead rank. A replacement is let in before the next kill.

It needs a binary that can die at these points: go build -tags faultpoint -o serry-faultpoint ./cmd/serry, to be
used itself or named with --faultpoint. Asked for: with the
defaults, no pause longer than 50 ms. Violations: a wrong result, survivors that differ, a wrong rank blamed, a
hang (5 s), a replacement that is not let in.

Points: `+strings.Join(FailoverPoints(), ", "),
		func(ctx context.Context) ([]*Result, error) { return single(Failover(ctx, c.o, cfg)) })
	f := cmd.Flags()
	f.IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of processes")
	f.IntVar(&cfg.Kills, "kills", cfg.Kills, "number of kills")
	f.Var(&bytes, "resident", "memory of the victim")
	f.StringVar(&points, "points", points, "where to die: all, or points separated by commas")
	f.DurationVar(&cfg.Pace, "pace", cfg.Pace, "how long each rank sleeps before a step (a pause may get longer by that)")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "chooses the order of the points")
	links(cmd, &cfg.Links)
	shapeFlags(cmd, &cfg.Shape)
	cmd.PreRun = func(*cobra.Command, []string) {
		cfg.Resident = int64(bytes)
		if points != "all" {
			cfg.Points = strings.Split(points, ",")
		}
	}
	return cmd
}

func (c *command) join() *cobra.Command {
	cfg := JoinDefaults()
	cmd := c.sub("join", "Time how a replacement comes in", `Kill a rank, start a process for its place, and time that from its call of Join to the end of its first step. The
others run steps all the time. Asked for: 99th percentile at most 200 ms.`,
		func(ctx context.Context) ([]*Result, error) { return single(Join(ctx, c.o, cfg)) })
	cmd.Flags().IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of processes")
	cmd.Flags().IntVar(&cfg.N, "n", cfg.N, "number of replacements")
	links(cmd, &cfg.Links)
	shapeFlags(cmd, &cfg.Shape)
	return cmd
}

func (c *command) idle() *cobra.Command {
	cfg := IdleDefaults()
	cmd := c.sub("idle", "Add up what ranks cost that do nothing", `Add up the processor time of ranks that have joined and opened an expert-parallel buffer, and do nothing. Asked for:
4 ranks, 10 s, less than 100 ms in all.`,
		func(ctx context.Context) ([]*Result, error) { return single(Idle(ctx, c.o, cfg)) })
	cmd.Flags().IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of processes")
	cmd.Flags().DurationVar(&cfg.For, "for", cfg.For, "how long to watch")
	links(cmd, &cfg.Links)
	return cmd
}

func (c *command) all() *cobra.Command {
	fraction := 1.0
	cmd := c.sub("all", "Run everything that the project asks a time for", `Run every measurement with its defaults and list what was asked for and what was measured.`,
		func(ctx context.Context) ([]*Result, error) { return All(ctx, c.o, fraction) })
	cmd.Flags().Float64Var(&fraction, "part", fraction, "this part of the calls, kills, replacements and seconds, for a quick look (above 0, up to 1)")
	return cmd
}

// largeKills is how many ranks with 1 and 2 GiB All kills: each takes a second or two to touch that much.
const largeKills = 20

// All runs every measurement with a part of its default number of samples. What this binary cannot run is skipped.
func All(ctx context.Context, o Options, fraction float64) ([]*Result, error) {
	var bad checks
	bad.that(0 < fraction && fraction <= 1, "part", fraction, "more than 0, at most 1") // not so for NaN
	if err := bad.err(); err != nil {
		return nil, err
	}
	a, e, f, j, i := AllReduceDefaults(), EPDefaults(), FailoverDefaults(), JoinDefaults(), IdleDefaults()
	i.For = partOf(i.For, fraction)
	a.N, e.N, f.Kills, j.N = part(a.N, fraction), part(e.N, fraction), part(f.Kills, fraction), part(j.N, fraction)
	failover := func(f FailoverConfig) func() (*Result, error) {
		return func() (*Result, error) {
			if !faultpoint.Enabled && o.Killable == nil {
				r := newResult("failover", f, "%d ranks, %d kills, %s resident", f.Ranks, f.Kills, sizeText(f.Resident))
				r.Skipped = ErrNoFaultpoints.Error()
				return r, nil
			}
			return Failover(ctx, o, f)
		}
	}
	large, larger := f, f // of which nothing is asked
	large.Resident, larger.Resident = int64(float64(1<<30)*fraction), int64(float64(2<<30)*fraction)
	large.Kills, larger.Kills = part(largeKills, fraction), part(largeKills, fraction)
	var rs []*Result
	for _, run := range []func() (*Result, error){
		func() (*Result, error) { return AllReduce(ctx, o, a) },
		func() (*Result, error) { return EP(ctx, o, e) },
		failover(f),
		failover(large),
		failover(larger),
		func() (*Result, error) { return Join(ctx, o, j) },
		func() (*Result, error) { return Idle(ctx, o, i) },
	} {
		r, err := run()
		if err != nil {
			return nil, err
		}
		r.end()
		rs = append(rs, r)
	}
	return rs, nil
}

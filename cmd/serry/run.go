package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/internal/launch"
	"github.com/serry-project/serry/internal/slots"
)

const runHelp = `Starts N processes of a program as the ranks of one group, and serves the rendezvous where they find each other:
torch.distributed's TCPStore at MASTER_ADDR and MASTER_PORT, and our own protocol on the same port.

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, the TORCHELASTIC_
variables that torch reads, and SERRY_RENDEZVOUS. A rank that dies is started again as often as --max-restarts says, with
SERRY_REJOIN set, so that it joins the group anew; the others go on. A rank that ends with exit code 0 is done.

The exit code is 0 if all ranks ended with 0, or that of the first one that failed for good (128 + N for signal N), at
the end, when the others are done too. Ctrl-C (also SIGTERM, SIGHUP) is passed on to all ranks, and the exit code is then
130 (143, 129), whatever theirs are; what is left after --grace, or at the second Ctrl-C, is killed. A program that is
not there gives 127, one that cannot be executed 126, as with a shell; 2 is a wrong command line, 1 another failure of
serry itself. With --nnodes each launcher gives the code of its own ranks.

On several hosts run the same command on each, with --nnodes, its own --node-rank and the --rdzv of node 0, which the
others wait for up to a minute.`

const runExample = `  serry run -n 4 -- ./worker --steps 100
  serry run -n 8 --max-restarts 3 -- python train.py
  serry run -n 8 --nnodes 2 --node-rank 1 --rdzv node0:29500 -- ./worker`

type runFlags struct {
	launch.Config
	json, color string
	tag, quiet  bool
}

func runCommand() *cobra.Command {
	f := &runFlags{}
	cmd := &cobra.Command{
		Use:     "run [flags] [--] PROGRAM [ARGUMENT]...",
		Short:   "Start the ranks of a group and keep them going",
		Long:    runHelp,
		Example: runExample,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("which program? serry run -n 4 -- ./program")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			f.Command = args
			return f.run(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // flags after the program are the program's
	flags.SortFlags = false
	flags.IntVarP(&f.Ranks, "ranks", "n", 1, "ranks to start on this host")
	flags.IntVar(&f.Nodes, "nnodes", 1, "hosts; run the same command on each")
	flags.IntVar(&f.Node, "node-rank", 0, "number of this host, from 0")
	flags.StringVar(&f.Rendezvous, "rdzv", "", "host:port where node 0 serves the rendezvous (default: a free port of\n"+
		"127.0.0.1), or tcp://host:port of one that runs already")
	flags.StringVar(&f.RunID, "run-id", "", "tells runs on one rendezvous apart (default random)")
	flags.IntVar(&f.MaxRestarts, "max-restarts", 0, "how often each rank that failed is started again; -1 for no limit")
	flags.DurationVar(&f.Backoff, "backoff", launch.DefaultBackoff, "pause before the first restart of a rank; it doubles")
	flags.DurationVar(&f.BackoffMax, "backoff-max", launch.DefaultBackoffMax, "longest pause; a rank that lived longer starts over")
	flags.BoolVar(&f.FailFast, "fail-fast", false, "end all ranks when one has failed for good")
	flags.DurationVar(&f.Grace, "grace", launch.DefaultGrace, "from a signal that is passed on to SIGKILL; 0 kills at once")
	flags.StringVar(&f.LogDir, "log-dir", "", "directory for the ranks' output, a file rank-N.log each")
	flags.StringVar(&f.json, "json", "", "file for what happens to the ranks, as lines of JSON while it happens")
	flags.BoolVar(&f.tag, "tag", true, "mark each line with its rank; a rank that prints after this launcher was\n"+
		"killed with -9 gets SIGPIPE then. --tag=false: ranks write straight to our\noutput, and do not mind")
	flags.StringVar(&f.color, "color", "auto", "colour the marks: auto (on a terminal), always, never")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "no words of our own, no summary")
	return cmd
}

func (f *runFlags) run(stdout, stderr io.Writer) (err error) {
	if err := f.check(); err != nil {
		return &exitCode{exitUsage, err}
	}
	f.Color = f.color == "always" || f.color == "auto" && isTerminal(stdout)
	f.Untagged, f.Env = !f.tag, os.Environ()
	f.Stdout, f.Stderr = stdout, stderr
	if f.tag {
		mu := &sync.Mutex{} // one for both: they may be the same terminal
		f.Stdout, f.Stderr = oneAtATime{mu, stdout}, oneAtATime{mu, stderr}
	}
	say := f.Stderr
	if f.quiet {
		say = io.Discard
	}
	f.Log = logger(f.Stderr)

	var events *os.File
	onEvent := func(e launch.Event) { tell(say, e, f.MaxRestarts) }
	if f.json != "" {
		if events, err = os.OpenFile(f.json, os.O_WRONLY|os.O_CREATE, 0o644); err != nil {
			return fmt.Errorf("--json: %w", err)
		}
		defer func() { _ = events.Close() }()
		lines := launch.JSONLines(events, f.Log)
		f.OnEvent = func(e launch.Event) { lines(e); onEvent(e) }
	} else {
		f.OnEvent = onEvent
	}

	s := catch()
	defer s.release()
	l, err := launch.New(s.ctx, f.Config)
	if err != nil {
		if sig := s.first(); sig != 0 {
			return &exitCode{128 + int(sig), nil}
		}
		var usage *launch.UsageError // check has left nothing else that can be wrong
		if errors.As(err, &usage) {
			return fmt.Errorf("--rdzv: %w", err)
		}
		return err
	}
	s.deliver(l)
	if events != nil {
		_ = events.Truncate(0) // now that there is something new; what cannot be cut is a pipe or a terminal
	}
	if err = l.StartAll(); err != nil {
		_ = l.Wait()
		return errors.Join(err, l.Close())
	}
	err = l.Wait()
	if !f.quiet {
		summary(say, l.Results())
	}
	_ = l.Linger(s.ctx) // a signal ends it
	closeErr := l.Close()
	var failed *launch.ExitError
	if errors.As(err, &failed) {
		return &exitCode{failed.Code, closeErr}
	}
	return errors.Join(err, closeErr)
}

// check returns all that is wrong with the flags, by name, and takes a zero as it is meant.
func (f *runFlags) check() error {
	var bad []error
	want := func(ok bool, flag string, value any, want string, a ...any) bool {
		if !ok {
			bad = append(bad, fmt.Errorf("%s %v: want %s", flag, value, fmt.Sprintf(want, a...)))
		}
		return ok
	}
	want(slices.Contains([]string{"auto", "always", "never"}, f.color), "--color", f.color, "auto, always or never")
	ranks := want(1 <= f.Ranks && f.Ranks <= slots.Max, "--ranks", f.Ranks, "at least 1, at most %d", slots.Max)
	if want(f.Nodes >= 1, "--nnodes", f.Nodes, "at least 1") {
		want(0 <= f.Node && f.Node < f.Nodes, "--node-rank", f.Node, "a number from 0, below that of --nnodes (%d)", f.Nodes)
		want(!ranks || f.Nodes <= slots.Max/f.Ranks, "--nnodes", f.Nodes, "at most %d of --ranks %d: a world has at most %d ranks", slots.Max/max(f.Ranks, 1), f.Ranks, slots.Max)
	}
	want(f.MaxRestarts >= launch.Unlimited, "--max-restarts", f.MaxRestarts, "a number from 0, or %d for no limit", launch.Unlimited)
	want(f.Grace >= 0, "--grace", f.Grace, "a time from 0")
	if want(f.Backoff >= 0, "--backoff", f.Backoff, "a time from 0") {
		want(f.BackoffMax >= f.Backoff, "--backoff-max", f.BackoffMax, "at least that of --backoff (%v)", f.Backoff)
	}
	for _, d := range []*time.Duration{&f.Grace, &f.Backoff, &f.BackoffMax} {
		if *d == 0 {
			*d = 1 // in a Config 0 is the default
		}
	}
	return errors.Join(bad...)
}

// tell says to a person what they could not see otherwise.
func tell(w io.Writer, e launch.Event, most int) {
	switch e.Kind {
	case launch.Restarting:
		of := ""
		if most != launch.Unlimited {
			of = fmt.Sprintf(" of %d", most)
		}
		fmt.Fprintf(w, "serry: rank %d: %s; restart %d%s in %v\n", e.Rank, howEnded(e.Code, e.Signal), e.Restarts, of, e.Delay)
	case launch.GaveUp:
		fmt.Fprintf(w, "serry: rank %d: %s; no restart is left\n", e.Rank, howEnded(e.Code, e.Signal))
	case launch.Stopping:
		fmt.Fprintf(w, "serry: stopping all ranks: %s\n", e.Reason)
	}
}

func howEnded(code int, sig syscall.Signal) string {
	if sig != 0 {
		return "ended by " + launch.SignalName(sig)
	}
	return fmt.Sprintf("exit code %d", code)
}

func summary(w io.Writer, results []launch.Result) {
	for _, r := range results {
		restarts := fmt.Sprintf("%d restarts", r.Restarts)
		if r.Restarts == 1 {
			restarts = "1 restart"
		}
		how := "not started"
		if r.Ended {
			how = howEnded(r.Code, r.Signal)
		}
		fmt.Fprintf(w, "serry: rank %d: %s, %s, %v\n", r.Rank, how, restarts, r.Duration.Round(time.Millisecond))
	}
}

// logger writes warnings as a person reads them: no time, since they concern what is on the screen around them.
func logger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && f.Name() != os.DevNull
}

// Command demo serves a language model expert-parallel over worker processes, kills two of them in mid-sentence, and shows
// that no bit of any answer changes.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/serry-project/serry/examples/moe/model"
	"github.com/serry-project/serry/examples/moe/serve"

	"github.com/spf13/cobra"
)

// errDiffers is the demo's one unforgivable result.
var errDiffers = errors.New("the answers are NOT identical to those of a single process")

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

type options struct {
	ranks, prompts, most, replicas, flip int
	out, weights, links                  string
	patience                             time.Duration
	sampling                             serve.Sampling
	noKill, plain, json                  bool
}

// grace is how long the demo may take to end after a signal.
const grace = 5 * time.Second

// stopped is the signal that ended the demo.
type stopped struct{ sig syscall.Signal }

func (s stopped) Error() string { return "stopped by " + s.sig.String() }

// run is main with its surroundings as arguments. Exit codes: 0, 1 an error, 2 bad usage, 3 not identical, 128 and the
// number of a signal that ended it.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	returned := make(chan struct{})
	defer close(returned)
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(sigs)
	go func() {
		select {
		case s := <-sigs:
			sig := s.(syscall.Signal)
			stop(stopped{sig}) // which ends all workers
			select {
			case <-returned:
			case <-time.After(grace): // nobody reads what we print
				os.Exit(128 + int(sig))
			}
		case <-returned:
		}
	}()
	usage := true
	err := command(stdout, stderr, args, &usage, func(o options) error { return demo(ctx, o, stdout, stderr) },
		func(job string) error { return worker(ctx, job) })
	if err == nil {
		return 0
	}
	var s stopped
	if cause := context.Cause(ctx); errors.As(cause, &s) {
		err = s
	}
	fmt.Fprintln(stderr, "demo:", err)
	switch {
	case errors.As(err, &s):
		return 128 + int(s.sig)
	case usage:
		return 2
	case errors.Is(err, errDiffers):
		return 3
	}
	return 1
}

// command reads the command line and runs what it says. usage becomes false once that is understood.
func command(stdout, stderr io.Writer, args []string, usage *bool, demo func(options) error, worker func(string) error) error {
	var o options
	cmd := &cobra.Command{
		Use:           "demo",
		Short:         "Serve a MoE language model over processes that are killed and replaced, and compare every bit",
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(*cobra.Command, []string) error {
			if err := o.check(); err != nil {
				return err
			}
			*usage = false
			return demo(o)
		},
	}
	f := cmd.Flags()
	f.IntVarP(&o.ranks, "ranks", "n", 4, "worker processes, 1 to 16; of fewer than 3 none is killed")
	f.IntVar(&o.prompts, "prompts", len(prompts), fmt.Sprintf("prompts to answer, 1 to %d", len(prompts)))
	f.IntVar(&o.most, "max", 400, "bytes to generate for each prompt")
	f.IntVar(&o.replicas, "replicas", 2, "replicas of each expert; 1: a kill loses experts, and the answers differ")
	f.Float64Var(&o.sampling.Temperature, "temperature", 0.7, "of the sampling; 0: always the likeliest byte")
	f.IntVar(&o.sampling.TopK, "top-k", 40, "sample among so many of the likeliest bytes; 0: among all")
	f.Uint64Var(&o.sampling.Seed, "seed", 1, "of the sampling")
	f.IntVar(&o.flip, "flip", -1, "rank whose weights get one wrong bit, to see that it is noticed; -1: none")
	f.StringVar(&o.out, "out", "out/demo", "folder for report.json, answers.txt, timeline.svg, timeline.png")
	f.StringVar(&o.weights, "weights", "examples/moe/weights/model.safetensors", "the model")
	f.StringVar(&o.links, "links", "auto", "auto (shared memory on one host) or tcp")
	f.DurationVar(&o.patience, "patience", 20*time.Second, "give up when no process has done anything for so long")
	f.BoolVar(&o.noKill, "no-kill", false, "let everybody live")
	f.BoolVar(&o.plain, "plain", false, "lines instead of a picture that is redrawn, as without a terminal")
	f.BoolVar(&o.json, "json", false, "print the report alone to stdout, and what happens to stderr")
	cmd.AddCommand(&cobra.Command{
		Use: "worker JOB", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, a []string) error { *usage = false; return worker(a[0]) },
	})
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetHelpCommand(&cobra.Command{Hidden: true})
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	return cmd.Execute()
}

func (o *options) check() error {
	switch {
	case o.ranks < 1 || o.ranks > 16:
		return fmt.Errorf("--ranks is %d, want 1 to 16", o.ranks)
	case o.prompts < 1 || o.prompts > len(prompts):
		return fmt.Errorf("--prompts is %d, want 1 to %d", o.prompts, len(prompts))
	case o.most < 1:
		return fmt.Errorf("--max is %d, want at least 1", o.most)
	case o.replicas < 1 || o.replicas > 16:
		return fmt.Errorf("--replicas is %d, want 1 to 16", o.replicas)
	case o.flip < -1 || o.flip >= o.ranks:
		return fmt.Errorf("--flip is %d, want a rank, 0 to %d, or -1", o.flip, o.ranks-1)
	case !(o.sampling.Temperature >= 0 && o.sampling.Temperature < 1000):
		return fmt.Errorf("--temperature is %v, want 0 or more", o.sampling.Temperature)
	case o.sampling.TopK < 0:
		return fmt.Errorf("--top-k is %d, want 0 or more", o.sampling.TopK)
	case o.patience < time.Second:
		return fmt.Errorf("--patience is %v, want at least a second", o.patience)
	case o.links != "auto" && o.links != "tcp":
		return fmt.Errorf("--links is %q, want auto or tcp", o.links)
	case o.ranks < 3:
		o.noKill = true
	}
	o.replicas = min(o.replicas, o.ranks)
	return nil
}

// demo is the whole of it.
func demo(ctx context.Context, o options, stdout, stderr io.Writer) error {
	show := stdout
	if o.json {
		show = stderr
	}
	res, err := newResults(o.out)
	if err != nil {
		return err
	}
	m, err := model.Load(o.weights, nil)
	if err != nil {
		return err
	}
	j := job{Weights: o.weights, Experts: m.Experts, Serve: serve.Config{
		Prompts: prompts[:o.prompts], Max: o.most, Sampling: o.sampling, Replicas: o.replicas,
	}}
	if o.flip >= 0 {
		if j.Flip, err = findFlip(ctx, m, j.Serve, o.ranks, o.flip); err != nil {
			return err
		}
	}
	fmt.Fprintf(show, "model: %d layers of %d experts (top %d), hidden %d, %.1f MiB of experts in f32\n",
		m.Layers, m.Experts, m.TopK, m.Hidden, mib(m.ResidentExpertBytes()))
	want, total, err := single(ctx, m, j.Serve, show, isTerminal(show) && !o.plain)
	if err != nil {
		return err
	}
	fmt.Fprintf(show, "%d processes: every expert on %d of them, %s links\n", o.ranks, o.replicas, o.links)
	s := newScreen(show, o.plain)
	defer s.close()
	w := newWatcher(s, j.Serve.Prompts, want, o.ranks, total)
	kills, rejoins, err := play(ctx, o, j, w)
	s.close()
	if err != nil {
		return err
	}
	r := w.report(o, kills, rejoins)
	r.Model = fmt.Sprintf("%x", m.Digest)
	written := res.write(w, r)
	var text bytes.Buffer
	if o.json {
		e := json.NewEncoder(&text)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		w.summary(&text, r, o.out)
	}
	if err == nil {
		_, err = stdout.Write(text.Bytes())
	}
	return errors.Join(r.verdict(), written, err)
}

// single answers the prompts in this process, for comparison, and counts on a terminal. total is the number of bytes.
func single(ctx context.Context, m *model.Model, cfg serve.Config, show io.Writer, counts bool) (want []serve.Answer, total int, err error) {
	begin := time.Now()
	progress := func(int) {}
	if counts {
		progress = func(done int) {
			fmt.Fprintf(show, "\rsingle process: %d of %d prompts", done, len(cfg.Prompts))
		}
	}
	want, err = serve.Reference(ctx, m, cfg, progress)
	if err != nil {
		return nil, 0, err
	}
	for _, a := range want {
		total += len(a.Hashes)
	}
	took := time.Since(begin).Seconds()
	if counts {
		fmt.Fprint(show, "\r"+eraseEnd)
	}
	fmt.Fprintf(show, "single process: %d prompts answered for comparison, %d bytes in %.1f s\n", len(want), total, took)
	return want, total, nil
}

// play runs the workers and what happens to them, until all is answered.
func play(ctx context.Context, o options, j job, w *watcher) (kills []*kill, rejoins []rejoin, err error) {
	c, err := startCluster(ctx, o, j, w)
	if err != nil {
		return nil, nil, err
	}
	defer c.close()
	stop := w.painter()
	defer stop()
	if !o.noKill {
		if err := c.drama(); err != nil {
			return nil, nil, err
		}
	}
	if err := c.finish(); err != nil {
		return nil, nil, err
	}
	return c.kills, c.rejoins, nil
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

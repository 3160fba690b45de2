// Command demo serves a language model expert-parallel over worker processes, kills two of them in mid-sentence, and shows
// that no bit of any answer changes.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
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
	noKill, noReference, json            bool
}

// run is main with its surroundings as arguments. Exit codes: 0, 1 an error, 2 bad usage, 3 not identical, 130 SIGINT.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var o options
	usage := true
	cmd := &cobra.Command{
		Use:           "demo",
		Short:         "Serve a MoE language model over processes that are killed and replaced, and compare every bit",
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(*cobra.Command, []string) error {
			usage = false
			return demo(ctx, o, stdout, stderr)
		},
	}
	f := cmd.Flags()
	f.IntVarP(&o.ranks, "ranks", "n", 4, "worker processes")
	f.IntVar(&o.prompts, "prompts", len(prompts), "prompts to answer")
	f.IntVar(&o.most, "max", 400, "bytes to generate for each prompt")
	f.IntVar(&o.replicas, "replicas", 2, "replicas of each expert; 1: a kill loses experts")
	f.IntVar(&o.flip, "flip", -1, "rank whose weights get one wrong bit, to see that it is noticed")
	f.StringVar(&o.out, "out", "out/demo", "folder for report.json, timeline.svg, timeline.png")
	f.StringVar(&o.weights, "weights", "examples/moe/weights/model.safetensors", "the model")
	f.StringVar(&o.links, "links", "auto", "auto (shared memory on one host) or tcp")
	f.BoolVar(&o.noKill, "no-kill", false, "let everybody live")
	f.BoolVar(&o.json, "json", false, "print the report instead of what happens")
	work := &cobra.Command{
		Use: "worker JOB", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, a []string) error { usage = false; return worker(ctx, a[0]) },
	}
	cmd.AddCommand(work)
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.Execute()
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "demo:", err)
	switch {
	case usage:
		return 2
	case ctx.Err() != nil:
		return 130
	case errors.Is(err, errDiffers):
		return 3
	}
	return 1
}

func (o *options) check() error {
	switch {
	case o.ranks < 1 || o.ranks > 16:
		return fmt.Errorf("--ranks is %d, want 1 to 16", o.ranks)
	case o.prompts < 1 || o.prompts > len(prompts):
		return fmt.Errorf("--prompts is %d, want 1 to %d", o.prompts, len(prompts))
	case o.most < 1:
		return fmt.Errorf("--max is %d, want at least 1", o.most)
	case o.replicas < 1 || o.replicas > o.ranks:
		return fmt.Errorf("--replicas is %d, want 1 to %d", o.replicas, o.ranks)
	case o.links != "auto" && o.links != "tcp":
		return fmt.Errorf("--links is %q, want auto or tcp", o.links)
	case o.ranks < 3:
		o.noKill = true
	}
	return nil
}

func demo(ctx context.Context, o options, stdout, stderr io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	show := stdout
	if o.json {
		show = stderr
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	m, err := model.Load(o.weights, nil)
	if err != nil {
		return err
	}
	ps := prompts[:o.prompts]
	fmt.Fprintf(show, "model: %d layers of %d experts (top %d), hidden %d, %.1f MiB of experts in f32\n",
		m.Layers, m.Experts, m.TopK, m.Hidden, float64(m.ResidentExpertBytes())/(1<<20))
	fmt.Fprintf(show, "single process: answering %d prompts, %d bytes each, for comparison\n", len(ps), o.most)
	begin := time.Now()
	want, err := serve.Reference(ctx, m, ps, o.most, func(done int) { fmt.Fprintf(show, "\r  %d/%d", done, len(ps)) })
	if err != nil {
		return err
	}
	n := 0
	for _, a := range want {
		n += len(a.Hashes)
	}
	fmt.Fprintf(show, "\r  %d bytes in %.1f s\n", n, time.Since(begin).Seconds())

	j := job{Weights: o.weights, Experts: m.Experts, Flip: o.flip, Serve: serve.Config{Prompts: ps, Max: o.most, Replicas: o.replicas}}
	b, err := json.Marshal(j)
	if err != nil {
		return err
	}
	path := filepath.Join(o.out, "job.json")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	w := newWatcher(show, ps, want)
	c, err := startCluster(ctx, o, path, w, stderr)
	if err != nil {
		return err
	}
	defer c.stop()
	kills, rejoins, err := c.drama(ctx, o, n)
	if err != nil {
		return err
	}
	if err := c.wait(ctx); err != nil {
		return err
	}
	r := w.report(o.ranks, o.links, kills, rejoins)
	if err := w.write(o.out, r); err != nil {
		return err
	}
	if o.json {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		if err := e.Encode(r); err != nil {
			return err
		}
	} else {
		w.summary(stdout, r, o.out)
	}
	if !r.Identical {
		return errDiffers
	}
	return nil
}

// summary is what a person wants to know at the end.
func (w *watcher) summary(out io.Writer, r *report, dir string) {
	fmt.Fprintln(out)
	for i, t := range w.text {
		fmt.Fprintf(out, "--- answer %d\n%s\x1b[0m%s\n", i, w.prompts[i], t)
	}
	fmt.Fprintln(out)
	for _, k := range r.Kills {
		fmt.Fprintf(out, "kill -9 of rank %d: new view after %.1f ms, every survivor went on after %.1f ms (epoch %d), %d requests taken over\n",
			k.Rank, k.DetectMs, k.ResumeMs, k.Epoch, k.Taken)
	}
	for _, j := range r.Rejoins {
		fmt.Fprintf(out, "rank %d again: first step %.0f ms after its call of Join (%.0f ms after the start of its process)\n", j.Rank, j.JoinMs, j.TotalMs)
	}
	fmt.Fprintf(out, "bytes per second: %.0f before the first kill, %.0f until the last replacement served, %.0f after\n", r.Before, r.During, r.After)
	for _, k := range r.Ranks {
		fmt.Fprintf(out, "rank %d: %.2f of %.2f MiB of experts resident, %.0f %% of its expert rows computed elsewhere, %.1f MiB given to other ranks\n",
			k.Rank, float64(k.ExpertBytes)/(1<<20), float64(k.AllExperts)/(1<<20), 100*k.RemoteShare, float64(k.LinkBytes)/(1<<20))
	}
	fmt.Fprintf(out, "identical to a single process, every byte and every logit's bits: %v (%d bytes, lost mass %g)\n", r.Identical, r.Tokens, r.LostMass)
	for _, d := range r.Differs {
		fmt.Fprintln(out, "  differs:", d)
	}
	fmt.Fprintf(out, "report: %s, timeline: %s\n", filepath.Join(dir, "report.json"), filepath.Join(dir, "timeline.png"))
}

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/internal/sim"
)

func simCommand() *cobra.Command {
	var o sim.Options
	var seed uint64
	var n, threads int
	var jsonFile string
	var quiet bool
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run simulated worlds by the thousand, and check every promise",
		Long: `Run the code that production runs (process groups, agreement, collectives, links) in simulated worlds: processes on
hosts, shared memory, connections and clocks, with faults, all drawn from a seed, in virtual time. Everything that the
processes see is checked against the promises P1 to P10, and every result against what its contributors give.

The same seed does exactly the same. A schedule that breaks a promise is told with its seed, and with as few of its
faults as still break it; --trace prints what happens in it, line by line:

  serry sim --seed 4711 --schedules 1 --trace

The exit code is 1 if a promise was not kept.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if n < 1 || threads < 1 {
				return &exitCode{exitUsage, fmt.Errorf("--schedules and --threads must be 1 or more")}
			}
			if threads > 1024 {
				return &exitCode{exitUsage, fmt.Errorf("--threads %d: want at most 1024", threads)}
			}
			if o.Trace && jsonFile == "-" {
				return &exitCode{exitUsage, fmt.Errorf("--trace and --json - both want stdout: give --json a file")}
			}
			if jsonFile != "" && jsonFile != "-" { // before the work, not after it
				f, err := os.OpenFile(jsonFile, os.O_CREATE|os.O_WRONLY, 0o644)
				if err != nil {
					return fmt.Errorf("--json: %w", err)
				}
				_ = f.Close()
			}
			if o.Ranks == 1 || o.Ranks < 0 || o.Ranks > 64 || o.Hosts < 0 || o.Hosts > 16 {
				return &exitCode{exitUsage, fmt.Errorf("--ranks is 2 to 64, --hosts 1 to 16 (0: drawn)")}
			}
			if o.Trace {
				var r sim.Runner
				for i := range uint64(n) {
					fmt.Fprintf(cmd.OutOrStdout(), "seed %d\n%s", seed+i, r.Run(seed+i, o).Trace)
				}
				o.Trace = false
			}
			s := catch()
			defer s.release()
			begin := time.Now()
			progress := func(done, failed int) {
				fmt.Fprintf(cmd.ErrOrStderr(), "\r%d of %d schedules, %d failed, %v ", done, n, failed, time.Since(begin).Round(time.Second))
			}
			if quiet {
				progress = nil
			}
			b := sim.Run(s.ctx, seed, n, threads, o, progress)
			if !quiet {
				fmt.Fprint(cmd.ErrOrStderr(), "\r\033[K")
			}
			b.Command = "serry " + strings.Join(os.Args[1:], " ")
			if err := simResult(cmd.OutOrStdout(), b, jsonFile); err != nil {
				return err
			}
			if sig := s.first(); sig != 0 {
				return &exitCode{128 + int(sig), fmt.Errorf("interrupted (%v) after %d schedules", sig, b.Schedules)}
			}
			if b.Violations > 0 {
				return fmt.Errorf("a promise was broken in %d of %d schedules: seeds %v", len(b.SeedsFailed), b.Schedules, head(b.SeedsFailed))
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&n, "schedules", 20_000, "how many worlds")
	f.Uint64Var(&seed, "seed", 1, "seed of the first; the others follow")
	f.IntVar(&threads, "threads", runtime.NumCPU(), "worlds at once")
	f.IntVar(&o.Ranks, "ranks", 0, "ranks that found each world (0: 2 to 64, drawn)")
	f.IntVar(&o.Hosts, "hosts", 0, "hosts of each world (0: 1 to 16, drawn)")
	f.BoolVar(&o.Trace, "trace", false, "print what happens")
	f.StringVar(&jsonFile, "json", "", "write the result as JSON to this file (-: stdout, instead of the text)")
	f.BoolVarP(&quiet, "quiet", "q", false, "no progress on stderr")
	return cmd
}

func head(seeds []uint64) any {
	if len(seeds) > 10 {
		return fmt.Sprint(seeds[:10], " and more")
	}
	return seeds
}

func simResult(out io.Writer, b *sim.Batch, jsonFile string) error {
	if jsonFile != "" {
		text, err := json.MarshalIndent(b, "", "  ")
		if err != nil {
			return err
		}
		text = append(text, '\n')
		if jsonFile == "-" {
			_, err = out.Write(text)
			return err
		}
		if err := os.WriteFile(jsonFile, text, 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "%d schedules from seed %d in %.0f s (%.0f/s, %d cores): %d operations, %d views, %d accesses to shared words, %.0f s of virtual time; %d distinct ends, up to %d ranks\n",
		b.Schedules, b.Seed, b.Seconds, b.PerSecond, b.Cores, b.Operations, b.Views, b.Accesses, b.Virtual, b.EndStates, b.Deepest)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "fault\tin % of the schedules\t")
	for _, k := range sim.Kinds() {
		fmt.Fprintf(t, "%v\t%.2f\t\n", k, 100*b.Coverage[k.String()])
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, f := range b.Failed {
		fmt.Fprintf(out, "seed %d, %d ranks: %s\n  faults: %s\n  not needed: %v\n", f.Seed, f.Ranks, strings.Join(f.Violations, "\n  "), strings.Join(f.Faults, "; "), f.Without)
	}
	fmt.Fprintf(out, "violations: %d\n", b.Violations)
	return nil
}

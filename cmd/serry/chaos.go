package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/internal/chaos"
	"github.com/serry-project/serry/internal/faultpoint"
)

func chaosCommand() *cobra.Command {
	cfg := chaos.Defaults()
	var jsonFile, keep, tagged, scenario string
	var quiet bool
	var resident int64
	names, about := chaos.Kinds()
	var kinds strings.Builder
	for i := range names {
		fmt.Fprintf(&kinds, "  %-7s %s\n", names[i], about[i])
	}
	cmd := &cobra.Command{
		Use:   "chaos",
		Short: "Do to ranks what can happen to them, and check every promise",
		Long: `Run ranks as processes through a program that is drawn from the seed (every operation, overlapping groups made and
closed on the way, several asynchronous operations at a time, messages, dispatch and combine), do faults to them, and
check all that they have seen against the promises P1 to P10, and every result against what its contributors give.
A seed fixes the program and the faults; in which order processes run it cannot.

The kinds of faults (--kinds):
` + kinds.String() + `
With --hosts the ranks run in network namespaces that are made for it and end with it; that takes root.

To kill ranks at named points of the code takes a binary that is built with them: go build -tags faultpoint -o
serry-faultpoint ./cmd/serry, used itself or named with --faultpoint.

--scenario runs a scenario with its bars instead of drawn faults; --scenario list lists them, and all runs all.

The exit code is 1 if a promise was not kept; the histories are then kept, and the output says where. A bar that is
missed changes no exit code, because a busy machine misses it too.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if scenario == "list" {
				t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				for _, s := range chaos.Scenarios() {
					fmt.Fprintf(t, "%s\t%s\n", s.Name, s.About)
				}
				return t.Flush()
			}
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			o := chaos.Options{Self: []string{exe, "chaos", "rank"}, Tagged: faultpoint.Enabled, Keep: keep}
			if tagged != "" {
				if tagged, err = exec.LookPath(tagged); err != nil {
					return fmt.Errorf("--faultpoint: %w", err)
				}
				if tagged, err = filepath.Abs(tagged); err != nil {
					return err
				}
				o.Self[0], o.Tagged = tagged, true
			}
			if !quiet {
				o.Progress = cmd.ErrOrStderr()
			}
			cfg.Command = "serry " + strings.Join(os.Args[1:], " ")
			cfg.Resident = resident << 20
			s := catch()
			defer s.release()
			results, err := chaos.RunScenarios(s.ctx, o, cfg, scenario)
			if sig := s.first(); sig != 0 {
				return &exitCode{128 + int(sig), fmt.Errorf("interrupted (%v)", sig)}
			}
			if err != nil {
				return err
			}
			return chaosResults(cmd, results, jsonFile, scenario == "all")
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Ranks, "ranks", cfg.Ranks, "number of ranks, from 3")
	f.IntVar(&cfg.Faults, "faults", cfg.Faults, "number of faults")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "what all is drawn from")
	f.StringVar(&cfg.Links, "links", cfg.Links, "shm: shared memory; tcp: sockets only; mixed: half of the ranks each")
	f.IntVar(&cfg.Hosts, "hosts", cfg.Hosts, "number of hosts, as network namespaces (1: all ranks on this one)")
	f.StringSliceVar(&cfg.Kinds, "kinds", nil, "kinds of faults, separated by commas (default: all that can be done)")
	f.StringSliceVar(&cfg.Points, "points", nil, "fault points, separated by commas (default: all)")
	f.Int64Var(&resident, "resident", 64, "memory of each rank, in MiB")
	f.DurationVar(&cfg.Deadline, "deadline", cfg.Deadline, "how late a rank may be")
	f.IntVar(&cfg.PerWorld, "per-world", cfg.PerWorld, "faults before another program is begun")
	f.StringVar(&scenario, "scenario", "", "a scenario with bars, list, or all")
	f.StringVar(&tagged, "faultpoint", "", "a serry built with -tags faultpoint, for the ranks")
	f.StringVar(&keep, "keep", filepath.Join(os.TempDir(), "serry-chaos-kept"), "directory for the histories of what went wrong")
	f.StringVar(&jsonFile, "json", "", "write the result as JSON to this file (-: stdout, instead of the text)")
	f.BoolVarP(&quiet, "quiet", "q", false, "no progress on stderr")
	cmd.AddCommand(&cobra.Command{
		Use: "rank JSON", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return chaos.Rank(context.Background(), args[0], os.Stdin, os.Stdout)
		},
	})
	return cmd
}

// chaosResults writes what came out, and says by its error whether a promise was not kept.
func chaosResults(cmd *cobra.Command, results []*chaos.Result, jsonFile string, all bool) error {
	if jsonFile != "" {
		var doc any = results
		if !all {
			doc = results[0]
		}
		b, err := json.MarshalIndent(doc, "", "  ")
		if err != nil {
			return err
		}
		if jsonFile == "-" {
			_, err = cmd.OutOrStdout().Write(append(b, '\n'))
		} else {
			err = os.WriteFile(jsonFile, append(b, '\n'), 0o644)
		}
		if err != nil {
			return fmt.Errorf("--json: %w", err)
		}
	}
	failed := false
	for _, r := range results {
		if jsonFile != "-" {
			r.Print(cmd.OutOrStdout())
		}
		failed = failed || r.Failed()
	}
	if failed {
		return errors.New("chaos: a promise was not kept")
	}
	return nil
}

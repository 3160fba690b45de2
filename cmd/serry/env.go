package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/rendezvous"
)

// variable is a line of serry env.
type variable struct {
	Name    string   `json:"name"`
	Aliases []string `json:"aliases,omitempty"`
	Type    string   `json:"type"`
	Allowed string   `json:"allowed,omitempty"`
	Default string   `json:"default"`
	Value   string   `json:"value"`
	From    string   `json:"from,omitempty"` // the variable that it comes from; empty: the default
	Doc     string   `json:"doc"`
	Error   string   `json:"error,omitempty"`
}

func envCommand() *cobra.Command {
	var asJSON, all bool
	cmd := &cobra.Command{
		Use:   "env",
		Short: "List every environment variable that is read, with its present value",
		Long: `Lists every environment variable that serry reads, with what it does and its present value. * marks those that are set.

The exit code is 1 if a rank could not start with them: one has a value that cannot be used, alone or with the others, or
a SERRY_ variable is set that means nothing. (Names that begin with SERRY_TEST_ and SERRY_HARNESS_ are left to tests.)
Whether the rendezvous answers is not tried.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			bad := checkEnv()
			vs := variables(all, bad)
			var err error
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				err = e.Encode(vs)
			} else {
				err = table(cmd.OutOrStdout(), vs)
			}
			if err == nil && len(bad) > 0 {
				err = errors.Join(bad...)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as a JSON array")
	cmd.Flags().BoolVar(&all, "all", false, "also what launchers set and is not set now")
	return cmd
}

// variables are those to list, each with what is wrong with it.
func variables(all bool, bad []error) (vs []variable) {
	for _, s := range knob.List() {
		if !all && !strings.HasPrefix(s.Name, "SERRY_") && s.From == "" {
			continue // what launchers set
		}
		v := variable{Name: s.Name, Aliases: s.Aliases, Type: s.Type, Allowed: s.Allowed, Default: s.Default, Value: s.Value, From: s.From, Doc: s.Doc}
		for _, err := range bad {
			var k *knob.Error
			var e *rendezvous.EnvError
			if errors.As(err, &k) && (k.Name == s.Name || k.Name == s.From) || errors.As(err, &e) && e.Name == s.Name {
				v.Error = err.Error()
			}
		}
		vs = append(vs, v)
	}
	return vs
}

func table(out io.Writer, vs []variable) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, v := range vs {
		mark, value := " ", v.Value
		if v.From != "" {
			mark = "*"
		}
		if value == "" {
			value = "-"
		}
		fmt.Fprintf(w, "%s %s\t%s\t%s\t%s\n", mark, v.Name, value, v.Type, v.Doc)
	}
	return w.Flush()
}

// checkEnv returns what pg.FromEnv and pg.Join would refuse, as far as that shows without a network.
func checkEnv() []error {
	bad := knob.Check()
	if len(bad) > 0 { // they would be said again
		return bad
	}
	wrong := func(name, value, want string) {
		bad = append(bad, &knob.Error{Name: name, Value: value, Allowed: want})
	}
	if err := rendezvous.CheckEnv(knob.Getenv); err != nil {
		bad = append(bad, err)
	}
	size, _ := knob.WorldSize.Get()
	if size > slots.Max {
		wrong(knob.WorldSize.Name(), fmt.Sprint(size), fmt.Sprintf("at most %d ranks", slots.Max))
		return bad
	}
	depth, _ := knob.Depth.Get()
	shm, _ := knob.ShmBytes.Get()
	if need := arena(size, depth); need > shm {
		wrong(knob.ShmBytes.Name(), knob.Bytes(shm), fmt.Sprintf("at least %s for %s=%d and the slots of a world by default",
			knob.Bytes((need+1<<20-1)>>20<<20), knob.Depth.Name(), depth))
	}
	if dir, _ := knob.SocketDir.Get(); dir != "" {
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			wrong(knob.SocketDir.Name(), dir, "a directory that is there")
		}
	}
	peers, _ := knob.Peers.Get()
	for _, p := range peers {
		if !strings.HasPrefix(p, invitation) {
			wrong(knob.Peers.Name(), p, fmt.Sprintf("invitations (World.Invite), which start with %q", invitation))
		}
	}
	return bad
}

// What pg takes without options: a test compares them.
const (
	invitation  = "serry1:"
	worldSlot   = 1 << 20
	worldBeside = 64 << 10
)

// arena is the shared memory that a world takes by default.
func arena(size, depth int) int64 {
	return int64(collectives.Shape{Size: max(size, 1), SlotBytes: worldSlot, Depth: depth, Lanes: 1}.Bytes()) + worldBeside
}

package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/internal/knob"
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
		Long: `Lists every environment variable that serry reads, with what it does and its present value. * marks those that are set. The
exit code is 1 if one cannot be used, or if a SERRY_ variable is set that means nothing.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			var vs []variable
			for _, s := range knob.List() {
				if !all && !strings.HasPrefix(s.Name, "SERRY_") && s.From == "" {
					continue // what launchers set
				}
				v := variable{Name: s.Name, Aliases: s.Aliases, Type: s.Type, Allowed: s.Allowed, Default: s.Default, Value: s.Value, From: s.From, Doc: s.Doc}
				if s.Err != nil {
					v.Error = s.Err.Error()
				}
				vs = append(vs, v)
			}
			if asJSON {
				e := json.NewEncoder(out)
				e.SetIndent("", "  ")
				if err := e.Encode(vs); err != nil {
					return err
				}
			} else {
				w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				for _, v := range vs {
					mark := " "
					if v.From != "" {
						mark = "*"
					}
					fmt.Fprintf(w, "%s %s\t%s\t%s\t%s\n", mark, v.Name, dash(v.Value), v.Type, v.Doc)
				}
				if err := w.Flush(); err != nil {
					return err
				}
			}
			bad := knob.Check()
			for _, err := range bad {
				fmt.Fprintln(cmd.ErrOrStderr(), "serry:", err)
			}
			if len(bad) > 0 {
				return &exitCode{code: exitFailed}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as a JSON array")
	cmd.Flags().BoolVar(&all, "all", false, "also what launchers set and is not set now")
	return cmd
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

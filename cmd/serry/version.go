package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/internal/wire"
)

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which serry this is, and which wire version it speaks",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version  string `json:"version"`
				Revision string `json:"revision,omitempty"`
				Modified bool   `json:"modified,omitempty"`
				Wire     string `json:"wire"`
				Go       string `json:"go"`
				System   string `json:"system"`
			}{Version: "(devel)", Wire: fmt.Sprintf("%d.%d", wire.Major, wire.Minor), Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH}
			if b, ok := debug.ReadBuildInfo(); ok {
				if b.Main.Version != "" {
					v.Version = b.Main.Version
				}
				for _, s := range b.Settings {
					switch s.Key {
					case "vcs.revision":
						v.Revision = s.Value
					case "vcs.modified":
						v.Modified = s.Value == "true"
					}
				}
			}
			out := cmd.OutOrStdout()
			if asJSON {
				return json.NewEncoder(out).Encode(v)
			}
			_, err := fmt.Fprintf(out, "serry %s, wire %s, %s %s\n", v.Version, v.Wire, v.Go, v.System)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	return cmd
}

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/internal/chaos"
)

func TestChaosCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"chaos", "--scenario", "list"}, 0, "coordinator"},
		{[]string{"chaos", "--help"}, 0, "--scenario"},
		{[]string{"chaos", "--scenario", "none"}, 2, "want list, all or one of kills"},
		{[]string{"chaos", "--ranks", "2"}, 2, "--ranks 2: want a number from 3"},
		{[]string{"chaos", "--kinds", "rain"}, 2, "want some of point,kill"},
		{[]string{"chaos", "--faultpoint", "/nowhere/serry"}, 1, "--faultpoint"},
		{[]string{"chaos", "extra"}, 2, "unknown command"},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, c.code, run(c.args, &out, &errs), "%v: %s", c.args, errs.String())
		require.Contains(t, out.String()+errs.String(), c.says, "%v", c.args)
	}
}

// TestChaosResults: what others read from the JSON, and the exit code by a violation.
func TestChaosResults(t *testing.T) {
	r := &chaos.Result{Name: "chaos", Seed: 3, Faults: 2, ByPoint: map[string]chaos.Point{"seal.after": {Faults: 2}}}
	file := filepath.Join(t.TempDir(), "chaos.json")
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	require.NoError(t, chaosResults(cmd, []*chaos.Result{r}, file, false))
	require.Contains(t, out.String(), "seal.after")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var doc map[string]any
	require.NoError(t, json.Unmarshal(b, &doc))
	for _, key := range []string{"faults", "violations", "hangs", "wrong_blames", "resume_ms", "by_point", "command", "seed", "machine"} {
		require.Contains(t, doc, key)
	}
	for _, key := range []string{"p50", "p99", "max"} {
		require.Contains(t, doc["resume_ms"], key)
	}
	r.Violations = 1
	require.Error(t, chaosResults(cmd, []*chaos.Result{r}, "", false))
}

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const weights = "--weights=../../weights/model.safetensors"

func bpb(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	err = run(args, strings.NewReader(stdin), &out, &errOut)
	return out.String(), errOut.String(), err
}

func TestReport(t *testing.T) {
	out, _, err := bpb(t, "", weights, "--bytes=2500", "--json")
	require.NoError(t, err)
	var r report
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, 2500, r.SampleBytes)
	require.Greater(t, r.HeldOutFiles, 100)
	require.Greater(t, r.BitsPerByte, 0.5)
	require.Less(t, r.BitsPerByte, 4.0)
	require.True(t, r.XZ != nil || r.XZNote != "")

	t.Setenv("PATH", filepath.Dir(goTool(t))) // no xz there, most likely
	out, _, err = bpb(t, "", weights, "--bytes=600")
	require.NoError(t, err)
	require.Contains(t, out, "600 bytes")
	require.Contains(t, out, "xz")
}

func goTool(t *testing.T) string {
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if _, err := os.Stat(filepath.Join(dir, "go")); err == nil {
			return filepath.Join(dir, "go")
		}
	}
	t.Skip("no go tool in PATH")
	return ""
}

func TestLogitsAndGreedy(t *testing.T) {
	out, _, err := bpb(t, "func", weights, "--logits=-")
	require.NoError(t, err)
	var l struct {
		Vocab  int
		Logits []float32
	}
	require.NoError(t, json.Unmarshal([]byte(out), &l))
	require.Len(t, l.Logits, 5*l.Vocab)

	out, _, err = bpb(t, "", weights, "--greedy=package ", "--n=5")
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(out, "package "))
	require.LessOrEqual(t, len(out), len("package ")+6)
}

func TestErrors(t *testing.T) {
	_, usage, err := bpb(t, "", "--help")
	require.ErrorIs(t, err, flag.ErrHelp)
	require.Contains(t, usage, "Usage: bpb [flags]")
	_, _, err = bpb(t, "", "extra")
	require.ErrorContains(t, err, `unexpected argument "extra"`)
	_, _, err = bpb(t, "", "--bytes=-1")
	require.ErrorContains(t, err, "--bytes is -1, want 0 or more")
	_, _, err = bpb(t, "", "--weights=none")
	require.ErrorContains(t, err, "name the weight file with --weights")
	_, _, err = bpb(t, "", weights, "--goroot="+t.TempDir())
	require.ErrorContains(t, err, "name a GOROOT that has its src folder")
	_, _, err = bpb(t, strings.Repeat("x", 512), weights, "--logits=-")
	require.ErrorContains(t, err, "at most 511 fit the context")
}

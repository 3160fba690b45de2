package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/png"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	weights = "../../weights/model.safetensors"

	// dieOnce names a file in the environment of workers: the replacement that can create it dies while it joins.
	dieOnce = "DEMO_TEST_DIE_ONCE"
)

// The test's binary is also the demo, and its workers.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "worker" || os.Args[1] == "--out") {
		if path := os.Getenv(dieOnce); path != "" && os.Getenv("SERRY_REJOIN") != "" {
			if f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600); err == nil {
				_ = f.Close()
				time.AfterFunc(time.Duration(rand.IntN(30))*time.Millisecond, func() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) })
			}
		}
		main()
	}
	os.Exit(m.Run())
}

// briefly is a short run.
func briefly() []string {
	args := []string{"--weights", weights, "--prompts", "6", "--max", "90"}
	if testing.Short() {
		args = []string{"--weights", weights, "--prompts", "3", "--max", "20"}
	}
	return args
}

// runDemo runs the demo in this process, its workers in others.
func runDemo(t *testing.T, dir string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(append(append([]string{"--out", dir}, briefly()...), args...), &out, &err)
	t.Logf("exit code %d\n%s%s", code, out.String(), err.String())
	return code, out.String(), err.String()
}

func readReport(t *testing.T, dir string) (r report, fields map[string]any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &r))
	require.NoError(t, json.Unmarshal(b, &fields))
	return r, fields
}

// Two ranks are killed and replaced, rank 0 is one of them, and no bit differs.
func TestDemo(t *testing.T) {
	for _, links := range []string{"auto", "tcp"} {
		if testing.Short() && links == "tcp" {
			continue
		}
		t.Run(links, func(t *testing.T) {
			dir := t.TempDir()
			code, stdout, stderr := runDemo(t, dir, "--links", links)
			require.Zero(t, code)
			require.Empty(t, stderr)
			require.NotContains(t, stdout, "\x1b")
			require.LessOrEqual(t, strings.Count(stdout, "\n"), 100)
			for _, want := range []string{"kill -9 rank 2", "kill -9 rank 0", "rank 2 serves again", "rank 0 serves again", "every logit's bits: true"} {
				require.Contains(t, stdout, want)
			}
			r, fields := readReport(t, dir)
			require.True(t, r.Identical)
			require.Empty(t, r.Differs)
			require.Zero(t, r.LostMass)
			require.Equal(t, 4, r.World)
			require.Equal(t, links, r.Links)
			require.Equal(t, r.Prompts, strings.Count(stdout, "\n#"))
			require.Greater(t, r.Tokens, r.Prompts)
			require.LessOrEqual(t, r.Tokens, r.Prompts*r.Max)
			require.Len(t, r.Kills, 2)
			require.Len(t, r.Rejoins, 2)
			for i, rank := range []int{2, 0} {
				k, j := r.Kills[i], r.Rejoins[i]
				require.Equal(t, rank, k.Rank)
				require.Equal(t, "SIGKILL", k.Signal)
				require.Equal(t, uint64(2+2*i), k.Epoch)
				require.Greater(t, k.DetectMs, 0.0)
				require.Greater(t, k.ResumeMs, k.DetectMs)
				require.Less(t, k.ResumeMs, 20000.0)
				require.Equal(t, rank, j.Rank)
				require.Equal(t, k.Epoch+1, j.Epoch)
				require.Greater(t, j.JoinMs, 0.0)
				require.Greater(t, j.TotalMs, j.JoinMs)
			}
			require.Positive(t, r.Kills[0].Taken)
			require.Greater(t, r.Before, 0.0)
			require.Greater(t, r.During, 0.0)
			require.Len(t, r.Ranks, 4)
			rows, here, steps := int64(0), int64(0), int64(0)
			for i, k := range r.Ranks {
				require.Equal(t, i, k.Rank)
				require.LessOrEqual(t, k.ExpertBytes, (k.AllExperts*2+3)/4)
				require.Positive(t, k.ExpertBytes)
				rows, here, steps = rows+k.Rows, here+k.Computed, steps+k.Steps
			}
			require.Positive(t, steps)
			require.Positive(t, here)
			require.Positive(t, rows)
			require.GreaterOrEqual(t, r.RemoteShare, 0.5)
			for _, name := range []string{"tokens_per_s_before", "tokens_per_s_during", "tokens_per_s_after", "lost_mass", "identical"} {
				require.Contains(t, fields, name)
			}
			for _, name := range []string{"detect_ms", "resume_ms", "epoch", "requests_taken_over", "signal", "rank"} {
				require.Contains(t, fields["kills"].([]any)[0], name)
			}
			for _, name := range []string{"resident_expert_bytes", "remote_share", "link_bytes"} {
				require.Contains(t, fields["ranks"].([]any)[0], name)
			}
			b, err := os.ReadFile(filepath.Join(dir, "timeline.png"))
			require.NoError(t, err)
			_, err = png.Decode(bytes.NewReader(b))
			require.NoError(t, err)
			files, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, files, len(resultFiles))
		})
	}
}

// Without a second replica a kill loses experts: the report says so, and the exit code.
func TestOneReplicaIsNotEnough(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	dir := t.TempDir()
	code, _, stderr := runDemo(t, dir, "--replicas", "1")
	require.Equal(t, 3, code)
	require.Contains(t, stderr, "NOT identical")
	r, _ := readReport(t, dir)
	require.False(t, r.Identical)
	require.NotEmpty(t, r.Differs)
	require.Greater(t, r.LostMass, 0.0)
	for _, k := range r.Ranks {
		require.LessOrEqual(t, k.ExpertBytes, (k.AllExperts+3)/4)
	}
}

// One wrong bit in the weights of one replica is noticed.
func TestOneFlippedBitIsNoticed(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	dir := t.TempDir()
	code, _, _ := runDemo(t, dir, "--flip", "1", "--no-kill", "--temperature", "0")
	require.Equal(t, 3, code)
	r, _ := readReport(t, dir)
	require.False(t, r.Identical)
	require.NotEmpty(t, r.Differs)
	require.Zero(t, r.LostMass)
	require.Empty(t, r.Kills)
}

// A replacement that dies while it joins is replaced in turn.
func TestReplacementThatDies(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	mark := filepath.Join(t.TempDir(), "died")
	t.Setenv(dieOnce, mark)
	dir := t.TempDir()
	code, stdout, _ := runDemo(t, dir)
	require.Zero(t, code)
	require.Contains(t, stdout, "rank 2 was ended by SIGKILL, and not by the demo")
	r, _ := readReport(t, dir)
	require.True(t, r.Identical)
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--ranks", "0"}, "--ranks is 0, want 1 to 16"},
		{[]string{"--ranks", "x"}, `invalid argument "x"`},
		{[]string{"--prompts", "99"}, "--prompts is 99"},
		{[]string{"--max", "0"}, "--max is 0"},
		{[]string{"--replicas", "0"}, "--replicas is 0"},
		{[]string{"--temperature", "-1"}, "--temperature is -1"},
		{[]string{"--temperature", "NaN"}, "--temperature is NaN"},
		{[]string{"--top-k", "-1"}, "--top-k is -1"},
		{[]string{"--flip", "4"}, "--flip is 4, want a rank, 0 to 3"},
		{[]string{"--links", "pigeon"}, `--links is "pigeon", want auto or tcp`},
		{[]string{"--nonsense"}, "unknown flag: --nonsense"},
		{[]string{"nonsense"}, `unknown command "nonsense"`},
		{[]string{"worker"}, "accepts 1 arg"},
	} {
		var out, err bytes.Buffer
		require.Equal(t, 2, run(c.args, &out, &err), "%v", c.args)
		require.Contains(t, err.String(), c.want)
		require.Empty(t, out.String())
	}
	var out, err bytes.Buffer
	require.Zero(t, run([]string{"--help"}, &out, &err))
	require.Contains(t, out.String(), "--temperature")
	require.Equal(t, 1, run([]string{"worker", "no JSON"}, &out, &err))
	require.Contains(t, err.String(), "the job:")
}

// Weights that cannot be used: an error that names the file, before anything is started.
func TestWrongWeights(t *testing.T) {
	whole, err := os.ReadFile(weights)
	require.NoError(t, err)
	for name, b := range map[string][]byte{"truncated": whole[:len(whole)-1000], "foreign": []byte(strings.Repeat("no weights ", 50))} {
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		code, stdout, stderr := runDemo(t, filepath.Join(dir, "out"), "--weights", path)
		require.Equal(t, 1, code)
		require.Empty(t, stdout)
		require.Contains(t, stderr, path)
	}
	code, _, stderr := runDemo(t, t.TempDir(), "--weights", "nowhere")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "nowhere")
}

func TestOutThatIsNoFolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	code, _, stderr := runDemo(t, path)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "--out: ")
}

// With --json stdout is the report alone.
func TestJSON(t *testing.T) {
	code, stdout, stderr := runDemo(t, t.TempDir(), "--json", "--ranks", "2", "--max", "10")
	require.Zero(t, code)
	var r report
	require.NoError(t, json.Unmarshal([]byte(stdout), &r))
	require.True(t, r.Identical)
	require.Equal(t, 2, r.World)
	require.Contains(t, stderr, "epoch 1")
	require.NotContains(t, fmt.Sprint(r.Kills), "SIGKILL")
}

package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 ns", 7: "7 ns", 999: "999 ns", 1000: "1.00 µs", 12_345: "12.3 µs", 123_456: "123 µs", 1_234_567: "1.23 ms",
		50 * time.Millisecond: "50.0 ms", 3 * time.Second: "3.00 s",
	} {
		require.Equal(t, want, short(d))
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"8": 8, "8B": 8, "64KiB": 64 << 10, "256MiB": 256 << 20, "2 GiB": 2 << 30, "0": 0} {
		var s size
		require.NoError(t, s.Set(text), text)
		require.EqualValues(t, want, s)
		var back size
		require.NoError(t, back.Set(s.String()))
		require.Equal(t, s, back)
	}
	for _, text := range []string{"", "x", "-1", "1MB", "9999999GiB", "1.5GiB"} {
		require.ErrorContains(t, new(size).Set(text), "such as", text)
	}
}

func TestTimesTravel(t *testing.T) {
	a := newTimes()
	for i := range int64(1000) {
		a.add(i * 1000)
	}
	a.add(int64(time.Hour)) // counts as the longest
	text, err := a.text()
	require.NoError(t, err)
	require.NotContains(t, text, "\n")
	b, err := timesOf(text)
	require.NoError(t, err)
	require.Equal(t, a.summary("x"), b.summary("x"))
	require.InDelta(t, 500_000, float64(b.summary("").P50), 1000)
	require.InDelta(t, 100e9, float64(b.summary("").Max), 1e9)
	_, err = timesOf("?")
	require.Error(t, err)
}

func sample() []*Result {
	a := newResult("allreduce", AllReduceDefaults(), "of %d", 2)
	x := newTimes()
	x.add(900)
	a.Rows = append(a.Rows, x.summary("calls"))
	a.bar("p50", 800, 900)
	b := newResult("failover", nil, "x")
	b.Skipped = "no points"
	return []*Result{a, b}
}

func run(t *testing.T, c *command, all bool, rs ...*Result) (string, error) {
	var b bytes.Buffer
	err := c.finish(&b, rs, all)
	return b.String(), err
}

func TestTables(t *testing.T) {
	rs := sample()
	text, err := run(t, &command{}, true, rs...)
	require.NoError(t, err, "a bar that is missed is no error")
	require.Contains(t, text, "allreduce: of 2")
	require.Regexp(t, `calls +1 +900 ns +900 ns`, text)
	require.Contains(t, text, "asked at most 800 ns, measured 900 ns: missed")
	require.Contains(t, text, "not run: no points")
	require.Regexp(t, `allreduce: p50 +800 ns +900 ns +missed`, text)
	require.Regexp(t, `violations +0 +0 +ok`, text)
	require.NotContains(t, text, "of a part")
	rs[0].Bars = nil
	text, err = run(t, &command{}, true, rs...)
	require.NoError(t, err)
	require.Regexp(t, `allreduce +nothing is asked of a part`, text)
	rs[0].violate("rank %d", 3)
	text, err = run(t, &command{}, false, rs[0])
	require.ErrorIs(t, err, ErrViolations)
	require.Contains(t, text, "VIOLATION: rank 3")
}

func TestJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.json")
	c := &command{json: file}
	var err error
	c.file, err = openResult(file)
	require.NoError(t, err)
	text, err := run(t, c, false, sample()[0])
	require.NoError(t, err)
	require.NotEmpty(t, text)
	c.file.giveUp() // which changes nothing any more
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var r Result
	require.NoError(t, json.Unmarshal(b, &r))
	require.Equal(t, time.Duration(900), r.Rows[0].Max)
	text, err = run(t, &command{json: "-"}, true, sample()...)
	require.NoError(t, err)
	var rs []Result
	require.NoError(t, json.Unmarshal([]byte(text), &rs), "nothing but JSON on stdout")
	require.Len(t, rs, 2)
}

// A file that cannot be written is refused before the measurement; one that is there keeps what it holds until the end.
func TestJSONFile(t *testing.T) {
	dir := t.TempDir()
	for _, bad := range []string{dir, filepath.Join(dir, "no", "x.json")} {
		cmd := Command()
		cmd.SilenceErrors = true
		cmd.SetArgs([]string{"allreduce", "--json", bad, "--n", "1000000000"})
		require.ErrorContains(t, cmd.Execute(), "--json: open "+bad)
	}
	old := filepath.Join(dir, "old.json")
	require.NoError(t, os.WriteFile(old, []byte(strings.Repeat("old", 999)), 0o600))
	for _, name := range []string{old, filepath.Join(dir, "new.json")} {
		cmd := Command()
		cmd.SilenceErrors = true
		cmd.SetArgs([]string{"allreduce", "--json", name, "--ranks", "0"})
		require.ErrorContains(t, cmd.Execute(), "--ranks 0")
	}
	require.Equal(t, []string{"old.json"}, ls(t, dir))
	f, err := openResult(old)
	require.NoError(t, err)
	require.NoError(t, f.write([]byte("new")))
	b, err := os.ReadFile(old)
	require.NoError(t, err)
	require.Equal(t, "new", string(b))
}

func TestHelp(t *testing.T) {
	root := &cobra.Command{Use: "serry"}
	root.AddCommand(Command())
	for _, name := range []string{"", "allreduce", "ep", "failover", "join", "idle", "all"} {
		var b bytes.Buffer
		root.SetOut(&b)
		root.SetArgs(append([]string{"bench"}, strings.Fields(name+" --help")...))
		require.NoError(t, root.Execute())
		require.Contains(t, b.String(), "serry bench "+name)
		require.Contains(t, b.String(), "--json")
		require.NotContains(t, b.String(), "JSON\n", "the hidden one")
	}
}

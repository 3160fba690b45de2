package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain makes the test binary all that the tests start: a rank, and the command line.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "rank" {
		if err := Rank(context.Background(), os.Args[2], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == "bench" {
		c := Command()
		c.SetArgs(os.Args[2:])
		err := c.Execute()
		var known interface{ ExitStatus() int }
		switch {
		case errors.As(err, &known):
			os.Exit(known.ExitStatus())
		case err != nil:
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// options start ranks of this binary, and fail the test if a directory stays.
func options(t *testing.T) Options {
	exe, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Cleanup(func() { require.Empty(t, ls(t, dir)) })
	keep := t.ArtifactDir()
	return Options{Self: []string{exe, "rank"}, Keep: keep}
}

func ls(t *testing.T, dir string) (names []string) {
	es, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range es {
		names = append(names, e.Name())
	}
	return names
}

// clean says that a measurement ran to its end and that nothing broke.
func clean(t *testing.T, r *Result, err error) {
	t.Helper()
	require.NoError(t, err)
	require.Empty(t, r.Violations)
	var b bytes.Buffer
	r.print(&b)
	t.Log("\n" + b.String())
}

func (r *Result) row(t *testing.T, name string) Row {
	t.Helper()
	for _, x := range r.Rows {
		if x.Name == name {
			require.Positive(t, x.Min)
			require.LessOrEqual(t, x.Min, x.P50)
			require.LessOrEqual(t, x.P50, x.P99)
			require.LessOrEqual(t, x.P99, x.Max)
			return x
		}
	}
	require.Fail(t, "no row "+name, "%+v", r.Rows)
	return Row{}
}

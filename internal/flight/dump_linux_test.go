package flight

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/internal/ops"
)

func some() *Recorder {
	r := recorder(3, 0)
	g := world(r, 4)
	for i := range uint64(500) {
		g.End(g.Begin(reduce(i), 1, 1), ops.OK, 1, 2)
	}
	return r
}

func TestDumpWhereNothingCanBe(t *testing.T) {
	r := some()
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for dir, want := range map[string]error{file: unix.ENOTDIR, filepath.Join(file, "x"): unix.ENOTDIR, "/proc/self/serry": unix.ENOENT, "/proc/self": nil} {
		_, err := r.Dump(dir, "")
		require.ErrorContains(t, err, "rank 3 cannot dump its operations to "+dir)
		if want != nil {
			require.ErrorIs(t, err, want)
		}
	}
	if os.Geteuid() != 0 { // whom permissions do not bind
		dir := t.TempDir()
		require.NoError(t, os.Chmod(dir, 0o500))
		_, err := r.Dump(dir, "")
		require.ErrorIs(t, err, unix.EACCES)
		require.Empty(t, files(t, dir))
	}
}

// What fails half-way leaves what was there before, and nothing else.
func TestDumpFailsHalfWay(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b"), []byte("old"), 0o600))
	full := errors.New("full")
	ok := func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }
	_, err := dump(dir, []file{{"a", ok}, {"b", func(w io.Writer) error { _ = ok(w); return full }}})
	require.ErrorIs(t, err, full)
	require.Equal(t, []string{"b"}, files(t, dir))

	require.NoError(t, os.Mkdir(filepath.Join(dir, "c"), 0o700)) // cannot be replaced by a file
	_, err = dump(dir, []file{{"a", ok}, {"c", ok}})
	require.Error(t, err)
	require.Equal(t, []string{"b", "c"}, files(t, dir))
	old, err := os.ReadFile(filepath.Join(dir, "b"))
	require.NoError(t, err)
	require.Equal(t, "old", string(old))
}

func TestDumpToAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("cannot mount a small file system: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(dir, 0)) }()
	_, err := some().Dump(dir, "")
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, "is there room")
	require.Empty(t, files(t, dir))
}

package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// tiny mounts a file system of so many bytes.
func tiny(t *testing.T, size string) string {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skip("cannot mount a file system: ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// A disk without room for the results is noticed before the work is done.
func TestFullDisk(t *testing.T) {
	dir := tiny(t, "64k")
	code, stdout, stderr := runDemo(t, dir)
	require.Equal(t, 1, code)
	require.Empty(t, stdout)
	require.Contains(t, stderr, "--out: ")
	require.Contains(t, stderr, "no space left on device")
	empty(t, dir)
}

// A disk that has become full meanwhile: an error, no half of the results, and the workers have ended all the same.
func TestDiskThatFillsUp(t *testing.T) {
	dir := tiny(t, "1m")
	res, err := newResults(dir)
	require.NoError(t, err)
	ballast := filepath.Join(dir, "ballast")
	require.Error(t, os.WriteFile(ballast, make([]byte, 2<<20), 0o600))
	require.NoError(t, os.Truncate(ballast, 1<<20-8<<10))
	w := acted(t)
	require.ErrorContains(t, res.write(w.watcher, w.report(options{ranks: 4}, w.kills, w.rejoins)), "no space left on device")
	require.NoError(t, os.Remove(ballast))
	empty(t, dir)
	require.NoError(t, res.write(w.watcher, w.report(options{ranks: 4}, w.kills, w.rejoins)))
}

func empty(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, files)
}

package rendezvous_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestFileDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs a small file system: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	s := open(t, "file://"+filepath.Join(dir, "store"))
	require.NoError(t, s.Set(soon(t), "k", []byte("before")))
	err := s.Set(soon(t), "k", bytes.Repeat([]byte("x"), 1<<20))
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Contains(t, err.Error(), "make room")
	v, err := s.Get(soon(t), "k")
	require.NoError(t, err)
	require.Equal(t, "before", string(v))
	left, err := os.ReadDir(filepath.Join(dir, "store"))
	require.NoError(t, err)
	require.Len(t, left, 2, "lock and key")
	require.NoError(t, s.Set(soon(t), "k", []byte("after")))
}

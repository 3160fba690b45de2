package rendezvous_test

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/rendezvous"
)

// role starts this test binary as a process that does what runRole says.
func role(t *testing.T, name string, args ...string) *exec.Cmd {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), "SERRY_TEST_ROLE="+name)
	cmd.Stderr = os.Stderr
	return cmd
}

// runRole is main in such a process; arguments come after the name of the binary.
func runRole(name string) int {
	ctx := context.Background()
	if len(os.Args) > 2 {
		if err := syscall.Setuid(nobody); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	s, err := rendezvous.Open(ctx, os.Args[1])
	switch name {
	case "count": // until killed
		for err == nil {
			_, err = s.Add(ctx, "n", 1)
			if err == nil {
				err = s.Set(ctx, "k", make([]byte, 1<<16))
			}
		}
	case "set":
		if err == nil {
			err = s.Set(ctx, "k", make([]byte, 1<<20))
		}
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// Processes that are killed in the middle of writing leave a store that is whole, unlocked, and clean when opened next.
func TestFileCrash(t *testing.T) {
	dir := t.TempDir()
	s := open(t, "file://"+dir)
	last := int64(0)
	for i := range 5 {
		cmds := []*exec.Cmd{role(t, "count", "file://"+dir), role(t, "count", "file://"+dir)}
		for _, cmd := range cmds {
			require.NoError(t, cmd.Start())
		}
		for { // until they are at work
			n, err := s.Add(soon(t), "n", 0)
			require.NoError(t, err)
			if n > last+10 {
				break
			}
		}
		time.Sleep(time.Duration(i) * time.Millisecond)
		for _, cmd := range cmds {
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
		}
		n, err := s.Add(soon(t), "n", 0)
		require.NoError(t, err)
		require.Greater(t, n, last)
		last = n
		v, err := s.Get(soon(t), "k")
		require.NoError(t, err)
		require.Len(t, v, 1<<16)
	}
	_ = open(t, "file://"+dir)
	left, err := filepath.Glob(filepath.Join(dir, "t-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestFileFaults(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err := rendezvous.Open(soon(t), "file://"+file)
	require.ErrorIs(t, err, syscall.ENOTDIR)
	require.Contains(t, err.Error(), file)
	require.Contains(t, err.Error(), "choose another")

	// Only the last directory of a path is made.
	dir := t.TempDir()
	mistyped := filepath.Join(dir, "no", "run")
	_, err = rendezvous.Open(soon(t), "file://"+mistyped)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "the directory around it does not exist")
	require.ErrorContains(t, err, "correct the path, or make "+filepath.Dir(mistyped))
	require.NoDirExists(t, filepath.Dir(mistyped))
	for range 2 {
		open(t, "file://"+filepath.Join(dir, "run"))
	}

	s := open(t, "file://"+dir)
	require.NoError(t, s.Set(soon(t), "k", []byte("value")))
	name := filepath.Join(dir, "k-k")
	for _, damage := range []func([]byte) []byte{
		func(b []byte) []byte { return nil },
		func(b []byte) []byte { return b[:len(b)-1] },
		func(b []byte) []byte { b[9] ^= 1; return b },
	} {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(name, damage(b), 0o600))
		_, err = s.Get(soon(t), "k")
		require.ErrorIs(t, err, rendezvous.ErrCorrupt)
		require.Contains(t, err.Error(), name)
		require.NoError(t, os.Remove(name))
		require.NoError(t, s.Set(soon(t), "k", []byte("value")))
	}
	require.NoError(t, os.RemoveAll(dir))
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { return s.Set(ctx, "k", nil) },
		func(ctx context.Context) error { return s.Wait(ctx, "k") },
	} {
		err = call(soon(t))
		require.ErrorIs(t, err, fs.ErrNotExist)
		require.Contains(t, err.Error(), "removed while in use")
	}
}

// A process that holds the lock and does not go on holds up writers until their context ends, and readers not at all.
func TestFileLockedByAnother(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("locks as linux does")
	}
	dir := t.TempDir()
	s := open(t, "file://"+dir)
	require.NoError(t, s.Set(soon(t), "k", nil))
	f, err := os.Open(filepath.Join(dir, "lock"))
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	require.NoError(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err = s.Set(ctx, "k", []byte("v"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Contains(t, err.Error(), "locked by another process")
	_, err = s.Get(soon(t), "k")
	require.NoError(t, err)
}

func TestFileNotWritable(t *testing.T) {
	dir, err := os.MkdirTemp("", "rendezvous")
	require.NoError(t, err)
	defer func() { require.NoError(t, os.RemoveAll(dir)) }()
	require.NoError(t, os.Chmod(dir, 0o555))
	cmd, id := role(t, "set", "file://"+filepath.Join(dir, "sub")), os.Getuid()
	if id == 0 {
		id = nobody
		cmd.Args = append(cmd.Args, "as nobody")
	}
	out, _ := cmd.Output()
	require.Contains(t, string(out), fmt.Sprintf("user id %d may not write there", id))
}

const nobody = 65534

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// nobody waits until no process has all the words in its command line.
func nobody(words ...string) error {
	var left string
	for range 100 {
		left = ""
		names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, n := range names {
			b, _ := os.ReadFile(n)
			line := strings.ReplaceAll(string(b), "\x00", " ")
			has := true
			for _, w := range words {
				has = has && strings.Contains(line, w)
			}
			if has {
				left = n + ": " + line
			}
		}
		if left == "" {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("left behind: %s", left)
}

// serry bench, killed in every way, leaves no process, and unless it is SIGKILL no directory.
func TestNothingIsLeftWhenKilled(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			dir := t.TempDir()
			exe, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.Command(exe, "bench", "allreduce", "--n", "100000000")
			cmd.Env = append(os.Environ(), "TMPDIR="+dir)
			var said strings.Builder
			cmd.Stderr = &said
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool { return len(ls(t, dir)) == 1 && nobodyNow(dir) != nil }, 10*time.Second, 5*time.Millisecond)
			time.Sleep(50 * time.Millisecond)
			require.NoError(t, cmd.Process.Signal(sig))
			err = cmd.Wait()
			require.Error(t, err)
			require.NoError(t, nobody(dir))
			if sig != syscall.SIGKILL {
				require.Equal(t, 128+int(sig), cmd.ProcessState.ExitCode())
				require.Contains(t, said.String(), "interrupted")
				require.Empty(t, ls(t, dir))
			}
		})
	}
}

// nobodyNow is an error if there is a rank that meets in dir.
func nobodyNow(dir string) error {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, n := range names {
		if b, _ := os.ReadFile(n); strings.Contains(string(b), dir) {
			return fmt.Errorf("%s", n)
		}
	}
	return nil
}

func TestCPU(t *testing.T) {
	before, exact, err := cpu(os.Getpid())
	require.NoError(t, err)
	for begin := time.Now(); time.Since(begin) < 50*time.Millisecond; {
	}
	after, exact2, err := cpu(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, exact2, exact)
	require.GreaterOrEqual(t, after, before)
	require.InDelta(t, float64(exact2), float64(after), float64(50*time.Millisecond))
}

func TestNothingIsLeftWhenCancelled(t *testing.T) {
	o := options(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	c := AllReduceDefaults()
	c.N = 1 << 40
	_, err := AllReduce(ctx, o, c)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, nobody(o.Self[0], " rank "))
}

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// demoProc is a demo in a process of its own.
type demoProc struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string // of its results
	temp   string // its TMPDIR
	own    string // in the command line of it and of each of its workers
	stderr bytes.Buffer

	mu     sync.Mutex
	stdout bytes.Buffer
	ended  chan struct{}
}

func (d *demoProc) Write(b []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stdout.Write(b)
}

func (d *demoProc) shown() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stdout.String()
}

func startDemo(t *testing.T, args ...string) *demoProc {
	t.Helper()
	d := unstarted(t, args...)
	d.cmd.Stdout = d
	d.start()
	return d
}

func unstarted(t *testing.T, args ...string) *demoProc {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	abs, err := filepath.Abs(weights)
	require.NoError(t, err)
	d := &demoProc{t: t, dir: t.TempDir(), temp: t.TempDir(), ended: make(chan struct{})}
	d.own = filepath.Join(t.TempDir(), "weights-of-this-test")
	require.NoError(t, os.Symlink(abs, d.own))
	most := "100"
	if testing.Short() || raceEnabled { // the race detector makes the model ten times slower
		most = "25"
	}
	d.cmd = exec.Command(exe, append([]string{"--out", d.dir, "--weights", d.own, "--prompts", "6", "--max", most}, args...)...)
	d.cmd.Env = append(os.Environ(), "TMPDIR="+d.temp)
	d.cmd.Stderr = &d.stderr
	return d
}

func (d *demoProc) start() {
	d.t.Helper()
	require.NoError(d.t, d.cmd.Start())
	go func() {
		_ = d.cmd.Wait()
		close(d.ended)
	}()
	d.t.Cleanup(func() {
		_ = d.cmd.Process.Kill()
		<-d.ended
		for _, pid := range d.processes() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		d.t.Logf("stdout:\n%sstderr:\n%s", d.shown(), d.stderr.String())
	})
}

// await waits until the demo has shown a text, and returns what its pattern's group matched last.
func (d *demoProc) await(pattern string) (group string) {
	d.t.Helper()
	re := regexp.MustCompile(pattern)
	d.until("it shows "+pattern, func() bool {
		m := re.FindStringSubmatch(d.shown())
		if len(m) > 1 {
			group = m[1]
		}
		return m != nil
	})
	return group
}

func (d *demoProc) until(what string, cond func() bool) {
	d.t.Helper()
	limit := 30 * time.Second
	if raceEnabled {
		limit = 3 * time.Minute
	}
	for end := time.Now().Add(limit); !cond(); time.Sleep(time.Millisecond) {
		require.True(d.t, time.Now().Before(end), what)
	}
}

// processes are the demo and its workers, as long as they live.
func (d *demoProc) processes() (pids []int) {
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(d.t, err)
	for _, path := range paths {
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(d.own)) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// worker is the process of a rank, once it is there.
func (d *demoProc) worker(rank int) (pid int) {
	d.t.Helper()
	d.until(fmt.Sprintf("there is a rank %d", rank), func() bool {
		for _, p := range d.processes() {
			env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p))
			if err == nil && bytes.Contains(env, fmt.Appendf(nil, "\x00RANK=%d\x00", rank)) {
				pid = p
				return true
			}
		}
		return false
	})
	return pid
}

func (d *demoProc) signal(rank int, sig syscall.Signal) {
	d.t.Helper()
	require.NoError(d.t, syscall.Kill(d.worker(rank), sig))
}

// end waits for the demo's end. Nothing may be left of it then, but results if there are to be some.
func (d *demoProc) end(code int, results bool) {
	d.t.Helper()
	patience := time.Minute
	if raceEnabled {
		patience = 5 * time.Minute
	}
	select {
	case <-d.ended:
	case <-time.After(patience):
		d.t.Fatal("it does not end")
	}
	require.Equal(d.t, code, d.cmd.ProcessState.ExitCode())
	require.Empty(d.t, d.processes())
	temps, err := os.ReadDir(d.temp)
	require.NoError(d.t, err)
	require.Empty(d.t, temps)
	files, err := os.ReadDir(d.dir)
	require.NoError(d.t, err)
	if results {
		require.Len(d.t, files, len(resultFiles))
	} else {
		require.Empty(d.t, files)
	}
}

// SIGINT and SIGTERM, at any moment: no process and no file is left.
func TestInterrupt(t *testing.T) {
	for _, when := range []string{"model:", "4 processes", "epoch 1", "kill -9", "started again"} {
		for code, sig := range map[int]syscall.Signal{130: syscall.SIGINT, 143: syscall.SIGTERM} {
			if testing.Short() && (when != "epoch 1" || code != 130) || code == 143 && when != "kill -9" {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", when, sig), func(t *testing.T) {
				d := startDemo(t)
				d.await(when)
				require.NotEmpty(t, d.processes())
				require.NoError(t, d.cmd.Process.Signal(sig))
				begin := time.Now()
				d.end(code, false)
				require.Less(t, time.Since(begin), 10*time.Second)
				require.Equal(t, fmt.Sprintf("demo: stopped by %v\n", sig), d.stderr.String())
			})
		}
	}
}

// A worker that is stopped for good ends the demo, with an error that says which one it was.
func TestStoppedWorker(t *testing.T) {
	for _, when := range []string{"4 processes", "epoch 1", "kill -9 rank 2"} {
		if testing.Short() && when != "epoch 1" {
			continue
		}
		t.Run(when, func(t *testing.T) {
			t.Parallel() // it waits for most of the time
			d := startDemo(t, "--patience", "3s")
			d.await(when)
			pid := d.worker(1)
			require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
			d.end(1, false)
			require.Contains(t, d.stderr.String(), "nothing has happened for 3s, waiting for ")
			require.Contains(t, d.stderr.String(), fmt.Sprintf("rank 1 (process %d) is stopped", pid))
		})
	}
}

// One that is continued, or killed and so replaced, while the demo is still patient, does no harm.
func TestWorkerThatStandsForAWhile(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	for _, sig := range []syscall.Signal{syscall.SIGCONT, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			d := startDemo(t, "--no-kill")
			d.await("epoch 1")
			d.signal(3, syscall.SIGSTOP)
			time.Sleep(1500 * time.Millisecond)
			d.signal(3, sig)
			d.end(0, true)
			r, _ := readReport(t, d.dir)
			require.True(t, r.Identical)
			require.Len(t, r.Kills, map[syscall.Signal]int{syscall.SIGCONT: 0, syscall.SIGKILL: 1}[sig])
		})
	}
}

// Who is killed by somebody else is replaced too, whenever that is, and no bit differs.
func TestKilledBySomebodyElse(t *testing.T) {
	for _, when := range []string{"4 processes", "epoch 1", "rank 2 serves again", "rank 0 serves again"} {
		if testing.Short() && when != "epoch 1" {
			continue
		}
		t.Run(when, func(t *testing.T) {
			d := startDemo(t, longer()...) // long enough that no planned kill comes at the same time
			d.await(when)
			d.signal(3, syscall.SIGKILL)
			d.end(0, true)
			r, _ := readReport(t, d.dir)
			require.True(t, r.Identical)
			require.Zero(t, r.LostMass)
			require.Len(t, r.Kills, 3)
			at := slices.IndexFunc(r.Kills, func(k kill) bool { return k.Rank == 3 })
			require.GreaterOrEqual(t, at, 0)
			k := r.Kills[at]
			require.Equal(t, "SIGKILL", k.Signal)
			require.False(t, k.Planned)
			if k.Epoch > 0 { // neither before it served nor after all was answered
				require.Greater(t, k.ResumeMs, 0.0)
				require.Len(t, r.Rejoins, 3)
			} else {
				require.NotContains(t, when, "2 serves again")
			}
			for i, other := range r.Kills {
				require.Equal(t, i != at, other.Planned)
			}
			require.Contains(t, d.shown(), "rank 3 was ended by SIGKILL, and not by the demo")
			require.Contains(t, d.shown(), "rank 3 ended by SIGKILL, not by the demo: ")
		})
	}
}

// longer is a run of a few seconds.
func longer() []string {
	if testing.Short() {
		return []string{"--max", "60"}
	}
	return []string{"--max", "400"}
}

// More than the replicas cover, or everybody, is lost: an error that says so.
func TestTooManyAtOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	t.Run("two", func(t *testing.T) {
		d := startDemo(t, "--no-kill", "--max", "250")
		d.await("epoch 1")
		d.signal(1, syscall.SIGSTOP) // so that it does not come back in between
		d.signal(2, syscall.SIGKILL)
		d.signal(1, syscall.SIGKILL)
		d.end(3, true)
		require.Contains(t, d.stderr.String(), "NOT identical")
		require.Contains(t, d.stderr.String(), "ranks [1 2] did not serve at the same time")
		r, _ := readReport(t, d.dir)
		require.Greater(t, r.LostMass, 0.0)
		require.Len(t, r.Rejoins, 2)
	})
	t.Run("all", func(t *testing.T) {
		d := startDemo(t, "--no-kill", "--max", "250")
		d.await("epoch 1")
		d.signal(0, syscall.SIGSTOP) // all others wait for it
		for rank := range 4 {
			d.signal(rank, syscall.SIGKILL)
		}
		d.end(1, false)
		require.Contains(t, d.stderr.String(), "nobody is left to go on from")
	})
}

// A demo that is killed itself takes its workers along: they see that it is gone.
func TestKilledDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	for _, when := range []string{"4 processes", "epoch 1", "rank 0 serves again"} {
		t.Run(when, func(t *testing.T) {
			d := startDemo(t)
			d.await(when)
			d.worker(1)
			require.NoError(t, d.cmd.Process.Kill())
			<-d.ended
			d.until("all workers end", func() bool { return len(d.processes()) == 0 })
		})
	}
}

// A signal ends all also when nobody reads what the demo prints.
func TestInterruptWithoutReader(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	fd := int(w.Fd()) // from here on it blocks
	require.NoError(t, syscall.SetNonblock(fd, true))
	for err == nil { // until it is full
		_, err = syscall.Write(fd, make([]byte, 4096))
	}
	require.NoError(t, syscall.SetNonblock(fd, false))
	d := unstarted(t)
	d.cmd.Stdout = w
	d.start()
	require.NoError(t, w.Close())
	time.Sleep(time.Second)
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGINT))
	d.end(130, false)
}

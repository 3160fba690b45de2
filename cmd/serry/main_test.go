package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/serry-project/serry/rendezvous"
)

// With "--as serry" the test binary is the command, with "--as rank" one of its ranks.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "--as" {
		if os.Args[2] == "serry" {
			os.Exit(run(os.Args[3:], os.Stdout, os.Stderr))
		}
		os.Exit(rankMain(os.Args[3:]))
	}
	_ = os.Setenv("GORACE", "atexit_sleep_ms=0") // else each process sleeps for a second at its end
	goleak.VerifyTestMain(m)
}

func rankMain(args []string) int {
	rank := os.Getenv("RANK")
	for _, arg := range args {
		arg, who, one := strings.Cut(arg, "@")
		if one && who != rank {
			continue
		}
		do, what, _ := strings.Cut(arg, "=")
		switch do {
		case "print":
			fmt.Println(what)
		case "pid":
			fmt.Println("pid", os.Getpid())
		case "exit":
			code, _ := strconv.Atoi(what)
			return code
		case "hang":
			time.Sleep(time.Hour)
		case "ignore":
			signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		case "tick": // prints until told to end
			for range 3000 {
				fmt.Println("tick")
				time.Sleep(10 * time.Millisecond)
			}
		case "meet":
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			s, env, err := rendezvous.FromEnv(ctx, os.Getenv)
			if err == nil {
				err = s.Set(ctx, fmt.Sprint("rank", env.Rank), nil)
			}
			for i := 0; i < env.Size && err == nil; i++ {
				err = s.Wait(ctx, fmt.Sprint("rank", i))
			}
			if err != nil {
				fmt.Println(err)
				return 8
			}
			fmt.Printf("met %d of %d\n", env.Rank, env.Size)
		}
	}
	return 0
}

func self(t *testing.T) string {
	exe, err := os.Executable()
	require.NoError(t, err)
	return exe
}

// ranks is what comes after the flags of serry run.
func ranks(t *testing.T, do ...string) []string {
	return append([]string{"--", self(t), "--as", "rank"}, do...)
}

func args(list ...any) []string {
	var all []string
	for _, a := range list {
		switch a := a.(type) {
		case string:
			all = append(all, strings.Fields(a)...)
		case []string:
			all = append(all, a...)
		}
	}
	return all
}

// output collects what a process prints; a test can wait for text.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

func (o *output) await(t *testing.T, text string, times int) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Count(o.String(), text) >= times },
		20*time.Second, 2*time.Millisecond, "no %q in:\n%s", text, o)
}

// process is serry as a process of its own.
func process(t *testing.T, argv []string) (*exec.Cmd, *output) {
	cmd, out := exec.Command(self(t), append([]string{"--as", "serry"}, argv...)...), &output{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 10 * time.Second
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, out
}

func exitCodeOf(t *testing.T, cmd *exec.Cmd, out *output) int {
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("it does not end:\n%s", out)
	}
	return cmd.ProcessState.ExitCode()
}

// pids are those that ranks have printed.
func pids(t *testing.T, out *output) []int {
	var all []int
	for _, line := range strings.Split(out.String(), "\n") {
		if _, pid, ok := strings.Cut(line, "pid "); ok {
			n, err := strconv.Atoi(pid)
			require.NoError(t, err)
			all = append(all, n)
		}
	}
	return all
}

func requireGone(t *testing.T, pids []int) {
	for _, pid := range pids {
		require.Eventually(t, func() bool { return syscall.Kill(pid, 0) != nil }, 10*time.Second, 5*time.Millisecond, "pid %d", pid)
	}
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", 0, "Available Commands"},
		{"--help", 0, "Available Commands"},
		{"run --help", 0, "--max-restarts"},
		{"rendezvous --help", 0, "--listen"},
		{"frobnicate", 2, `unknown command "frobnicate"`},
		{"run", 2, "which program?"},
		{"run --frobnicate x", 2, "unknown flag"},
		{"run -n x true", 2, "invalid argument"},
		{"run -n 0 true", 2, "--ranks 0: want at least 1"},
		{"run -n -1 true", 2, "--ranks -1: want at least 1"},
		{"run -n 9999 true", 2, "--ranks 9999: want at least 1, at most 1024"},
		{"run -n 4 --nnodes 1000 true", 2, "--nnodes 1000: want at most 256 of --ranks 4"},
		{"run --nnodes 2 --node-rank 2 true", 2, "--node-rank 2: want a number from 0, below that of --nnodes (2)"},
		{"run --max-restarts -2 true", 2, "--max-restarts -2: want a number from 0, or -1"},
		{"run --grace -1s true", 2, "--grace -1s: want a time from 0"},
		{"run --grace 5 true", 2, "missing unit"},
		{"run --grace 99999999h true", 2, `invalid argument "99999999h" for "--grace"`},
		{"run --backoff -1s true", 2, "--backoff -1s: want a time from 0"},
		{"run --backoff 1m true", 2, "--backoff-max 15s: want at least that of --backoff (1m0s)"},
		{"run --color red true", 2, "--color red: want auto, always or never"},
		{"run --rdzv nowhere true", 2, "--rdzv: rendezvous nowhere: write host:port"},
		{"run --rdzv tcp://a:1 true", 2, "(--run-id)"},
		{"run --nnodes 2 true", 2, "--rdzv: several nodes need a rendezvous"},
		{"run nosuchprogram", 127, "cannot start nosuchprogram"},
		{"run /nowhere/program", 127, "cannot start /nowhere/program"},
		{"run /dev/null", 126, "cannot start /dev/null"},
		{"run --json /nowhere/file true", 1, "--json: open /nowhere/file"},
		{"rendezvous x", 2, "unknown command"},
		{"rendezvous --listen nowhere", 2, "write host:port"},
		{"rendezvous --listen 127.0.0.1:70000", 2, "--listen: rendezvous tcp://127.0.0.1:70000"},
		{"rendezvous --listen 192.0.2.1:0", 1, "the address must be one of this host"},
		{"bench", 0, "serry bench [command]"},
		{"bench x", 2, `unknown command "x" for "serry bench"`},
		{"bench allreduce --ranks 0", 2, "--ranks 0: want a number from 1 to 1024"},
		{"bench allreduce --n -1 --links rope", 2, "serry: --links rope: want auto or tcp"},
		{"bench all --part NaN", 2, "--part NaN: want more than 0"},
		{"bench failover --points x", 2, `--points "x": want points that a step passes`},
		{"bench idle --json /nowhere/file", 1, "--json: open /nowhere/file"},
		{"completion x", 2, `unknown command "x"`},
		{"help bench all", 0, "--part"},
		{"help x", 2, `unknown command "x"`},
		{"env x", 2, "unknown command"},
		{"version x", 2, "unknown command"},
	} {
		var out bytes.Buffer
		require.Equal(t, c.code, run(strings.Fields(c.args), &out, &out), c.args)
		require.Contains(t, out.String(), c.want, c.args)
	}
}

// What a rank ends with is passed on, and not taken for a mistake on the command line.
func TestExitCodes(t *testing.T) {
	for do, code := range map[string]int{"exit=0": 0, "exit=2": 2, "exit=77@1": 77} {
		var out bytes.Buffer
		require.Equal(t, code, run(args("run -n 2 --grace 0 --backoff 0", ranks(t, do)), &out, &out), do)
		require.NotContains(t, out.String(), "--help")
	}
	file := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(file, []byte("\x7fELF rubbish"), 0o755))
	var out bytes.Buffer
	require.Equal(t, 126, run([]string{"run", "-n", "2", file}, &out, &out))
	require.Contains(t, out.String(), "cannot start")
}

// Events of an earlier run are kept when this one does not begin.
func TestEventsAreKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	var out bytes.Buffer
	require.Equal(t, 127, run([]string{"run", "--json", file, "/nowhere/program"}, &out, &out))
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "old", string(b))
	require.Zero(t, run([]string{"run", "-q", "--json", file, "true"}, &out, &out))
	b, err = os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(b), "old")
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, a := range []string{"run --rdzv " + l.Addr().String() + " true", "rendezvous --listen " + l.Addr().String()} {
		var out bytes.Buffer
		require.Equal(t, 1, run(strings.Fields(a), &out, &out))
		require.Contains(t, out.String(), "port "+port+" of 127.0.0.1 is in use")
		require.Contains(t, out.String(), "choose another port")
	}
}

func TestRun(t *testing.T) {
	var stdout, stderr bytes.Buffer
	file := filepath.Join(t.TempDir(), "events")
	code := run(args("run -n 3 --max-restarts 1 --backoff 1ms --json", []string{file}, ranks(t, "print=two words", "meet", "exit=4@1")), &stdout, &stderr)
	require.Equal(t, 4, code)
	require.Contains(t, stdout.String(), "[2] two words\n")
	require.Contains(t, stdout.String(), "[1] met 1 of 3\n")
	for _, want := range []string{
		"serry: rank 1: exit code 4; restart 1 of 1 in 1ms\n",
		"serry: rank 1: exit code 4; no restart is left\n",
		"serry: rank 0: exit code 0, 0 restarts, ",
		"serry: rank 1: exit code 4, 1 restart, ",
	} {
		require.Contains(t, stderr.String(), want)
	}
	events, err := os.ReadFile(file)
	require.NoError(t, err)
	lines := bytes.Split(bytes.TrimSpace(events), []byte("\n"))
	for _, line := range lines {
		require.True(t, json.Valid(line), "%s", line)
	}
	require.Contains(t, string(lines[len(lines)-1]), `"finished","code":4`)

	stdout.Reset()
	stderr.Reset()
	require.Zero(t, run(args("run -q --color always", ranks(t, "print=x")), &stdout, &stderr))
	require.Equal(t, "\x1b[36m[0]\x1b[0m x\n", stdout.String())
	require.Empty(t, stderr.String())
}

func TestInterrupt(t *testing.T) {
	for sig, code := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143, syscall.SIGHUP: 129} {
		cmd, out := process(t, args("run -n 3 --max-restarts 5", ranks(t, "pid", "hang")))
		out.await(t, "pid ", 3)
		require.NoError(t, cmd.Process.Signal(sig))
		require.Equal(t, code, exitCodeOf(t, cmd, out), out)
		require.Contains(t, out.String(), "stopping all ranks: the launcher got SIG")
		requireGone(t, pids(t, out))
	}
}

func TestSecondInterruptKills(t *testing.T) {
	cmd, out := process(t, args("run -n 2 --grace 1h", ranks(t, "ignore", "pid", "hang")))
	out.await(t, "pid ", 2)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	out.await(t, "stopping all ranks", 1)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.Equal(t, 130, exitCodeOf(t, cmd, out))
	require.Contains(t, out.String(), "rank 0: ended by SIGKILL")
	requireGone(t, pids(t, out))
}

// A launcher of another node that waits for node 0 can be interrupted.
func TestInterruptBeforeStart(t *testing.T) {
	cmd, out := process(t, args("run --nnodes 2 --node-rank 1 --rdzv 127.0.0.1:1", ranks(t, "hang")))
	time.Sleep(100 * time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	if code := exitCodeOf(t, cmd, out); code != 130 && code != -1 { // -1: before it has asked for the signal
		t.Fatalf("exit code %d\n%s", code, out)
	}
}

// The launcher is no member: ranks that write straight to its output outlive its kill.
func TestLauncherKilled(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer func() { _ = r.Close() }()
	cmd := exec.Command(self(t), args("--as serry run -n 2 --tag=false", ranks(t, "pid", "tick"))...)
	cmd.Stdout = w
	require.NoError(t, cmd.Start())
	_ = w.Close()
	out := &output{}
	var copying sync.WaitGroup
	copying.Go(func() { _, _ = io.Copy(out, r) })
	out.await(t, "pid ", 2)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	ticks := strings.Count(out.String(), "tick")
	out.await(t, "tick", ticks+20)
	all := pids(t, out)
	require.Len(t, all, 2)
	for _, pid := range all {
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	copying.Wait()
}

// A reader that goes away ends neither launcher nor ranks.
func TestOutputClosed(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	cmd := exec.Command(self(t), args("--as serry run -n 2", ranks(t, "tick@9", "print=a", "print=b"))...)
	var stderr output
	cmd.Stdout, cmd.Stderr = w, &stderr
	require.NoError(t, r.Close())
	require.NoError(t, cmd.Start())
	_ = w.Close()
	require.NoError(t, cmd.Wait(), "%s", &stderr)
	require.Equal(t, 1, strings.Count(stderr.String(), "cannot print"))
}

func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func TestSeveralNodes(t *testing.T) {
	addr := freePort(t)
	flags := "run -n 2 --nnodes 2 --rdzv " + addr + " --node-rank "
	second, out2 := process(t, args(flags+"1", ranks(t, "meet", "tick@9"))) // before the first: it waits
	first, out1 := process(t, args(flags+"0", ranks(t, "meet")))
	require.Zero(t, exitCodeOf(t, second, out2), out2)
	require.Zero(t, exitCodeOf(t, first, out1), out1)
	for rank, out := range []*output{out1, out1, out2, out2} {
		require.Contains(t, out.String(), fmt.Sprintf("[%d] met %d of 4\n", rank, rank))
	}
}

// Node 0 serves the rendezvous until the others are done; a failure with --fail-fast reaches them.
func TestNodesFailFast(t *testing.T) {
	addr := freePort(t)
	flags := "run -n 1 --fail-fast --nnodes 2 --rdzv " + addr + " --node-rank "
	first, out1 := process(t, args(flags+"0", ranks(t, "print=up", "hang")))
	out1.await(t, "up", 1)
	second, out2 := process(t, args(flags+"1", ranks(t, "exit=3")))
	require.Equal(t, 3, exitCodeOf(t, second, out2), out2)
	require.Equal(t, 143, exitCodeOf(t, first, out1), out1)
	require.Contains(t, out1.String(), "a rank of another node failed")
}

func TestNodesDisagree(t *testing.T) {
	addr := freePort(t)
	first, out1 := process(t, args("run -n 1 --nnodes 2 --node-rank 0 --rdzv", addr, ranks(t, "print=up", "hang")))
	out1.await(t, "up", 1)
	second, out2 := process(t, args("run -n 2 --nnodes 2 --node-rank 1 --rdzv", addr, ranks(t, "print=x")))
	require.Equal(t, 1, exitCodeOf(t, second, out2))
	require.Contains(t, out2.String(), "this launcher was told of 2 nodes with 2 ranks each, another of 2 nodes with 1 ranks each")
	require.NoError(t, first.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 143, exitCodeOf(t, first, out1))
}

// An address that means all of them is no use to other hosts.
func TestRendezvousEverywhere(t *testing.T) {
	name, err := os.Hostname()
	require.NoError(t, err)
	cmd, out := process(t, args("rendezvous --listen :0"))
	out.await(t, "MASTER_PORT=", 1)
	require.Contains(t, out.String(), "SERRY_RENDEZVOUS=tcp://"+name+":")
	require.Contains(t, out.String(), "MASTER_ADDR="+name+"\n")
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.Zero(t, exitCodeOf(t, cmd, out))
}

func TestRendezvous(t *testing.T) {
	cmd, out := process(t, args("rendezvous --listen 127.0.0.1:0"))
	out.await(t, "MASTER_PORT=", 1)
	url, _, _ := strings.Cut(strings.TrimPrefix(out.String(), "SERRY_RENDEZVOUS="), "\n")

	// Two runs share it.
	for _, id := range []string{"a", "b"} {
		var stdout, stderr bytes.Buffer
		require.Zero(t, run(args("run -n 2 --run-id", id, "--rdzv", url, ranks(t, "meet")), &stdout, &stderr), "%s%s", &stdout, &stderr)
		require.Contains(t, stdout.String(), "met 1 of 2")
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Zero(t, exitCodeOf(t, cmd, out))
}

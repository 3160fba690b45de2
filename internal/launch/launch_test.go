package launch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
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

	"github.com/serry-project/serry/internal/launch"
	"github.com/serry-project/serry/rendezvous"
)

// The ranks are this test binary: with arguments after "--rank" it is not a test but what rankMain says.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "--rank" {
		os.Exit(rankMain(os.Args[2:]))
	}
	goleak.VerifyTestMain(m)
}

func rankMain(args []string) int {
	rank, rejoin := os.Getenv("RANK"), os.Getenv("SERRY_REJOIN")
	for _, arg := range args {
		do, what, _ := strings.Cut(arg, "=")
		// what@rank is for one rank only, what@rank! for its first start only
		what, who, one := strings.Cut(what, "@")
		if first := strings.TrimSuffix(who, "!"); one && (first != rank || first != who && rejoin != "") {
			continue
		}
		switch do {
		case "print":
			fmt.Println(what)
		case "raw":
			s, _ := strconv.Unquote(`"` + what + `"`)
			fmt.Print(s)
		case "err":
			fmt.Fprintln(os.Stderr, what)
		case "env":
			for _, name := range strings.Split(what, ",") {
				fmt.Printf("%s=%s\n", name, os.Getenv(name))
			}
		case "many":
			for i := range 300 {
				fmt.Printf("%s %d %s\n", what, i, strings.Repeat(rank, 100))
			}
		case "exit":
			code, _ := strconv.Atoi(what)
			return code
		case "kill":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		case "hang":
			time.Sleep(time.Hour)
		case "ignore":
			signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		case "catch": // exits 0 on a signal
			c := make(chan os.Signal, 1)
			signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
			fmt.Println("ready")
			fmt.Println("got", <-c)
		case "child": // a grandchild of the launcher, which holds our output
			exe, _ := os.Executable()
			cmd := exec.Command(exe, "--rank", "ignore", "hang")
			cmd.Stdout = os.Stdout
			if what == "session" {
				cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			}
			if err := cmd.Start(); err != nil {
				return 9
			}
			fmt.Println("child", cmd.Process.Pid)
		case "meet": // all ranks meet at the rendezvous
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
			fmt.Println("met", env.Size)
		}
	}
	return 0
}

// buffer is a bytes.Buffer for several writers, in which a test can wait for text.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
	new chan struct{}
}

func newBuffer() *buffer { return &buffer{new: make(chan struct{}, 1)} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case b.new <- struct{}{}:
	default:
	}
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *buffer) await(t *testing.T, text string, times int) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for strings.Count(b.String(), text) < times {
		select {
		case <-b.new:
		case <-limit:
			t.Fatalf("no %q in:\n%s", text, b.String())
		}
	}
}

// quickExit keeps the race detector from sleeping for a second at the end of each process.
const quickExit = "GORACE=atexit_sleep_ms=0"

// config is n ranks that do what args say.
func config(t *testing.T, n int, args ...string) (launch.Config, *buffer) {
	exe, err := os.Executable()
	require.NoError(t, err)
	out := newBuffer()
	return launch.Config{
		Command: append([]string{exe, "--rank"}, args...), Env: append(os.Environ(), quickExit), Ranks: n,
		Stdout: out, Stderr: out, Backoff: time.Millisecond, Grace: 20 * time.Second,
		Log: slog.New(slog.NewTextHandler(out, nil)),
	}, out
}

func start(t *testing.T, cfg launch.Config) *launch.Launcher {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	l, err := launch.New(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	require.NoError(t, l.StartAll())
	return l
}

func exitError(t *testing.T, err error) *launch.ExitError {
	var e *launch.ExitError
	require.ErrorAs(t, err, &e)
	return e
}

func TestEnvironment(t *testing.T) {
	cfg, out := config(t, 2, "env=RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,GROUP_RANK,MASTER_ADDR,MASTER_PORT,"+
		"TORCHELASTIC_USE_AGENT_STORE,TORCHELASTIC_RESTART_COUNT,TORCHELASTIC_RUN_ID,SERRY_RENDEZVOUS,SERRY_REJOIN,EXTRA", "meet")
	cfg.Env = append(cfg.Env, "SERRY_REJOIN=7", "EXTRA=base")
	cfg.RankEnv = func(rank, restart int) []string { return []string{fmt.Sprintf("EXTRA=%d.%d", rank, restart)} }
	l := start(t, cfg)
	require.NoError(t, l.Wait())
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(l.URL(), "tcp://"))
	for rank := range 2 {
		for _, want := range []string{
			"RANK=%[1]d", "LOCAL_RANK=%[1]d", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "GROUP_RANK=0", "MASTER_ADDR=127.0.0.1",
			"MASTER_PORT=" + port, "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0",
			"TORCHELASTIC_RUN_ID=" + l.RunID(), "SERRY_RENDEZVOUS=" + l.URL(), "SERRY_REJOIN=", "EXTRA=%[1]d.0", "met 2",
		} {
			if strings.Contains(want, "%") {
				want = fmt.Sprintf(want, rank)
			}
			require.Contains(t, out.String(), fmt.Sprintf("[%d] %s\n", rank, want))
		}
	}
}

func TestLinesAreWhole(t *testing.T) {
	cfg, out := config(t, 4, "many=line")
	cfg.Color = true
	require.NoError(t, start(t, cfg).Wait())
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	require.Len(t, lines, 4*300)
	next := map[string]int{}
	for _, line := range lines {
		tag, text, _ := strings.Cut(line, " ")
		rank := tag[strings.Index(tag, "[3")+4:]
		rank = rank[strings.Index(rank, "[")+1 : strings.Index(rank, "]")]
		require.Equal(t, fmt.Sprintf("line %d %s", next[rank], strings.Repeat(rank, 100)), text)
		next[rank]++
	}
	require.Len(t, next, 4)
}

func TestRestart(t *testing.T) {
	cfg, out := config(t, 3, "env=SERRY_REJOIN@1", "kill=@1!", "print=alive")
	cfg.MaxRestarts = 2
	var events []launch.Event
	cfg.OnEvent = func(e launch.Event) { events = append(events, e) }
	l := start(t, cfg)
	require.NoError(t, l.Wait())
	require.Contains(t, out.String(), "[1] SERRY_REJOIN=\n")
	require.Contains(t, out.String(), "[1] SERRY_REJOIN=1\n")
	require.Equal(t, 3, strings.Count(out.String(), "alive"))
	res := l.Results()
	require.Equal(t, []int{0, 1, 0}, []int{res[0].Restarts, res[1].Restarts, res[2].Restarts})
	require.True(t, res[1].Ended)
	require.Zero(t, res[1].Code)
	var kinds []launch.Kind
	for _, e := range events {
		if e.Rank == 1 || e.Rank < 0 {
			kinds = append(kinds, e.Kind)
		}
		if e.Rank == 1 && e.Kind == launch.Restarting {
			require.Equal(t, syscall.SIGKILL, e.Signal)
			require.Equal(t, time.Millisecond, e.Delay)
		}
	}
	require.Equal(t, []launch.Kind{
		launch.Started, launch.Exited, launch.Restarting, launch.Started, launch.Exited, launch.Finished,
	}, kinds)
}

func TestRestartsRunOut(t *testing.T) {
	cfg, _ := config(t, 2, "exit=3@1")
	cfg.MaxRestarts, cfg.BackoffMax = 4, 4*time.Millisecond
	var delays []time.Duration
	var mu sync.Mutex
	cfg.OnEvent = func(e launch.Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == launch.Restarting {
			delays = append(delays, e.Delay)
		}
	}
	l := start(t, cfg)
	e := exitError(t, l.Wait())
	require.Equal(t, launch.ExitError{Rank: 1, Code: 3}, *e)
	require.Equal(t, 4, l.Results()[1].Restarts)
	require.Len(t, delays, 4)
	for _, d := range delays { // a slow machine may make a rank's life longer than the back-off's end
		require.LessOrEqual(t, d, 4*time.Millisecond)
	}
}

// The group is meant to survive: the others go on, and the run's code is the dead rank's.
func TestSurvivorsGoOn(t *testing.T) {
	cfg, out := config(t, 3, "kill=@1", "catch")
	l := start(t, cfg)
	out.await(t, "ready", 2)
	for !l.Results()[1].Ended {
		time.Sleep(time.Millisecond)
	}
	require.NotZero(t, l.Pid(0))
	require.Zero(t, l.Pid(1))
	require.ErrorIs(t, l.Kill(1, syscall.SIGTERM), os.ErrProcessDone)
	require.NoError(t, l.Kill(0, syscall.SIGTERM))
	require.NoError(t, l.Kill(2, syscall.SIGTERM))
	e := exitError(t, l.Wait())
	require.Equal(t, launch.ExitError{Rank: 1, Code: 137, Signal: syscall.SIGKILL}, *e)
	require.Equal(t, "rank 1 was ended by SIGKILL", e.Error())
}

func TestFailFast(t *testing.T) {
	cfg, _ := config(t, 3, "exit=5@1", "hang")
	cfg.FailFast = true
	l := start(t, cfg)
	require.Equal(t, launch.ExitError{Rank: 1, Code: 5}, *exitError(t, l.Wait()))
	require.Equal(t, syscall.SIGTERM, l.Results()[0].Signal)
}

// What the demo does: kill a rank, look, start it again.
func TestStartAgainByHand(t *testing.T) {
	cfg, out := config(t, 2, "env=SERRY_REJOIN", "catch")
	l := start(t, cfg)
	out.await(t, "ready", 2)
	require.Error(t, l.Start(0), "it runs")
	require.Error(t, l.Start(2), "there is none")
	pid := l.Pid(0)
	require.NoError(t, l.Kill(0, syscall.SIGKILL))
	for !l.Results()[0].Ended {
		time.Sleep(time.Millisecond)
	}
	require.NoError(t, l.Start(0))
	require.NotEqual(t, pid, l.Pid(0))
	out.await(t, "[0] SERRY_REJOIN=1", 1)
	out.await(t, "ready", 3)
	require.NoError(t, l.Kill(0, syscall.SIGTERM))
	require.NoError(t, l.Kill(1, syscall.SIGTERM))
	require.NoError(t, l.Wait(), "all ended well at last")
}

func TestStop(t *testing.T) {
	cfg, out := config(t, 2, "catch")
	l := start(t, cfg)
	out.await(t, "ready", 2)
	l.Stop(syscall.SIGINT)
	e := exitError(t, l.Wait())
	require.Equal(t, launch.ExitError{Rank: -1, Code: 130, Signal: syscall.SIGINT}, *e)
	require.Equal(t, 2, strings.Count(out.String(), "got interrupt"))
	require.ErrorIs(t, l.Start(0), launch.ErrStopping)
}

func TestStopKillsAfterGraceOrAtOnce(t *testing.T) {
	for name, grace := range map[string]time.Duration{"grace": 50 * time.Millisecond, "second": time.Hour} {
		cfg, out := config(t, 2, "ignore", "child", "print=ready", "hang")
		cfg.Grace = grace
		l := start(t, cfg)
		out.await(t, "ready", 2)
		l.Stop(syscall.SIGTERM)
		if name == "second" {
			l.Stop(syscall.SIGTERM)
		}
		require.Equal(t, 143, exitError(t, l.Wait()).Code, name)
		require.Equal(t, syscall.SIGKILL, l.Results()[0].Signal, name)
		noneLeft(t, out)
	}
}

// noneLeft checks that the children that ranks have printed are gone.
func noneLeft(t *testing.T, out *buffer) {
	for _, line := range strings.Split(out.String(), "\n") {
		if _, pid, ok := strings.Cut(line, "child "); ok {
			n, err := strconv.Atoi(pid)
			require.NoError(t, err)
			require.Eventually(t, func() bool { return gone(n) }, 10*time.Second, 5*time.Millisecond, "pid %d", n)
		}
	}
}

// gone also says yes for a zombie, whose reaping is the business of whoever adopted it.
func gone(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return syscall.Kill(pid, 0) != nil
	}
	return strings.Contains(string(b), ") Z ")
}

// A rank that ends takes its children along, and an output that they hold open does not hold the launcher up.
func TestChildrenOfRanks(t *testing.T) {
	cfg, out := config(t, 2, "child", "print=bye")
	require.NoError(t, start(t, cfg).Wait())
	require.Equal(t, 2, strings.Count(out.String(), "bye"))
	noneLeft(t, out)

	cfg, out = config(t, 1, "child=session", "print=bye")
	begin := time.Now()
	require.NoError(t, start(t, cfg).Wait())
	require.Less(t, time.Since(begin), 15*time.Second)
	require.Contains(t, out.String(), "bye")
	_, pid, _ := strings.Cut(out.String(), "child ")
	n, err := strconv.Atoi(pid[:strings.Index(pid, "\n")])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(n, syscall.SIGKILL), "one in a session of its own is its own business")
}

func TestPartialAndOddLines(t *testing.T) {
	cfg, out := config(t, 1, `raw=a\r\nb\n\nbar 1\rbar 2\rend`)
	require.NoError(t, start(t, cfg).Wait())
	require.Equal(t, "[0] a\n[0] b\n[0] \n[0] bar 1\n[0] bar 2\n[0] end\n", out.String())
}

func TestRunStopsWithContext(t *testing.T) {
	cfg, out := config(t, 2, "catch")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- launch.Run(ctx, cfg) }()
	out.await(t, "ready", 2)
	cancel()
	require.Equal(t, 143, exitError(t, <-done).Code)
}

func TestLogDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	cfg, _ := config(t, 2, "print=hello", "err=oops", "kill=@0!")
	cfg.LogDir, cfg.MaxRestarts = dir, 1
	require.NoError(t, start(t, cfg).Wait())
	b, err := os.ReadFile(filepath.Join(dir, "rank-0.log"))
	require.NoError(t, err)
	before, after, _ := strings.Cut(string(b), "---- restart 1 ----\n")
	for _, part := range []string{before, after} {
		require.Contains(t, part, "hello\n")
		require.Contains(t, part, "oops\n")
	}
	b, err = os.ReadFile(filepath.Join(dir, "rank-1.log"))
	require.NoError(t, err)
	require.NotContains(t, string(b), "restart")
}

// A log that cannot be written is a warning, once.
func TestLogDirFaults(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Symlink("/dev/full", filepath.Join(dir, "rank-0.log")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "rank-1.log"), 0o700))
	cfg, out := config(t, 2, "many=x")
	cfg.LogDir = dir
	require.NoError(t, start(t, cfg).Wait())
	require.Equal(t, 2, strings.Count(out.String(), "a log file is not complete"))
	require.Contains(t, out.String(), "no space left on device")
	require.Equal(t, 600, strings.Count(out.String(), "] x "))

	cfg.LogDir = filepath.Join(dir, "rank-0.log", "sub")
	require.NoError(t, start(t, cfg).Wait())
	require.Contains(t, out.String(), "no log files")
}

type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// Nobody reads the launcher's output any more: the ranks do not notice.
func TestBrokenOutput(t *testing.T) {
	cfg, out := config(t, 2, "many=x", "err=end")
	cfg.Stdout = fullWriter{}
	require.NoError(t, start(t, cfg).Wait())
	require.Equal(t, 1, strings.Count(out.String(), "cannot print"))
	require.Contains(t, out.String(), "[1] end")
}

func TestUntagged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	cfg, _ := config(t, 2, "print=hello")
	cfg.Stdout, cfg.Untagged = f, true
	require.NoError(t, start(t, cfg).Wait())
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "hello\nhello\n", string(b))
}

func TestBadConfig(t *testing.T) {
	good, _ := config(t, 1)
	for want, change := range map[string]func(*launch.Config){
		"no program to start":        func(c *launch.Config) { c.Command = nil },
		"cannot start ./missing":     func(c *launch.Config) { c.Command = []string{"./missing"} },
		"node 2 of 2":                func(c *launch.Config) { c.Nodes, c.Node, c.Rendezvous = 2, 2, "a:1" },
		"several nodes need":         func(c *launch.Config) { c.Nodes = 2 },
		"write host:port":            func(c *launch.Config) { c.Rendezvous = "host" },
		"a number up to":             func(c *launch.Config) { c.Rendezvous = "host:http" },
		"name the host":              func(c *launch.Config) { c.Rendezvous = ":29500" },
		"port 0 is for one node":     func(c *launch.Config) { c.Nodes, c.Rendezvous = 2, "host:0" },
		"needs a run id":             func(c *launch.Config) { c.Rendezvous = "tcp://host:1" },
		"one that runs already is":   func(c *launch.Config) { c.Rendezvous = "file:///x" },
		"a grace of -1s":             func(c *launch.Config) { c.Grace = -time.Second },
		"1 nodes of -1 ranks":        func(c *launch.Config) { c.Ranks = -1 },
		"-2 restarts":                func(c *launch.Config) { c.MaxRestarts = -2 },
		"longest back-off":           func(c *launch.Config) { c.Backoff = time.Hour },
		"the address must be one of": func(c *launch.Config) { c.Rendezvous = "192.0.2.1:0" },
	} {
		cfg := good
		change(&cfg)
		_, err := launch.New(context.Background(), cfg)
		require.ErrorContains(t, err, want)
		var usage *launch.UsageError
		var start *launch.StartError
		require.Equal(t, want == "cannot start ./missing", errors.As(err, &start), want)
		require.Equal(t, start == nil && !strings.HasPrefix(want, "the address"), errors.As(err, &usage), want)
	}
	server, err := rendezvous.Listen(context.Background(), "127.0.0.1:0", nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	good.Rendezvous = server.Addr()
	_, err = launch.New(context.Background(), good)
	_, port, _ := net.SplitHostPort(server.Addr())
	require.ErrorContains(t, err, "port "+port+" of 127.0.0.1 is in use")
}

// A program that vanishes between check and start, and one that is no program.
func TestCannotStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(path, []byte("\x7fELF rubbish"), 0o755))
	cfg, _ := config(t, 2)
	cfg.Command = []string{path}
	err := launch.Run(context.Background(), cfg)
	require.ErrorContains(t, err, "rank 0: cannot start")
	var e *launch.ExitError
	require.False(t, errors.As(err, &e))
	var start *launch.StartError
	require.ErrorAs(t, err, &start)
	require.Equal(t, 126, start.Code)
}

func TestJSONLines(t *testing.T) {
	var buf bytes.Buffer
	cfg, _ := config(t, 1, "kill=@0!")
	cfg.MaxRestarts, cfg.RunID = 1, "x"
	cfg.OnEvent = launch.JSONLines(&buf, slog.New(slog.DiscardHandler))
	l := start(t, cfg)
	require.NoError(t, l.Wait())
	var kinds []string
	dec := json.NewDecoder(&buf)
	for {
		var e map[string]any
		if err := dec.Decode(&e); err == io.EOF {
			break
		} else {
			require.NoError(t, err)
		}
		kinds = append(kinds, e["event"].(string))
		if e["event"] == "restarting" {
			require.Equal(t, "SIGKILL", e["signal"])
			require.InDelta(t, 0.001, e["delay_s"], 1e-9)
		}
	}
	require.Equal(t, []string{"started", "exited", "restarting", "started", "exited", "finished"}, kinds)

	out := newBuffer()
	on := launch.JSONLines(fullWriter{}, slog.New(slog.NewTextHandler(out, nil)))
	on(launch.Event{})
	on(launch.Event{})
	require.Equal(t, 1, strings.Count(out.String(), "events are lost"))
}

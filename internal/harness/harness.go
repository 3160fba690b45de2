// Package harness runs the ranks of a test as processes: the test binary starts itself again, once for each rank, so that
// they can be killed, stopped and replaced like real ones.
package harness

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	programEnv = "SERRY_HARNESS_PROGRAM"
	argsEnv    = "SERRY_HARNESS_ARGS"
	netnsEnv   = "SERRY_HARNESS_NETNS"
)

// Program is what a process runs. Lines that it prints to out reach the test as Proc.Lines.
type Program func(args []string, out io.Writer) error

// Main runs the program that this process was started for, or the tests. Call it from TestMain.
func Main(m *testing.M, programs map[string]Program) {
	enterNetns()
	name := os.Getenv(programEnv)
	if name == "" {
		os.Exit(m.Run())
	}
	p, ok := programs[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "harness: no program %q\n", name)
		os.Exit(2)
	}
	if err := p(strings.Split(os.Getenv(argsEnv), "\x1f"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Proc is one process.
type Proc struct {
	Name string
	cmd  *exec.Cmd
	done chan struct{}
	err  error

	mu    sync.Mutex
	lines []string
	err2  strings.Builder
	more  chan struct{}
}

// Option changes the command line of a process: another binary, say, or where it runs.
type Option func(*exec.Cmd)

// Start runs a program as a process. It is killed when the test ends.
func Start(t testing.TB, name, program string, args []string, opts ...Option) *Proc {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), programEnv+"="+program, argsEnv+"="+strings.Join(args, "\x1f"))
	for _, o := range opts {
		o(cmd)
	}
	p := &Proc{Name: name, cmd: cmd, done: make(chan struct{}), more: make(chan struct{})}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = &stderr{p}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Signal(syscall.SIGKILL)
		<-p.done
		// A process that is killed has no exit status that says it.
		if out := p.Stderr(); strings.Contains(out, "WARNING: DATA RACE") || strings.Contains(out, "fatal error: ") || strings.Contains(out, "\npanic: ") {
			t.Errorf("%s:\n%s", p.Name, out)
		}
	})
	go func() {
		sc := bufio.NewScanner(out)
		sc.Buffer(nil, 1<<24)
		for sc.Scan() {
			p.mu.Lock()
			p.lines = append(p.lines, sc.Text())
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
		}
		p.err = cmd.Wait()
		p.mu.Lock()
		close(p.more)
		p.more = make(chan struct{})
		close(p.done)
		p.mu.Unlock()
	}()
	return p
}

type stderr struct{ p *Proc }

func (s *stderr) Write(b []byte) (int, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if s.p.err2.Len() < 1<<20 {
		s.p.err2.Write(b)
	}
	return len(b), nil
}

// Pid is the process's.
func (p *Proc) Pid() int { return p.cmd.Process.Pid }

// Signal sends one; a process that has ended gets none.
func (p *Proc) Signal(s syscall.Signal) {
	select {
	case <-p.done:
	default:
		_ = p.cmd.Process.Signal(s)
	}
}

// Wait waits for the end, at most d, and returns the exit code (-1: a signal) or an error with what it said on stderr.
func (p *Proc) Wait(d time.Duration) (int, error) {
	select {
	case <-p.done:
		code := p.cmd.ProcessState.ExitCode()
		if p.err != nil {
			return code, fmt.Errorf("%s: %w\n%s", p.Name, p.err, p.Stderr())
		}
		return code, nil
	case <-time.After(d):
		return 0, fmt.Errorf("%s still runs after %v\nlines: %s\nstderr: %s", p.Name, d, strings.Join(p.Lines(), "\n"), p.Stderr())
	}
}

// Line waits for a line with the prefix, at most d, and returns the rest of it.
func (p *Proc) Line(prefix string, d time.Duration) (string, error) {
	timeout := time.After(d)
	for at := 0; ; {
		p.mu.Lock()
		for ; at < len(p.lines); at++ {
			if rest, ok := strings.CutPrefix(p.lines[at], prefix); ok {
				p.mu.Unlock()
				return rest, nil
			}
		}
		more := p.more
		p.mu.Unlock()
		select {
		case <-p.done:
			return "", fmt.Errorf("%s ended (%v) without a line %q\n%s", p.Name, p.err, prefix, p.Stderr())
		default:
		}
		select {
		case <-more:
		case <-timeout:
			return "", fmt.Errorf("%s printed no line %q in %v\nlines: %s\nstderr: %s", p.Name, prefix, d, strings.Join(p.Lines(), "\n"), p.Stderr())
		}
	}
}

// Lines are what it has printed so far.
func (p *Proc) Lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.lines...)
}

// Stderr is what it has said so far.
func (p *Proc) Stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err2.String()
}

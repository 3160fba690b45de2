package harness

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Proc is one process.
type Proc struct {
	Name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	done chan struct{}
	err  error

	mu    sync.Mutex
	lines []string
	err2  strings.Builder
	more  chan struct{}
}

// places are the hosts that commands are to run on; others run on ours.
var places sync.Map // *exec.Cmd: *Host

// Spawn starts a process, whose standard input and outputs are ours. Who starts it must see to its end.
func Spawn(name string, cmd *exec.Cmd, opts ...Option) (*Proc, error) {
	for _, o := range opts {
		o(cmd)
	}
	p := &Proc{Name: name, cmd: cmd, done: make(chan struct{}), more: make(chan struct{})}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	cmd.Stderr = &stderr{p}
	if h, ok := places.LoadAndDelete(cmd); ok {
		err = h.(*Host).start(cmd)
	} else {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("harness: starting %s: %w", name, err)
	}
	go p.listen(out)
	return p, nil
}

func (p *Proc) listen(out io.Reader) {
	sc := bufio.NewScanner(out)
	sc.Buffer(nil, 1<<24)
	for sc.Scan() {
		p.mu.Lock()
		p.lines = append(p.lines, sc.Text())
		close(p.more)
		p.more = make(chan struct{})
		p.mu.Unlock()
	}
	p.err = p.cmd.Wait()
	p.mu.Lock()
	close(p.more)
	p.more = make(chan struct{})
	close(p.done)
	p.mu.Unlock()
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

// Done is closed when the process has ended and its last line is in.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Ended says that Done is closed.
func (p *Proc) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Crashed says that it ended by a fault of a Go program: a data race, a panic. It is called after the end.
func (p *Proc) Crashed() bool {
	out := "\n" + p.Stderr()
	return strings.Contains(out, "WARNING: DATA RACE") || strings.Contains(out, "\nfatal error: ") || strings.Contains(out, "\npanic: ")
}

// Signal sends one; a process that has ended gets none.
func (p *Proc) Signal(s syscall.Signal) {
	if !p.Ended() {
		_ = p.cmd.Process.Signal(s)
	}
}

// Tell writes a line to the process's standard input.
func (p *Proc) Tell(format string, a ...any) error {
	if _, err := fmt.Fprintf(p.in, format+"\n", a...); err != nil {
		return fmt.Errorf("harness: telling %s: %w", p.Name, err)
	}
	return nil
}

// Wait waits for the end, at most d, and returns the exit code (-1: a signal) or an error with what it said on stderr.
func (p *Proc) Wait(d time.Duration) (int, error) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.done:
		code := p.cmd.ProcessState.ExitCode()
		if p.err != nil {
			return code, fmt.Errorf("%s: %w\n%s", p.Name, p.err, p.Stderr())
		}
		return code, nil
	case <-t.C:
		return 0, fmt.Errorf("%s still runs after %v\nlines: %s\nstderr: %s", p.Name, d, strings.Join(p.Lines(), "\n"), p.Stderr())
	}
}

// Line waits for a line with the prefix, at most d, and returns the rest of it.
func (p *Proc) Line(prefix string, d time.Duration) (rest string, err error) {
	_, err = p.Find(0, d, func(line string) (ok bool) {
		rest, ok = strings.CutPrefix(line, prefix)
		return ok
	})
	if err != nil {
		return "", fmt.Errorf("line %q: %w", prefix, err)
	}
	return rest, nil
}

// Find waits for a line, from the nth on, of which is says that it is the one, at most d, and returns its number.
func (p *Proc) Find(n int, d time.Duration, is func(line string) bool) (at int, err error) {
	timeout := time.NewTimer(d)
	defer timeout.Stop()
	for at = n; ; {
		p.mu.Lock()
		for ; at < len(p.lines); at++ {
			if is(p.lines[at]) {
				p.mu.Unlock()
				return at, nil
			}
		}
		more := p.more
		p.mu.Unlock()
		if p.Ended() {
			return at, fmt.Errorf("%s ended (%v) without it\n%s", p.Name, p.err, p.Stderr())
		}
		select {
		case <-more:
		case <-timeout.C:
			return at, fmt.Errorf("%s did not print it in %v\nlines: %s\nstderr: %s", p.Name, d, strings.Join(p.Lines(), "\n"), p.Stderr())
		}
	}
}

// Lines are what it has printed so far.
func (p *Proc) Lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.lines...)
}

// Count is the number of Lines.
func (p *Proc) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.lines)
}

// Stderr is what it has said so far.
func (p *Proc) Stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err2.String()
}

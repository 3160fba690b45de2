package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Options are what all measurements share.
type Options struct {
	// Self is the command line that ends in Rank: a process started with it and one more argument is a rank.
	Self []string
	// Killable is Self of a binary with fault points, for failover; none: Self is, if this is built with them.
	Killable []string
	// Progress is where to say how far it is; nil is nowhere.
	Progress io.Writer
	// Profile is a directory for a CPU profile of each rank, "" for none.
	Profile string
	// Keep is a directory for what ranks wrote to stderr when something went wrong, "" for none.
	Keep string
}

// crew is the processes of a measurement, and the directory where they meet.
type crew struct {
	o      Options
	ctx    context.Context
	dir    string
	world  string // below dir: one for each world
	worlds int
	events chan event
	over   chan struct{}
	all    []*proc
}

// event is a line that a process printed, or its end.
type event struct {
	p    *proc
	text string
	end  bool
}

func (e event) cut(prefix string) (string, bool) {
	if e.end {
		return "", false
	}
	return strings.CutPrefix(e.text, prefix)
}

func newCrew(ctx context.Context, o Options) (*crew, error) {
	dir, err := os.MkdirTemp("", "serry-bench-")
	if err != nil {
		return nil, err
	}
	c := &crew{o: o, ctx: ctx, dir: dir, events: make(chan event, 1024), over: make(chan struct{})}
	return c, c.fresh()
}

// fresh begins another world.
func (c *crew) fresh() error {
	c.worlds++
	c.world = fmt.Sprintf("%s/%d", c.dir, c.worlds)
	return os.Mkdir(c.world, 0o700)
}

// close ends all processes and removes the directory.
func (c *crew) close() {
	close(c.over)
	c.endAll()
	_ = os.RemoveAll(c.dir)
}

func (c *crew) endAll() {
	for _, p := range c.all {
		p.kill()
	}
	for _, p := range c.all {
		<-p.done
	}
	c.all = c.all[:0]
}

// restart ends all processes, forgets what they said, and begins another world.
func (c *crew) restart() error {
	for _, p := range c.all {
		p.kill()
	}
	for _, p := range c.all {
		for ended := false; !ended; {
			select {
			case <-c.events:
			case <-p.done:
				ended = true
			}
		}
	}
	c.all = c.all[:0]
	for len(c.events) > 0 {
		<-c.events
	}
	return c.fresh()
}

// proc is one rank.
type proc struct {
	rank int
	args rankArgs
	cmd  *exec.Cmd
	in   io.WriteCloser
	done chan struct{}

	mu   sync.Mutex
	said []byte // the end of what it wrote to stderr
}

// Write keeps the last 256 KiB.
func (p *proc) Write(b []byte) (int, error) {
	const most = 256 << 10
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said = append(p.said, b...)
	if n := len(p.said) - most; n > most {
		p.said = append(p.said[:0], p.said[n:]...)
	}
	return len(b), nil
}

func (p *proc) stderr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.TrimSpace(string(p.said))
}

// start starts a rank. It ends when the crew does, or when we do: it reads our end of its standard input.
func (c *crew) start(a rankArgs) (*proc, error) {
	a.Dir, a.Profile = c.world, c.o.Profile
	text, err := json.Marshal(a)
	if err != nil {
		return nil, err
	}
	p := &proc{rank: a.Rank, args: a, done: make(chan struct{})}
	p.cmd = exec.Command(c.o.Self[0], append(c.o.Self[1:len(c.o.Self):len(c.o.Self)], string(text))...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to handle
	p.cmd.Stderr = p
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("bench: starting rank %d: %w", a.Rank, err)
	}
	c.all = append(c.all, p)
	go func() {
		sc := bufio.NewScanner(out)
		sc.Buffer(nil, 1<<24)
		for sc.Scan() {
			c.put(event{p: p, text: sc.Text()})
		}
		_ = p.cmd.Wait()
		close(p.done)
		c.put(event{p: p, end: true})
	}()
	return p, nil
}

func (c *crew) put(e event) {
	select {
	case c.events <- e:
	case <-c.over:
	}
}

// kill ends the process, if it has not ended.
func (p *proc) kill() {
	select {
	case <-p.done:
	default:
		_ = p.cmd.Process.Kill()
	}
}

// tell writes a line to the process.
func (p *proc) tell(format string, a ...any) error {
	_, err := fmt.Fprintf(p.in, format+"\n", a...)
	return err
}

func (p *proc) ended() string {
	s := fmt.Sprintf("rank %d ended (%v)", p.rank, p.cmd.ProcessState)
	if t := p.stderr(); t != "" {
		s += ": " + t[:min(len(t), 2000)]
	}
	return s
}

var errTimeout = errors.New("nothing came")

// next is the next event, errTimeout after d, or ctx's end.
func (c *crew) next(d time.Duration) (event, error) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case e := <-c.events:
		return e, nil
	case <-c.ctx.Done():
		return event{}, c.ctx.Err()
	case <-t.C:
		return event{}, errTimeout
	}
}

// gather waits, at most d, until each of ps has printed a line with the prefix, and hands the rest of it to f. A process
// that ends before is an error; other lines go to other (or nowhere).
func (c *crew) gather(ps []*proc, prefix string, d time.Duration, f func(p *proc, rest string) error, other func(p *proc, text string)) error {
	missing := map[*proc]bool{}
	for _, p := range ps {
		missing[p] = true
	}
	until := time.Now().Add(d)
	for len(missing) > 0 {
		e, err := c.next(time.Until(until))
		switch {
		case errors.Is(err, errTimeout):
			s := ""
			for p := range missing {
				s += fmt.Sprintf("; rank %d %s", p.rank, p.stderr())
			}
			return fmt.Errorf("bench: %d ranks did not say %q in %v%s", len(missing), strings.TrimSpace(prefix), d, s)
		case err != nil:
			return err
		}
		rest, ok := e.cut(prefix)
		switch {
		case ok && missing[e.p]:
			delete(missing, e.p)
			if f != nil {
				if err := f(e.p, rest); err != nil {
					return err
				}
			}
		case e.end && missing[e.p]:
			return fmt.Errorf("bench: %s", e.p.ended())
		case !e.end && other != nil:
			other(e.p, e.text)
		}
	}
	return nil
}

// founders starts the ranks of a world.
func (c *crew) founders(n int, a rankArgs) ([]*proc, error) {
	var ps []*proc
	for r := range n {
		a.Rank, a.Size = r, n
		p, err := c.start(a)
		if err != nil {
			return ps, err
		}
		ps = append(ps, p)
	}
	return ps, nil
}

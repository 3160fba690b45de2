package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"
	"github.com/serry-project/serry/internal/launch"
)

// cluster is the worker processes.
type cluster struct {
	o   options
	w   *watcher
	l   *launch.Launcher
	ctx context.Context // ends with the demo's, with the first rank that fails, and when all have ended

	stop context.CancelCauseFunc
	over chan struct{}
	err  error // of the whole run, when over

	mu      sync.Mutex
	fragile map[int]bool // ranks whose end is no failure: we kill them, or they have not served yet
	ended   map[int]bool // process ids
}

// errOver says that all ranks have ended while something else was expected.
var errOver = errors.New("all ranks have ended")

func startCluster(ctx context.Context, o options, j job, w *watcher) (*cluster, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	c := &cluster{o: o, w: w, fragile: map[int]bool{}, ended: map[int]bool{}, over: make(chan struct{})}
	c.ctx, c.stop = context.WithCancelCause(ctx)
	c.l, err = launch.New(ctx, launch.Config{
		Command: []string{exe, "worker", string(text)}, Env: os.Environ(), Ranks: o.ranks,
		RankEnv: func(int, int) []string { return []string{"SERRY_LINKS=" + o.links} },
		Stdout:  lines(c.event), Stderr: lines(c.said), OnEvent: c.happened,
	})
	if err != nil {
		return nil, err
	}
	if err := c.l.StartAll(); err != nil {
		c.close()
		return nil, err
	}
	go func() {
		err := c.l.Wait()
		if err == nil {
			err = errOver
		}
		c.stop(err)
		c.err = context.Cause(c.ctx) // the first of them
		close(c.over)
	}()
	return c, nil
}

// lines is a Writer that is given whole lines.
type lines func([]byte)

func (f lines) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

// event takes a line that a rank printed: its mark and JSON.
func (c *cluster) event(line []byte) {
	_, text, _ := bytes.Cut(line, []byte("] "))
	var e serve.Event
	if json.Unmarshal(text, &e) == nil {
		c.w.event(e)
	}
}

// said takes a line of a rank's stderr.
func (c *cluster) said(line []byte) { c.w.say(plain, "%s", strings.TrimSpace(string(line))) }

// happened takes what the launcher tells. A rank that ends badly ends all, unless that was to be expected.
func (c *cluster) happened(e launch.Event) {
	if e.Kind != launch.Exited {
		return
	}
	c.mu.Lock()
	c.ended[e.Pid] = true
	fragile := c.fragile[e.Rank]
	c.mu.Unlock()
	c.w.wake()
	if e.Code != 0 && !fragile {
		err := error(&launch.ExitError{Rank: e.Rank, Code: e.Code, Signal: e.Signal})
		if e.Signal == syscall.SIGKILL {
			err = fmt.Errorf("%w, but not by the demo, which replaces only those that it kills itself: "+
				"to kill ranks by hand, run examples/ping with serry run --max-restarts", err)
		}
		c.stop(err)
	}
}

// expect says whether the end of a rank is expected.
func (c *cluster) expect(rank int, end bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fragile[rank] = end
}

// dead says that a process has ended.
func (c *cluster) dead(pid int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended[pid]
}

// kill ends a rank's process at once.
func (c *cluster) kill(rank int) error {
	c.expect(rank, true)
	return c.l.Kill(rank, syscall.SIGKILL)
}

// start starts a rank again, when its old process has been reaped.
func (c *cluster) start(rank int) (pid int, err error) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		if err = c.l.Start(rank); err == nil {
			return c.l.Pid(rank), nil
		}
		if time.Now().After(end) {
			return 0, err
		}
	}
}

// until waits for something that the ranks tell, or for the reason why it will not be.
func (c *cluster) until(what string, d time.Duration, cond func() bool) error {
	ctx, cancel := context.WithTimeoutCause(c.ctx, d, fmt.Errorf("%s: not in %v", what, d))
	defer cancel()
	return c.w.until(ctx, cond)
}

// wait waits until all ranks have answered everything and left.
func (c *cluster) wait() error {
	select {
	case <-c.over:
	case <-c.ctx.Done():
		if err := context.Cause(c.ctx); !errors.Is(err, errOver) {
			return err
		}
		<-c.over
	}
	if errors.Is(c.err, errOver) {
		return nil
	}
	return c.err
}

// close ends all processes at once, and returns when they are gone.
func (c *cluster) close() { _ = c.l.Close() }

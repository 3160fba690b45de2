package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"
	"github.com/serry-project/serry/rendezvous"
)

// cluster is the worker processes.
type cluster struct {
	o     options
	w     *watcher
	job   string
	err   io.Writer
	store *rendezvous.Server
	exe   string

	mu    sync.Mutex
	procs map[int]*exec.Cmd
	live  int
	fail  error
	ended chan struct{} // all processes have
	over  chan struct{} // closed with the first failure
}

func startCluster(ctx context.Context, o options, job string, w *watcher, stderr io.Writer) (*cluster, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	st, err := rendezvous.Listen(ctx, "127.0.0.1:0", nil)
	if err != nil {
		return nil, err
	}
	c := &cluster{o: o, w: w, job: job, err: stderr, store: st, exe: exe, procs: map[int]*exec.Cmd{}, ended: make(chan struct{}), over: make(chan struct{})}
	for r := range o.ranks {
		if err := c.start(r, 0); err != nil {
			c.stop()
			return nil, err
		}
	}
	return c, nil
}

// start starts a rank, or its replacement.
func (c *cluster) start(rank, again int) error {
	cmd := exec.Command(c.exe, "worker", c.job)
	cmd.Env = append(os.Environ(),
		fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", c.o.ranks), fmt.Sprintf("LOCAL_RANK=%d", rank),
		"SERRY_RENDEZVOUS="+c.store.URL(), "SERRY_LINKS="+c.o.links)
	if again > 0 {
		cmd.Env = append(cmd.Env, fmt.Sprintf("SERRY_REJOIN=%d", again))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = c.err
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting rank %d: %w", rank, err)
	}
	c.mu.Lock()
	c.procs[rank] = cmd
	c.live++
	c.mu.Unlock()
	go func() {
		sc := bufio.NewScanner(out)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			var e serve.Event
			if json.Unmarshal(sc.Bytes(), &e) == nil {
				c.w.event(e)
			}
		}
		err := cmd.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		killed := false
		if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
			killed = ws.Signaled() && ws.Signal() == syscall.SIGKILL
		}
		if err != nil && !killed && c.fail == nil {
			c.fail = fmt.Errorf("rank %d: %w", rank, err)
			close(c.over)
		}
		if c.live--; c.live == 0 {
			close(c.ended)
		}
	}()
	return nil
}

// kill ends a rank's process at once.
func (c *cluster) kill(rank int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.procs[rank].Process.Signal(syscall.SIGKILL)
}

func (c *cluster) stop() {
	c.mu.Lock()
	for _, p := range c.procs {
		_ = p.Process.Signal(syscall.SIGKILL)
	}
	live := c.live
	c.mu.Unlock()
	if live > 0 {
		<-c.ended
	}
	_ = c.store.Close()
}

// wait waits until all ranks have served everything.
func (c *cluster) wait(ctx context.Context) error {
	shown := make([]int, len(c.w.prompts))
	t := time.NewTicker(150 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-c.ended:
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.fail
		case <-c.over:
			return c.fail
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
			c.w.paint(shown)
		}
	}
}

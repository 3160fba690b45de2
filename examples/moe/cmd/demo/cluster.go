package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"
	"github.com/serry-project/serry/internal/launch"
	"github.com/serry-project/serry/rendezvous"
)

// cluster is the worker processes. A process that ends before it should is replaced, whoever ended it.
type cluster struct {
	o     options
	w     *watcher
	l     *launch.Launcher
	store rendezvous.Store
	ctx   context.Context // ends with the demo's, and with the first thing that cannot be mended, which is its cause
	stop  context.CancelCauseFunc
	tasks sync.WaitGroup

	// Under the watcher's lock.
	kills   []*kill
	rejoins []rejoin
	ending  bool // the ranks may end: nobody is replaced any more
}

// mostTries is how many processes of a rank may end before they serve, one after the other.
const mostTries = 5

// errClosed is the end of a cluster's context when all is over.
var errClosed = errors.New("the run is over")

func startCluster(ctx context.Context, o options, j job, w *watcher) (*cluster, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	c := &cluster{o: o, w: w}
	c.ctx, c.stop = context.WithCancelCause(ctx)
	c.l, err = launch.New(ctx, launch.Config{
		Command: []string{exe, "worker", string(text)}, Env: os.Environ(), Ranks: o.ranks,
		RankEnv: func(int, int) []string { return []string{"SERRY_LINKS=" + o.links} },
		Stdout:  lines(c.event), Stderr: lines(c.said), OnEvent: c.happened,
	})
	if err != nil {
		return nil, err
	}
	// At once, even if somebody does not read what we print.
	context.AfterFunc(c.ctx, func() { c.l.Stop(syscall.SIGKILL) })
	if err := c.open(); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// open starts the watchdog and all ranks.
func (c *cluster) open() (err error) {
	env := map[string]string{ // a rank's, so that we see the same store
		"SERRY_RENDEZVOUS": c.l.URL(), "TORCHELASTIC_RUN_ID": c.l.RunID(), "RANK": "0", "WORLD_SIZE": strconv.Itoa(c.o.ranks),
	}
	if c.store, _, err = rendezvous.FromEnv(c.ctx, func(name string) string { return env[name] }); err != nil {
		return err
	}
	c.tasks.Go(c.watchdog)
	for rank := range c.o.ranks {
		if _, err := c.start(rank); err != nil {
			return err
		}
	}
	return nil
}

// close ends all processes at once, and returns when they are gone.
func (c *cluster) close() {
	c.stop(errClosed)
	_ = c.l.Close()
	c.tasks.Wait()
	if c.store != nil {
		_ = c.store.Close()
	}
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

// start starts a rank, once its old process has been reaped.
func (c *cluster) start(rank int) (p *process, err error) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		c.w.mu.Lock()
		p = &process{tries: c.w.procs[rank].tries, started: time.Now()}
		if err = c.l.Start(rank); err == nil { // what it says waits for the lock
			p.pid = c.l.Pid(rank)
			c.w.procs[rank] = p
		}
		c.w.mu.Unlock()
		if err == nil || c.ctx.Err() != nil || time.Now().After(end) {
			return p, err
		}
	}
}

// happened takes what the launcher tells: here it is decided what the end of a process means.
func (c *cluster) happened(e launch.Event) {
	if e.Kind != launch.Exited {
		return
	}
	w := c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.signal()
	p := w.procs[e.Rank]
	p.ended = true
	if c.ctx.Err() != nil || c.ending && e.Code == 0 {
		return
	}
	how := error(&launch.ExitError{Rank: e.Rank, Code: e.Code, Signal: e.Signal})
	k := p.kill
	if e.Signal != 0 {
		if k == nil {
			k = &kill{Rank: e.Rank, AtToken: w.tokens, at: e.Time}
			p.kill = k
			w.say(bad, "%v, and not by the demo, after %d bytes", how, k.AtToken)
		}
		k.Signal, k.Served, k.after, k.down = launch.SignalName(e.Signal), p.serves(), p.last, w.down()
		c.kills = append(c.kills, k)
	}
	if !p.serves() {
		p.tries++
	}
	switch {
	case c.ending && k != nil: // all was answered: nobody waits for a replacement
	case c.ending || k == nil && (p.serves() || len(c.kills) == 0): // after a kill at the founding another may end too
		c.stop(fmt.Errorf("%w, with its work not done; ranks that did not serve at that time: %v", how, w.down()))
	case w.nobody():
		c.stop(fmt.Errorf("%w, as the last one: nobody is left to go on from", how))
	case p.tries == mostTries:
		c.stop(fmt.Errorf("%w; %d processes of rank %d ended before they served", how, p.tries, e.Rank))
	default:
		c.tasks.Go(func() {
			if err := c.replace(e.Rank, k); err != nil {
				c.stop(fmt.Errorf("replacing rank %d: %w", e.Rank, err))
			}
		})
	}
}

// until waits for something that the ranks tell, or for the reason why it will not be.
func (c *cluster) until(what string, cond func() bool) error { return c.w.until(c.ctx, what, cond) }

// finish lets the ranks end once all is answered and all of them serve, and waits for their ends.
func (c *cluster) finish() error {
	err := c.until("all answers, and all ranks", func() bool {
		c.ending = len(c.w.down()) == 0 && c.w.answered()
		return c.ending
	})
	if err != nil {
		return err
	}
	if err := c.store.Set(c.ctx, endKey, []byte("now")); err != nil {
		if cause := context.Cause(c.ctx); cause != nil {
			return cause
		}
		return err
	}
	return c.until("the ends of all ranks", func() bool {
		for _, p := range c.w.procs {
			if !p.ended {
				return false
			}
		}
		return true
	})
}

// watchdog ends the run if nothing has happened for the demo's patience: there is no other end to its waiting for the
// ranks. It warns before. Time in which the demo itself was stopped, or could not print, does not count.
func (c *cluster) watchdog() {
	const beats = 80
	t := time.NewTicker(c.o.patience / beats)
	defer t.Stop()
	quiet, seen := 0, c.w.news()
	for {
		select {
		case <-t.C:
		case <-c.ctx.Done():
			return
		}
		quiet++
		if now := c.w.news(); now != seen {
			quiet, seen = 0, now
		}
		switch quiet {
		case beats / 4:
			c.w.say(bad, "%v", c.w.stuck(c.o.patience/4))
		case beats:
			c.stop(c.w.stuck(c.o.patience))
			return
		}
	}
}

package main

import (
	"context"
	"fmt"
	"time"
)

// drama kills two ranks in mid-sentence, rank 0 among them, and replaces each. total is how many bytes there will be.
func (c *cluster) drama(ctx context.Context, o options, total int) (kills []kill, rejoins []rejoin, err error) {
	if o.noKill {
		return nil, nil, nil
	}
	w := c.w
	stop := make(chan struct{})
	done := make(chan struct{})
	defer func() { close(stop); <-done }()
	go func() { // the text as it is written, meanwhile
		defer close(done)
		shown := make([]int, len(w.prompts))
		t := time.NewTicker(150 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				w.paint(shown)
			case <-stop:
				return
			}
		}
	}()
	halt := make(chan struct{})
	defer context.AfterFunc(ctx, func() { close(halt) })()
	go func() {
		select {
		case <-c.over:
		case <-c.ended:
		case <-stop:
			return
		}
		defer func() { _ = recover() }() // ctx was first
		close(halt)
	}()
	for i, act := range []struct {
		rank int
		at   float64 // share of the bytes
	}{{o.ranks / 2, 0.2}, {0, 0.55}} {
		k, j, err := c.act(act.rank, int(act.at*float64(total)), halt)
		if err != nil {
			return kills, rejoins, fmt.Errorf("kill %d, rank %d: %w", i+1, act.rank, c.cause(ctx, err))
		}
		kills, rejoins = append(kills, k), append(rejoins, j)
	}
	return kills, rejoins, nil
}

// cause prefers what a rank said.
func (c *cluster) cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return c.fail
	}
	return err
}

// act is one kill and its replacement.
func (c *cluster) act(rank, at int, halt <-chan struct{}) (k kill, j rejoin, err error) {
	w := c.w
	if err := w.until(halt, 2*time.Minute, func() bool { return w.tokens >= at && len(w.steps[w.epoch]) == c.o.ranks }); err != nil {
		return k, j, err
	}
	var others []int
	for r := range c.o.ranks {
		if r != rank {
			others = append(others, r)
		}
	}
	w.mu.Lock()
	before := w.epoch
	k = kill{Rank: rank, Signal: "SIGKILL", AtToken: w.tokens}
	w.mu.Unlock()
	k.at = time.Now()
	if err := c.kill(rank); err != nil {
		return k, j, err
	}
	w.mu.Lock()
	w.say("kill -9 rank %d, after %d bytes", rank, k.AtToken)
	w.mu.Unlock()
	var last time.Time
	if err := w.until(halt, 10*time.Second, func() (ok bool) { k.Epoch, last, ok = w.resumed(before, others); return ok }); err != nil {
		return k, j, fmt.Errorf("no survivor went on: %w", err)
	}
	w.mu.Lock()
	k.ResumeMs = ms(last.Sub(k.at))
	k.DetectMs = ms(w.views[k.Epoch].Sub(k.at))
	k.Taken = w.takenSince(k.at)
	w.say("epoch %d without rank %d: new view after %.1f ms, all survivors go on after %.1f ms", k.Epoch, rank, k.DetectMs, k.ResumeMs)
	tokens := w.tokens
	w.mu.Unlock()
	// The survivors serve alone for a moment.
	if err := w.until(halt, time.Minute, func() bool { return w.tokens >= tokens+200 }); err != nil {
		return k, j, err
	}
	j = rejoin{Rank: rank, started: time.Now()}
	if err := c.start(rank, 1); err != nil {
		return k, j, err
	}
	w.mu.Lock()
	w.say("rank %d is started again", rank)
	w.mu.Unlock()
	if err := w.until(halt, 30*time.Second, func() bool {
		for e, by := range w.steps {
			if t, ok := by[rank]; ok && e > k.Epoch {
				j.Epoch, j.at = e, t
				return true
			}
		}
		return false
	}); err != nil {
		return k, j, fmt.Errorf("the replacement does not serve: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	j.joining = w.joining[rank]
	j.JoinMs, j.TotalMs = ms(j.at.Sub(j.joining)), ms(j.at.Sub(j.started))
	w.say("rank %d serves again: %.0f ms after its call of Join", rank, j.JoinMs)
	return k, j, nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

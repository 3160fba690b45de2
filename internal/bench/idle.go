package bench

import (
	"context"
	"fmt"
	"time"
)

// IdleConfig is what to watch.
type IdleConfig struct {
	Ranks int           `json:"ranks"`
	Links string        `json:"links"`
	For   time.Duration `json:"for_ns"`
}

// IdleDefaults is the case that the project has a bar for.
func IdleDefaults() IdleConfig {
	return IdleConfig{Ranks: 4, Links: "auto", For: 10 * time.Second}
}

// Idle adds up the processor time of ranks that have joined, opened an ep.Buffer, and do nothing.
func Idle(ctx context.Context, o Options, cfg IdleConfig) (*Result, error) {
	var bad checks
	bad.ranks(cfg.Ranks, 1)
	bad.links(cfg.Links)
	bad.that(cfg.For >= time.Millisecond, "for", cfg.For, "a time from 1ms")
	if err := bad.err(); err != nil {
		return nil, err
	}
	res := newResult("idle", cfg, "%d ranks, links %s, processor time in %v", cfg.Ranks, cfg.Links, cfg.For)
	c, err := newCrew(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	p := newProgress(o.Progress)
	defer p.clear()
	p.say("idle: starting %d ranks", cfg.Ranks)
	d := EPDefaults().Shape
	d.Replicas = min(2, cfg.Ranks)
	ps, err := c.founders(cfg.Ranks, rankArgs{Program: "idle", Links: cfg.Links, Shape: d})
	if err != nil {
		return nil, err
	}
	if err := c.gather(ps, "ready", time.Minute, nil, nil); err != nil {
		return nil, err
	}
	wait := func(d time.Duration) error {
		e, err := c.next(d)
		switch {
		case err == nil && e.end:
			return fmt.Errorf("bench: %s", e.p.ended())
		case err == nil:
			return fmt.Errorf("bench: rank %d says %q", e.p.rank, e.text)
		case err == errTimeout:
			return nil
		}
		return err
	}
	if err := wait(min(2*time.Second, cfg.For)); err != nil { // what they do after joining is over
		return nil, err
	}
	read := func() (ticked, exact []time.Duration, err error) {
		for _, q := range ps {
			t, e, err := cpu(q.cmd.Process.Pid)
			if err != nil {
				return nil, nil, err
			}
			ticked, exact = append(ticked, t), append(exact, e)
		}
		return ticked, exact, nil
	}
	t0, e0, err := read()
	if err != nil {
		return nil, err
	}
	p.say("idle: watching for %v", cfg.For)
	if err := wait(cfg.For); err != nil {
		return nil, err
	}
	t1, e1, err := read()
	if err != nil {
		return nil, err
	}
	var ticked, exact time.Duration
	for i := range ps {
		res.note("rank %d: %s by its clock, %s in ticks", i, short(e1[i]-e0[i]), short(t1[i]-t0[i]))
		ticked += t1[i] - t0[i]
		exact += e1[i] - e0[i]
	}
	res.note("all: %s by their clocks, %s in ticks (utime + stime)", short(exact), short(ticked))
	if cfg == IdleDefaults() {
		res.bar("processor time of all", 100*time.Millisecond, max(ticked, exact))
	}
	return res, nil
}

// idle is one rank of Idle.
func (r *rank) idle() error {
	w, err := r.join()
	if err != nil {
		return err
	}
	if _, err := r.open(w); err != nil {
		return err
	}
	r.say("ready")
	<-r.told // until the crew goes
	return nil
}

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// JoinConfig is how many replacements to time.
type JoinConfig struct {
	Ranks int    `json:"ranks"`
	N     int    `json:"n"`
	Links string `json:"links"`
	Shape shape  `json:"shape"`
}

// JoinDefaults is the case that the project has a bar for.
func JoinDefaults() JoinConfig {
	return JoinConfig{Ranks: 4, N: 50, Links: "auto", Shape: FailoverDefaults().Shape}
}

// Join kills a rank, starts a process for its place, and times that from its call of pg.Join to the end of its first
// step. The others run steps all the time.
func Join(ctx context.Context, o Options, cfg JoinConfig) (*Result, error) {
	var bad checks
	bad.ranks(cfg.Ranks, 3)
	bad.number("n", cfg.N, 1, most)
	bad.links(cfg.Links)
	bad.shape(cfg.Shape, cfg.Ranks, 2)
	if err := bad.err(); err != nil {
		return nil, err
	}
	res := newResult("join", cfg, "%d ranks, links %s; a replacement, from its call of Join to the end of its first step", cfg.Ranks, cfg.Links)
	c, err := newCrew(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	say := newProgress(o.Progress)
	defer say.clear()
	p := &population{crew: c, res: res, args: rankArgs{Program: "steps", Links: cfg.Links, Size: cfg.Ranks, Shape: cfg.Shape}}
	say.say("join: starting %d ranks", cfg.Ranks)
	if err := p.found(); err != nil {
		return nil, err
	}
	names := []string{"Join to first step", "Join", "open ep", "first step", "process start to first step"}
	rows := make([]times, len(names))
	for i := range rows {
		rows[i] = newTimes()
	}
	once := func(i int) error {
		v := p.live[i%cfg.Ranks]
		p.doom(v, "its step, by its parent")
		v.kill()
		if err := p.until(patience, "the victim to end", func() bool { return v.gone }); err != nil {
			return err
		}
		if _, _, err := p.outlive(v); err != nil {
			return err
		}
		begin := time.Now()
		m, err := p.replace(v)
		if err != nil {
			return err
		}
		all := time.Since(begin)
		var joined, opened, step int64
		if _, err := fmt.Sscan(m.entered, &joined, &opened, &step); err != nil {
			return fmt.Errorf("bench: rank %d says it entered %q: %w", m.rank, m.entered, err)
		}
		for i, ns := range []int64{joined + opened + step, joined, opened, step, int64(all)} {
			rows[i].add(ns)
		}
		return nil
	}
	for i := range cfg.N {
		switch err := once(i); {
		case errors.Is(err, errBroken):
			say.line("join: %d: VIOLATION: %s", i, res.Violations[len(res.Violations)-1])
			if err := p.restart(); err != nil {
				return nil, err
			}
			if err := p.found(); err != nil {
				return nil, err
			}
		case err != nil:
			return nil, err
		}
		say.say("join: %d of %d", i+1, cfg.N)
	}
	for i, t := range rows {
		res.Rows = append(res.Rows, t.summary(names[i]))
	}
	d := JoinDefaults()
	if cfg.Ranks == d.Ranks && cfg.Links == d.Links && cfg.Shape == d.Shape {
		res.bar("p99", 200*time.Millisecond, res.Rows[0].P99)
	}
	return res, nil
}

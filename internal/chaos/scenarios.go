package chaos

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/history"
)

// Scenario is a row of what the project asks for: faults of one sort, with bars.
type Scenario struct {
	Name, About string
	hosts       int                          // network namespaces that it takes; 0: none
	points      bool                         // it takes fault points
	times       int                          // faults, unless the caller wants fewer
	set         func(cfg *Config)            // what it changes
	run         func(r *runner, n int) error // does n faults
}

// Scenarios lists them, the most important first.
func Scenarios() []Scenario {
	return []Scenario{
		{"kills", "ranks killed at every point, rank 0 as often as others; how long the others need (64 MiB resident)", 0, true, 1000, nil, kills(64<<20, 10, 50)},
		{"kills-2g", "the same with 2 GiB resident in the victim", 0, true, 100, nil, kills(2<<30, 0, 100)},
		{"stop", "a rank stopped beyond a deadline of 500 ms, continued, replaced", 0, false, 20, halfSecond, stopped},
		{"midcopy", "stopped in mid-copy, excluded, replaced, continued: canaries", 0, true, 20, halfSecond, midCopy},
		{"reader", "a reader of a decided operation stopped, continued after the slots were used again", 0, true, 20, halfSecond, reader},
		{"coordinator", "the coordinator stopped while another dies", 0, false, 20, func(c *Config) { c.Deadline = 2 * time.Second }, coordinator},
		{"late", "late by 250 of 500 ms, with 4 busy loops on the machine", 0, false, 500, halfSecond, late},
		{"gc", "all callers wait while garbage is collected in a loop: how late the agent is", 3, false, 1, func(c *Config) { c.Ranks = 3 }, collecting},
		{"cut", "3 hosts, one cut off, and the cut heals", 3, false, 5, three, cutOne},
		{"halves", "2 + 2 ranks on two hosts, cut in half, or the half with the lowest rank lost for good", 2, false, 4, func(c *Config) { c.Deadline = 10 * time.Second }, halves},
		{"pair", "3 hosts, two of them cut from each other, both ways and one way", 3, false, 4, three, pairCut},
		{"reset", "connections reset in mid-operation", 0, false, 100, func(c *Config) { c.Links = "tcp" }, resets},
		{"one-peer", "a rank killed in all_to_all when it has sent to exactly one peer", 0, false, 20, func(c *Config) { c.Links = "tcp" }, onePeer},
		{"env", "torch's env:// with the store in rank 0, which is killed; its replacement has SERRY_PEERS only", 0, false, 5, nil, environment},
		{"cycles", "join, leave, kill: nothing leaks", 0, false, 200, nil, cycles},
	}
}

func halfSecond(c *Config) { c.Deadline = 500 * time.Millisecond }

// three ranks, whose deadline does not come before the silence of a host is noticed.
func three(c *Config) { c.Ranks, c.Deadline = 3, 10*time.Second }

// RunScenarios runs the named scenario, all of them, or (no name) drawn faults. With fewer cfg.Faults than a scenario has
// it does so many.
func RunScenarios(ctx context.Context, o Options, cfg Config, name string) (rs []*Result, err error) {
	if name == "" {
		r, err := Run(ctx, o, cfg)
		return []*Result{r}, err
	}
	var names []string
	for _, s := range Scenarios() {
		names = append(names, s.Name)
		if s.Name != name && name != "all" {
			continue
		}
		r, err := s.do(ctx, o, cfg)
		if err != nil {
			return rs, fmt.Errorf("%s: %w", s.Name, err)
		}
		rs = append(rs, r)
	}
	if len(rs) == 0 {
		return nil, &UsageError{fmt.Errorf("--scenario %s: want list, all or one of %s", name, strings.Join(names, ", "))}
	}
	return rs, nil
}

func (s *Scenario) do(ctx context.Context, o Options, cfg Config) (*Result, error) {
	cfg.Hosts, cfg.Frames = max(1, s.hosts), false
	if s.set != nil {
		s.set(&cfg)
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	r, err := newRunner(ctx, o, cfg, s.Name)
	if err != nil {
		return nil, err
	}
	defer r.close()
	switch {
	case s.points && !o.Tagged:
		r.res.Skipped = ErrNoFaultpoints.Error()
	case s.hosts > 1 && r.net == nil:
		r.res.Skipped = "it takes network namespaces, which cannot be made here (they take root)"
	default:
		if err := s.run(r, min(s.times, cfg.Faults)); err != nil {
			return nil, err
		}
		r.res.atMost("violations", 0, float64(r.res.Violations), "")
		r.res.atMost("hangs", 0, float64(r.res.Hangs), "")
		r.res.atMost("wrong blames", 0, float64(r.res.WrongBlames), "")
	}
	r.res.end()
	return r.res, nil
}

// within runs worlds, of per faults each, until n faults were done by f. after (or nil) looks at each world's histories.
func (r *runner) within(n, per int, f func(i int) error, after func(run *history.Run)) error {
	for i, idle := 0, 0; i < n; {
		began := i
		err := r.world()
		for k := 0; err == nil && k < per && i < n; k++ {
			if err = r.sleep(time.Duration(r.rng.IntN(20_000)) * time.Microsecond); err == nil {
				err = f(i)
			}
			i++
			r.progress.say("%s: %d faults, %d violations, world %d", r.res.Name, r.res.Faults, r.res.Violations, r.worlds)
		}
		if err != nil && !errors.Is(err, errBroken) {
			return err
		}
		if i == began {
			i++
			if idle++; idle == 3 {
				return fmt.Errorf("chaos: no world can be founded: %w", r.failed)
			}
		}
		r.after = after
		if err := r.endWorld(); err != nil {
			return err
		}
	}
	return nil
}

// kills kills ranks at each point, by a bar for the time until the survivors go on (p50 0: none).
func kills(resident int64, p50, p99 float64) func(r *runner, n int) error {
	return func(r *runner, n int) error {
		if resident > 1<<30 {
			r.touch = resident
		} else {
			r.cfg.Resident = resident
		}
		done := func() int {
			k := 0
			for name, p := range r.res.points {
				if name != "pause" {
					k += p.faults
				}
			}
			return k
		}
		for done() < n {
			if err := r.within(min(r.cfg.PerWorld, n-done()), r.cfg.PerWorld, func(int) error {
				if r.rng.IntN(10) == 0 {
					return r.killAnyTime()
				}
				return r.killAtPoint()
			}, nil); err != nil {
				return err
			}
		}
		r.sayNever()
		t := millis(r.res.resume)
		r.res.atLeast("kills", float64(n), float64(r.res.Faults), "")
		if p50 > 0 {
			r.res.atMost("from kill(2) to the last survivor's next operation, p50", p50, t.P50, "ms")
		}
		r.res.atMost("from kill(2) to the last survivor's next operation, p99", p99, t.P99, "ms")
		if r.missed > 0 {
			r.res.note("%d times the victim did not come to its point: these are not counted", r.missed)
		}
		return nil
	}
}

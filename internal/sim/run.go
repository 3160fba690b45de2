package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/internal/wire"
)

// Options of a run; the zero value draws everything from the seed.
type Options struct {
	Ranks, Hosts int
	Trace        bool
	Without      []int // faults of the plan that do not happen
}

// Result is what is left of a world.
type Result struct {
	Seed       uint64
	Ranks      int
	Violations []history.Violation
	Faults     []string // of the plan
	Coverage   Coverage
	End        uint64        // a hash of how it ended
	Took       time.Duration // on the virtual clock
	Trace      string
}

// Runner runs worlds one after the other and keeps their memory.
type Runner struct {
	pool    pool
	checker history.Checker
}

// Run runs the world of a seed, and checks it.
func (r *Runner) Run(seed uint64, o Options) *Result {
	w := r.run(seed, &o)
	return &Result{Seed: seed, Ranks: w.size, Violations: w.Bad, Faults: w.plotted(), Coverage: w.Coverage, End: w.end(), Took: w.now, Trace: w.Trace()}
}

// Shrink leaves out faults of a world that fails, as many as it can while it still does.
func (r *Runner) Shrink(seed uint64, o Options) (*Result, Options) {
	best := r.Run(seed, o)
	for i := 0; i < len(best.Faults) && len(best.Violations) > 0; i++ {
		if slices.Contains(o.Without, i) {
			continue
		}
		less := o
		less.Without = append(slices.Clone(o.Without), i)
		if x := r.Run(seed, less); len(x.Violations) > 0 {
			best, o = x, less
		}
	}
	return best, o
}

func (r *Runner) run(seed uint64, o *Options) *World {
	w := newWorld(seed, o, &r.pool)
	if o.Trace {
		w.trace = &strings.Builder{}
	}
	w.threaten()
	for _, i := range o.Without {
		if i < len(w.faults) {
			w.faults[i].done = true
		}
	}
	w.found()
	w.Stuck = w.run(endOfTime, mostTurns, w.done)
	w.Coverage.Accesses = w.accesses
	if w.Stuck != "" {
		for _, p := range w.procs {
			if !p.dead {
				w.tell("%v: %s", p, p.seat.Where())
			}
		}
	}
	w.close()
	w.check(&r.checker)
	w.giveBack()
	return w
}

// close ends the coroutines.
func (w *World) close() {
	w.cur = nil
	for _, p := range w.procs {
		was := p.dead
		p.dead = true
		for _, t := range []*thread{p.loop, p.caller, p.second} {
			if t != nil && !t.over {
				t.stop()
			}
		}
		p.dead = was
		for _, x := range p.linked {
			x.Forget()
		}
	}
}

// check gives the histories to the checker.
func (w *World) check(c *history.Checker) {
	run := history.Run{
		Deeds: w.deeds, World: 1, End: int64(w.now), Want: w.want, Detect: int64(detect), Deadline: int64(opTimeout), Live: w.Stuck == "" && w.alive() && w.settled(), Frames: w.onlyTCP || len(w.hosts) > 1,
		Continue: func(g uint64) bool {
			for i, id := range w.ids {
				if id == g {
					return w.kinds[i].Mode == 0
				}
			}
			return false
		},
	}
	for _, p := range w.procs {
		x := history.Process{Slot: p.slot, Inc: p.inc, Host: p.host.id, Events: p.events}
		if p.dead && p.ended == 0 {
			x.Killed = int64(max(p.killed, 1))
		}
		run.Procs = append(run.Procs, x)
	}
	for _, v := range c.Check(&run) {
		w.Bad = append(w.Bad, history.Violation{Property: v.Property, Text: v.Text})
	}
	if w.Stuck != "" {
		w.violate("P5", "the world is stuck: %s; %s", w.Stuck, w.where())
	}
}

// alive says that somebody is left.
func (w *World) alive() bool {
	for _, p := range w.procs {
		if !p.dead && p.member {
			return true
		}
	}
	return false
}

// where says what each process is at.
func (w *World) where() string {
	var b strings.Builder
	for _, p := range w.procs {
		if p.dead {
			continue
		}
		fmt.Fprintf(&b, "%v: step %d.%d, member %v, over %v, stopped %v; ", p, p.prog.at, p.prog.tail, p.member, p.over, p.stopped)
	}
	return b.String()
}

// plotted describes the plan of faults.
func (w *World) plotted() (s []string) {
	for _, f := range w.faults {
		s = append(s, f.String())
	}
	return s
}

// end hashes how the world has ended: the last view, and how each process and operation did.
func (w *World) end() uint64 {
	h := w.last.Digest()
	for _, p := range w.procs {
		h = wire.Hash(h, uint64(p.slot)<<32|uint64(p.inc)<<16|uint64(p.ended))
		for i := range p.events {
			e := &p.events[i]
			h = wire.Hash(h, uint64(e.Kind)<<56|uint64(e.Op)<<48|uint64(e.Outcome)<<40|e.Epoch)
		}
	}
	return h
}

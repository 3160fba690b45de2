package chaos

import (
	"fmt"
	"strings"
	"syscall"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
)

// lostAt is the earliest view that is without a slot after a time, and why it says so; epoch 0: there is none.
func lostAt(run *history.Run, slot int, after int64) (at int64, epoch uint64, why string) {
	for p := range run.Procs {
		for i := range run.Procs[p].Events {
			e := &run.Procs[p].Events[i]
			if e.Kind == history.Lost && e.Set.Has(slot) && e.Time >= after && (epoch == 0 || e.Time < at) {
				at, epoch, why = e.Time, e.Epoch, e.Why
			}
		}
	}
	return at, epoch, why
}

// excludedIn counts the processes that were lost and did not leave.
func excludedIn(run *history.Run) (n int) {
	for p := range run.Procs {
		x := &run.Procs[p]
		if len(x.Events) == 0 || ended(x) == history.Left {
			continue
		}
		if _, epoch, _ := lostAt(run, x.Slot, x.Events[0].Time); epoch != 0 {
			n++
		}
	}
	return n
}

// ended is how a process ended by itself.
func ended(p *history.Process) history.Outcome {
	for i := range p.Events {
		if e := &p.Events[i]; e.Kind == history.Ended {
			return e.Outcome
		}
	}
	return 0
}

// stopDeed is the stop of a process.
func stopDeed(run *history.Run, p int) *history.Deed {
	for i := range run.Deeds {
		if d := &run.Deeds[i]; d.Proc == p && d.What == history.Stop {
			return d
		}
	}
	return nil
}

// exclusions adds up what became of ranks that were stopped beyond the deadline.
type exclusions struct {
	count, named, evicted int
	first, last           int64 // from the stop to the exclusion
}

func (x *exclusions) add(run *history.Run) {
	for p := range run.Procs {
		d := stopDeed(run, p)
		if d == nil || !d.Fair {
			continue
		}
		at, epoch, why := lostAt(run, run.Procs[p].Slot, d.Time)
		if epoch == 0 {
			continue
		}
		took := at - d.Time
		if x.count == 0 || took < x.first {
			x.first = took
		}
		x.last = max(x.last, took)
		x.count++
		if strings.Contains(why, fmt.Sprintf("rank %d", run.Procs[p].Slot)) {
			x.named++
		}
		if ended(&run.Procs[p]) == history.Evicted {
			x.evicted++
		}
	}
}

func (x *exclusions) report(r *Result, n int) {
	r.atLeast("excluded", float64(n), float64(x.count), "")
	r.atLeast("excluded by name", float64(n), float64(x.named), "")
	r.atLeast("continued: ErrEvicted", float64(n), float64(x.evicted), "")
}

// stopped stops ranks at any time.
func stopped(r *runner, n int) error {
	var x exclusions
	if err := r.within(n, 5, func(int) error { return r.stop() }, x.add); err != nil {
		return err
	}
	x.report(r.res, n)
	r.res.atLeast("from SIGSTOP to the exclusion, the shortest", ms(int64(r.cfg.Deadline)), ms(x.first), "ms")
	r.res.note("from SIGSTOP to the exclusion, the longest: %.0f ms", ms(x.last))
	return nil
}

// stopAt has a rank stop itself at a point, waits until the others have excluded it, calls f and continues it: then it
// must end.
func (r *runner) stopAt(point string, nth int, f func(v int) error) error {
	v := r.victim()
	m, marks := r.w.Live[v], r.marks()
	if err := r.tell(m, "stop %s %d", point, nth); err != nil {
		return err
	}
	for until := time.Now().Add(patience); m.State() != "T"; {
		if time.Now().After(until) || m.Ended() {
			return r.broken("P5", "%s was to stop at %s and did not", m.Name, point)
		}
		if err := r.sleep(time.Millisecond); err != nil {
			return err
		}
	}
	r.res.fault(point, v)
	if err := r.survive(marks, point, v); err != nil {
		return err
	}
	if err := f(v); err != nil {
		return err
	}
	r.w.Cont(m)
	if !r.wait(m, hang) {
		return r.broken("P5", "%s was stopped at %s, excluded and continued, and does not end", m.Name, point)
	}
	return nil
}

// midCopy stops ranks while they copy, and replaces them before they are continued.
func midCopy(r *runner, n int) error {
	points := []string{faultpoint.PublishMid, faultpoint.PullMid, faultpoint.PublishBefore, faultpoint.SealBefore}
	var x exclusions
	err := r.within(n, 5, func(i int) error {
		return r.stopAt(points[i%len(points)], 1+r.rng.IntN(12), func(v int) error {
			if err := r.replace(v); err != nil {
				return err
			}
			return r.step(r.w.Live[v]) // the slots are used
		})
	}, x.add)
	x.report(r.res, n)
	r.res.note("each rank looks at its last %d buffers all the time; one that has changed is a violation of P4", canaryCount)
	return err
}

// reader stops ranks that read what was decided.
func reader(r *runner, n int) error {
	r.edit = func(a *RankArgs) { a.Sync = true }
	points := []string{faultpoint.PullMid, faultpoint.DecideAfter}
	var x exclusions
	success := 0
	err := r.within(n, 5, func(i int) error {
		gone := 0
		err := r.stopAt(points[i%len(points)], 1+r.rng.IntN(12), func(v int) error {
			gone = v
			u := (v + 1) % r.cfg.Ranks
			for range 3 { // at least 30 steps: each slot is used again
				if err := r.step(r.w.Live[u]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		return r.replace(gone)
	}, func(run *history.Run) {
		x.add(run)
		success += successAfter(run)
	})
	x.report(r.res, n)
	r.res.atMost("success of the operation that was stopped", 0, float64(success), "")
	return err
}

// successAfter counts the processes that returned success from the operation in which they had been stopped until they
// were excluded. Their program is Sync: it is the one that was under way.
func successAfter(run *history.Run) (n int) {
	for p := range run.Procs {
		d := stopDeed(run, p)
		if d == nil {
			continue
		}
		for i := range run.Procs[p].Events {
			if e := &run.Procs[p].Events[i]; e.Kind == history.Return && e.Time >= d.Until {
				if e.Outcome == history.OK {
					n++
				}
				break // the first one is of what was under way
			}
		}
	}
	return n
}

// coordinator stops rank 0 and kills another.
func coordinator(r *runner, n int) error {
	type trial struct{ dead, zero *Member }
	var trials []trial
	var took []int64
	excluded := 0
	err := r.within(n, 5, func(int) error {
		v := 1 + r.rng.IntN(r.cfg.Ranks-1)
		marks := r.marks()
		zero, dead := r.w.Live[0], r.w.Live[v]
		r.res.fault("coordinator", v)
		r.w.Stop(zero, false)
		r.w.Kill(dead)
		trials = append(trials, trial{dead, zero})
		err := r.sleep(400 * time.Millisecond)
		r.w.Cont(zero)
		if err != nil {
			return err
		}
		if err := r.survive(marks, "coordinator stopped", v); err != nil {
			return err
		}
		return r.replace(v)
	}, func(run *history.Run) {
		for _, t := range trials {
			at, epoch, _ := lostAt(run, t.dead.Args.Rank, t.dead.killed)
			if epoch != 0 {
				took = append(took, at-t.dead.killed)
			}
			if _, e, _ := lostAt(run, 0, t.dead.killed); e != 0 && e <= epoch {
				excluded++
			}
		}
		trials = nil
	})
	m := millis(took)
	r.res.atLeast("trials", float64(n), float64(len(took)), "")
	r.res.atMost("from the death to the new epoch, the longest", 200, m.Max, "ms")
	r.res.atMost("coordinator excluded", 0, float64(excluded), "")
	r.res.note("from the death to the new epoch: p50 %.1f ms, p99 %.1f ms", m.P50, m.P99)
	return err
}

// late has ranks be late by half of the deadline, with busy loops beside them.
func late(r *runner, n int) error {
	stop, err := r.busy(4)
	if err != nil {
		return err
	}
	defer stop()
	excluded := 0
	err = r.within(n, 100, func(int) error {
		v := r.victim()
		r.res.fault("late", v)
		m := r.w.Live[v]
		deed := r.w.Deed(m, history.Slow, false)
		err := r.tell(m, "late %v", r.cfg.Deadline/2)
		r.w.Until(deed)
		return err
	}, func(run *history.Run) {
		excluded += excludedIn(run)
	})
	r.res.atLeast("times late", float64(n), float64(r.res.Faults), "")
	r.res.atMost("excluded", 0, float64(excluded), "")
	return err
}

// busy starts processes that do nothing but use a processor.
func (r *runner) busy(n int) (stop func(), err error) {
	var ps []*harness.Proc
	stop = func() {
		for _, p := range ps {
			p.Signal(syscall.SIGKILL)
			<-p.Done()
		}
	}
	for range n {
		p, err := r.launchOn(nil, "busy", `{"Busy":true}`)
		if err != nil {
			stop()
			return nil, err
		}
		ps = append(ps, p)
	}
	return stop, nil
}

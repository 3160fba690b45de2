package chaos

import (
	"errors"
	"fmt"

	"github.com/serry-project/serry/internal/history"
)

// reached are times from a deed to what it led to.
type reached struct{ on, out []int64 }

// report holds them against 1.5 s: the majority goes on (on), the others get ErrNoQuorum (out).
func (x *reached) report(r *Result, n int, barOn, barOut bool) {
	on, out := millis(x.on), millis(x.out)
	r.atLeast("trials", float64(n), float64(len(x.on)), "")
	if barOn {
		r.atMost("from the cut to the majority's next operation, the longest", 1500, on.Max, "ms")
	}
	r.note("from the cut to the majority's next operation: p50 %.0f ms, longest %.0f ms", on.P50, on.Max)
	if out.Count > 0 {
		if barOut {
			r.atMost("from the cut to ErrNoQuorum, the longest", 1500, out.Max, "ms")
		}
		r.note("from the cut to ErrNoQuorum: p50 %.0f ms, longest %.0f ms", out.P50, out.Max)
	}
}

// quorumLost is when a process was told so; 0: it was not.
func quorumLost(p *history.Process) int64 {
	for i := range p.Events {
		if e := &p.Events[i]; e.Outcome == history.NoQuorum {
			return e.Time
		}
	}
	return 0
}

// add takes in each cut of a run.
func (x *reached) add(run *history.Run) {
	for i := range run.Deeds {
		d := &run.Deeds[i]
		if d.What == history.Minority {
			if at := quorumLost(&run.Procs[d.Proc]); at != 0 {
				x.out = append(x.out, at-d.Time)
			}
		}
		if d.What == history.Cut && d.Fair {
			if t := resumedAfter(run, d.Proc, d.Time); t > 0 {
				x.on = append(x.on, t)
			}
		}
	}
}

// cutOne cuts one of three hosts off, each in turn, and heals the cut.
func cutOne(r *runner, n int) error {
	var x reached
	err := r.within(n, 3, func(int) error { return r.cutHost() }, x.add)
	x.report(r.res, n, true, false)
	r.res.note("after the cut a replacement of the rank that was cut off has joined, each time")
	return err
}

// halves cuts two hosts of two ranks from each other, or kills the one with the lowest rank.
func halves(r *runner, n int) error {
	var x reached
	lost := 0
	err := r.within(n, 1, func(i int) error {
		marks := r.marks()
		high := []int{2, 3}
		r.w.Args.Life = 0
		if i%2 == 0 {
			r.res.fault("cut in half", high...)
			for _, v := range high {
				r.w.Deed(r.w.Live[v], history.Cut, true)
				r.w.Deed(r.w.Live[v], history.Minority, false)
			}
			defer func() { _ = r.net.Hosts[1].Cut(false) }() // the next world is founded on these hosts
			if err := r.net.Hosts[1].Cut(true); err != nil {
				return err
			}
			if err := r.survive(marks, "cut in half", high...); err != nil {
				return err
			}
		} else {
			r.res.fault("lower half lost", 0, 1)
			for _, v := range high {
				r.w.Deed(r.w.Live[v], history.Minority, false)
			}
			r.w.Kill(r.w.Live[0])
			r.w.Kill(r.w.Live[1])
			lost++
		}
		for _, v := range high {
			if m := r.w.Live[v]; !r.wait(m, hang) {
				return r.broken("P5", "%s cannot have a quorum and does not end", m.Name)
			}
		}
		if i%2 == 0 {
			if err := r.net.Hosts[1].Cut(false); err != nil {
				return err
			}
			return r.replace(high...)
		}
		return nil
	}, x.add)
	x.report(r.res, n-lost, false, true)
	r.res.note("the half without the lowest rank stops with ErrNoQuorum, also where the other half is lost for good; that it goes on with a Witness is not tried here")
	return err
}

// pairCut cuts two of three hosts from each other, in both directions or one: the view must drop the higher rank of the two.
func pairCut(r *runner, n int) error {
	evicted, right := 0, 0
	var x reached
	err := r.within(n, 1, func(i int) error {
		a, b := 0, 1+i/2%2
		hosts := r.net.Hosts
		marks := r.marks()
		m := r.w.Live[b]
		name := fmt.Sprintf("cut between %d and %d", a, b)
		if i%2 == 1 {
			name = fmt.Sprintf("cut from %d to %d", a, b)
		}
		r.res.fault(name, b)
		deed := r.w.Deed(m, history.Cut, true)
		heal := func() error {
			return errors.Join(hosts[a].CutTo(hosts[b], false), hosts[b].CutTo(hosts[a], false))
		}
		defer func() { _ = heal() }() // the next world is founded on these hosts
		if err := hosts[a].CutTo(hosts[b], true); err != nil {
			return err
		}
		if i%2 == 0 {
			if err := hosts[b].CutTo(hosts[a], true); err != nil {
				return err
			}
		}
		if err := r.survive(marks, name, b); err != nil {
			return err
		}
		right++
		if !r.wait(m, hang) {
			return r.broken("P5", "%s was dropped and does not end", m.Name)
		}
		if err := heal(); err != nil {
			return err
		}
		r.w.Until(deed)
		return r.replace(b)
	}, func(run *history.Run) {
		x.add(run)
		for p := range run.Procs {
			if ended(&run.Procs[p]) == history.Evicted {
				evicted++
			}
		}
	})
	x.report(r.res, n, false, false)
	r.res.atLeast("the higher rank was dropped", float64(n), float64(right), "")
	r.res.atLeast("it got ErrEvicted", float64(n), float64(evicted), "")
	return err
}

// resets closes connections while operations run.
func resets(r *runner, n int) error {
	excluded := 0
	after := func(run *history.Run) { excluded += excludedIn(run) }
	for r.res.Faults < n {
		if err := r.within(min(25, n-r.res.Faults), 25, func(int) error { return r.hurt("reset") }, after); err != nil {
			return err
		}
	}
	r.res.atLeast("connections reset", float64(n), float64(r.res.Faults), "")
	r.res.atMost("excluded", 0, float64(excluded), "")
	return nil
}

package history

// checkProcess goes through one history.
func (c *Checker) checkProcess(p int) {
	x, l := &c.run.Procs[p], &c.lives[p]
	alive := x.Killed == 0 && !x.Doomed && l.ended == 0
	if l.from == 0 {
		if alive && c.run.Live {
			c.violate("P8", nil, "rank %d: a process was started and never let in", x.Slot)
		}
	}
	epoch, boundary := l.from, uint64(0)
	busy := int64(0) // when the program last called something, or came back
	success := int64(0)
	c.open = c.open[:0]
	for i := range x.Events {
		e, ref := &x.Events[i], Ref{p, i}
		switch e.Kind {
		case Joined:
			boundary = uint64(e.N)
		case View:
			epoch = e.Epoch
		case Issue:
			c.open = append(c.open, opened{e.Group, e.Call, boundary, e.Time, ref})
			busy = e.Time
		case Return:
			o := c.took(ref)
			if o == nil {
				c.violate("P5", []Ref{ref}, "%s: %v %s returns twice, or was not called", c.who(p), e.Op, place(e))
				continue
			}
			c.checkTime(ref, o, max(busy, o.at))
			busy = e.Time
			v := e.Epoch
			if v == 0 {
				v = epoch
			}
			c.rets = append(c.rets, ret{e.Group, e.Call, v, ref})
			switch e.Outcome {
			case OK:
				c.checkSuccess(ref, o)
				if e.Group == c.run.World && e.Op.ordered() {
					success = o.at
				}
				if e.Op == Boundary {
					boundary = uint64(e.N)
				}
			case Other:
				c.violate("P5", []Ref{ref}, "%s: %v %s ends with what is no promised outcome: %s", c.who(p), e.Op, place(e), e.Why)
			case NoQuorum:
				c.checkMinority(ref)
			}
		case Ended:
			switch e.Outcome {
			case NoQuorum:
				c.checkMinority(ref)
			case Other, AllGone:
				c.violate("P10", []Ref{ref}, "%s ends: %v: %s", c.who(p), e.Outcome, e.Why)
			}
		}
	}
	if alive || l.left {
		for _, o := range c.open {
			e := c.event(o.ref)
			c.violate("P5", []Ref{o.ref}, "%s: %v %s never returns", c.who(p), e.Op, place(e))
		}
	}
	if alive && c.run.Live && l.from != 0 && l.to == 0 && !l.minority && success <= c.lastDeed() {
		c.violate("P10", nil, "%s has completed nothing of the world since the last fault", c.who(p))
	}
}

// lastDeed is when the last fault was done. A leave is none: others may be done by then.
func (c *Checker) lastDeed() (at int64) {
	for i := range c.run.Deeds {
		if d := &c.run.Deeds[i]; d.What != Leave {
			at = max(at, d.Time)
		}
	}
	return at
}

// took finds the call that returns, and takes it from those under way. The result is valid until the next call.
func (c *Checker) took(ref Ref) *opened {
	e := c.event(ref)
	for i := range c.open {
		if o := &c.open[i]; o.group == e.Group && o.call == e.Call && c.event(o.ref).Op == e.Op {
			last := len(c.open) - 1
			c.open[i], c.open[last] = c.open[last], c.open[i]
			o = &c.open[last]
			c.open = c.open[:last]
			return o
		}
	}
	return nil
}

// checkTime: a call ends within (f+1) x Detect + Deadline, where the program has waited in it since from (P5).
func (c *Checker) checkTime(ref Ref, o *opened, from int64) {
	r, e := c.run, c.event(ref)
	if r.Detect == 0 || e.Time-from <= r.Detect+r.Deadline {
		return
	}
	bound := r.Detect + r.Deadline
	for i := range r.Deeds {
		d := &r.Deeds[i]
		until := d.Until
		if until == 0 {
			until = d.Time
		}
		if d.Time > e.Time || until < from-r.Detect {
			continue
		}
		bound += r.Detect
		if d.What == Kill || d.What == Leave {
			continue
		}
		bound += r.Deadline
		if d.Proc == ref.Proc { // it could not return
			bound += max(0, min(until, e.Time)-max(d.Time, from))
		}
	}
	if took := e.Time - from; took > bound {
		c.violate("P5", []Ref{o.ref, ref}, "%s: %v %s takes %d ms, at most %d were promised", c.who(ref.Proc), e.Op, place(e), took/1e6, bound/1e6)
	}
}

// others says that a group has members in the view of an epoch: else nobody goes on in it.
func (c *Checker) others(group, epoch uint64) bool {
	v, m := c.find(epoch), c.made[group]
	return v == nil || v.set.And(m) != (Set{})
}

// checkSuccess is what must hold of a result whoever returned it.
func (c *Checker) checkSuccess(ref Ref, o *opened) {
	e, p := c.event(ref), ref.Proc
	x, l := &c.run.Procs[p], &c.lives[p]
	if l.to != 0 && !l.left && o.at > l.lostAt && !e.Op.Local() && e.Op != Boundary && !c.run.Frames && c.others(e.Group, l.to) {
		c.violate("P4", []Ref{o.ref, ref}, "%s: %v %s succeeds, called after the rank was excluded (epoch %d)", c.who(p), e.Op, place(e), l.to)
	}
	if c.run.Want != nil {
		if want, ok := c.run.Want(x.Slot, e); ok && want != e.Sum {
			c.violate("P2", []Ref{ref}, "%s: %v %s of ranks %s gives %x, the contributors give %x", c.who(p), e.Op, place(e), text(e.Set), e.Sum, want)
		}
	}
	if !e.Op.ordered() {
		return
	}
	if !e.Set.Has(x.Slot) {
		c.violate("P1", []Ref{ref}, "%s: %v %s succeeds with ranks %s, without this one", c.who(p), e.Op, place(e), text(e.Set))
	}
	if v := c.find(e.Epoch); v != nil && !v.set.Empty() {
		want := v.set
		if m, ok := c.made[e.Group]; ok {
			want = want.And(m)
		}
		if want != e.Set {
			c.violate("P1", []Ref{ref, v.ref}, "%s: %v %s of epoch %d has ranks %s, the view has %s", c.who(p), e.Op, place(e), e.Epoch, text(e.Set), text(want))
		}
	}
	for _, q := range c.joins {
		n := c.run.Procs[q]
		if q != p && uint64(c.boundary(q)) > o.boundary && e.Epoch >= c.lives[q].from && e.Set.Has(n.Slot) {
			c.violate("P3", []Ref{o.ref, ref}, "%s: %v %s was called before Boundary %d and is of epoch %d, in which rank %d came in there",
				c.who(p), e.Op, place(e), c.boundary(q), e.Epoch, n.Slot)
		}
	}
}

// boundary is where a process came in.
func (c *Checker) boundary(p int) uint32 {
	for i := range c.run.Procs[p].Events {
		if e := &c.run.Procs[p].Events[i]; e.Kind == Joined {
			return e.N
		}
	}
	return 0
}

// checkMinority: who was excluded is told so (P4), and who has a quorum goes on (P10).
func (c *Checker) checkMinority(ref Ref) {
	l := &c.lives[ref.Proc]
	switch {
	case l.minority:
	case l.to != 0:
		c.violate("P4", []Ref{ref}, "%s was excluded in epoch %d, was not cut off, and is told of no quorum instead: %s", c.who(ref.Proc), l.to, c.event(ref).Why)
	default:
		c.violate("P10", []Ref{ref}, "%s ends without a quorum, and it was not cut off: %s", c.who(ref.Proc), c.event(ref).Why)
	}
}

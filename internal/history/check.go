package history

import (
	"cmp"
	"fmt"
	"slices"
)

// Checker checks histories. It keeps its memory from one to the next; its zero value is ready. It is for one goroutine.
type Checker struct {
	run   *Run
	bad   []Violation
	views []view
	lives []life
	joins []int // procs that came in at a Boundary
	made  map[uint64]Set
	rets  []ret
	open  []opened

	// The last answer of next.
	nextGroup, nextEpoch, nextIs uint64
}

// view is one that somebody has installed.
type view struct {
	epoch uint64
	set   Set
	lost  Set
	size  uint32
	at    int64 // when the first did
	ref   Ref
}

// life is what the views say of a process.
type life struct {
	from, to uint64 // epochs: it is in views from <= e < to; to 0: it was never lost; from 0: it was never let in
	lostAt   int64
	ended    Outcome // by itself; 0: not
	endedAt  int64
	left     bool // in order
	minority bool
	fair     int64 // the first deed that it may be excluded for; 0: none

	first, last, said uint64 // calls, while one group is looked at
}

// ret is the end of an operation.
type ret struct {
	group, call uint64
	epoch       uint64 // that it is of
	ref         Ref
}

// opened is an operation under way in the process that is looked at.
type opened struct {
	group, call, boundary uint64
	at                    int64
	ref                   Ref
}

// Check returns what was not kept, in the order of the promises. The slice is the Checker's, until its next Check.
func (c *Checker) Check(r *Run) []Violation {
	c.run, c.bad, c.views, c.joins, c.rets = r, c.bad[:0], c.views[:0], c.joins[:0], c.rets[:0]
	c.nextGroup, c.nextEpoch, c.nextIs = 0, 0, 0
	if c.made == nil {
		c.made = map[uint64]Set{}
	}
	clear(c.made)
	c.collectViews()
	c.collectLives()
	c.checkViews()
	c.checkJoins()
	for p := range r.Procs {
		c.checkProcess(p)
	}
	c.checkOutcomes()
	c.checkOrders()
	c.checkMessages()
	slices.SortStableFunc(c.bad, func(a, b Violation) int {
		return cmp.Or(cmp.Compare(len(a.Property), len(b.Property)), cmp.Compare(a.Property, b.Property))
	})
	return c.bad
}

// Check is that of a new Checker.
func Check(r *Run) []Violation { return new(Checker).Check(r) }

func (c *Checker) violate(property string, refs []Ref, format string, a ...any) {
	c.bad = append(c.bad, Violation{property, fmt.Sprintf(format, a...), slices.Clone(refs)})
}

func (c *Checker) event(r Ref) *Event { return &c.run.Procs[r.Proc].Events[r.Index] }

// who names a process.
func (c *Checker) who(p int) string {
	x := &c.run.Procs[p]
	return fmt.Sprintf("rank %d (incarnation %d)", x.Slot, x.Inc)
}

func text(s Set) string { return fmt.Sprint(s.Slots()) }

// find is the view of an epoch, nil if nobody has told it.
func (c *Checker) find(epoch uint64) *view {
	i, ok := slices.BinarySearchFunc(c.views, epoch, func(v view, e uint64) int { return cmp.Compare(v.epoch, e) })
	if !ok {
		return nil
	}
	return &c.views[i]
}

// collectViews merges what all say of the views. That they say the same is P3.
func (c *Checker) collectViews() {
	for p := range c.run.Procs {
		events := c.run.Procs[p].Events
		last := uint64(0)
		for i := range events {
			e := &events[i]
			ref := Ref{p, i}
			switch e.Kind {
			case View:
				if e.Epoch <= last {
					c.violate("P3", []Ref{ref}, "%s installs the view of epoch %d after that of %d", c.who(p), e.Epoch, last)
				}
				last = e.Epoch
				c.views = append(c.views, view{epoch: e.Epoch, set: e.Set, size: e.Size, at: e.Time, ref: ref})
			case Lost:
				c.views = append(c.views, view{epoch: e.Epoch, lost: e.Set, at: e.Time, ref: ref})
			case Made:
				s, ok := c.made[e.Group]
				if !ok {
					c.made[e.Group] = e.Set
				} else if s != e.Set {
					c.violate("P9", []Ref{ref}, "%s has group %x with slots %s, others with %s", c.who(p), e.Group, text(e.Set), text(s))
				}
			}
		}
	}
	slices.SortFunc(c.views, func(a, b view) int {
		return cmp.Or(cmp.Compare(a.epoch, b.epoch), cmp.Compare(bit(a.set.Empty()), bit(b.set.Empty())), cmp.Compare(a.at, b.at))
	})
	n := 0
	for i := range c.views {
		v := &c.views[i]
		if n == 0 || c.views[n-1].epoch != v.epoch {
			c.views[n] = *v
			n++
			continue
		}
		w := &c.views[n-1]
		switch {
		case !v.set.Empty() && v.set != w.set:
			c.violate("P3", []Ref{w.ref, v.ref}, "epoch %d has two sets: %s at %s, %s at %s", v.epoch, text(w.set), c.who(w.ref.Proc), text(v.set), c.who(v.ref.Proc))
		case !v.lost.Empty() && !w.lost.Empty() && v.lost != w.lost:
			c.violate("P3", []Ref{w.ref, v.ref}, "who was lost in epoch %d differs: %s, and %s at %s", v.epoch, text(w.lost), text(v.lost), c.who(v.ref.Proc))
		}
		w.lost = w.lost.Or(v.lost)
		w.size = max(w.size, v.size)
		w.at = min(w.at, v.at)
	}
	c.views = c.views[:n]
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// collectLives finds out from when to when each process was a member.
func (c *Checker) collectLives() {
	r := c.run
	c.lives = append(c.lives[:0], make([]life, len(r.Procs))...)
	for p := range r.Procs {
		l, x := &c.lives[p], &r.Procs[p]
		for i := range x.Events {
			switch e := &x.Events[i]; e.Kind {
			case Joined:
				l.from = e.Epoch
				if e.N > 0 {
					c.joins = append(c.joins, p)
				}
			case Ended:
				l.ended, l.left, l.endedAt = e.Outcome, e.Outcome == Left, e.Time
			}
		}
		if l.from == 0 {
			continue
		}
		for i := range c.views {
			if v := &c.views[i]; v.epoch > l.from && v.lost.Has(x.Slot) {
				l.to, l.lostAt = v.epoch, v.at
				break
			}
		}
	}
	for i := range r.Deeds {
		d := &r.Deeds[i]
		l := &c.lives[d.Proc]
		l.minority = l.minority || d.What == Minority
		if d.Fair && (l.fair == 0 || d.Time < l.fair) {
			l.fair = max(d.Time, 1)
		}
	}
}

// occupant is the process that holds a slot in the view of an epoch, -1 if that is not known.
func (c *Checker) occupant(slot int, epoch uint64) int {
	for p := range c.lives {
		l := &c.lives[p]
		if c.run.Procs[p].Slot == slot && l.from != 0 && l.from <= epoch && (l.to == 0 || epoch < l.to) {
			return p
		}
	}
	return -1
}

// checkViews looks at each change: who was lost had it coming (P6), those who decided were enough (P7), and the size only
// grows, with newcomers (P9).
func (c *Checker) checkViews() {
	for i := range c.views {
		v := &c.views[i]
		if v.set.Empty() {
			continue // somebody died between two events
		}
		if both := v.set.And(v.lost); both != (Set{}) {
			c.violate("P3", []Ref{v.ref}, "the view of epoch %d has %s, which were lost in it", v.epoch, text(both))
		}
		for s := v.lost.Next(0); s >= 0; s = v.lost.Next(s + 1) {
			c.checkBlame(v, s)
		}
		if i == 0 || c.views[i-1].epoch != v.epoch-1 || c.views[i-1].set.Empty() {
			continue
		}
		prev := &c.views[i-1]
		if v.size != 0 && prev.size != 0 && (v.size < prev.size || v.size > prev.size && v.set.Minus(prev.set) == (Set{})) {
			c.violate("P9", []Ref{prev.ref, v.ref}, "the size is %d in epoch %d and %d in epoch %d", prev.size, prev.epoch, v.size, v.epoch)
		}
		if gone := prev.set.Minus(v.set); gone != v.lost.And(prev.set) && v.lost != (Set{}) {
			c.violate("P3", []Ref{prev.ref, v.ref}, "from epoch %d to %d %s are gone, and %s were told as lost", prev.epoch, v.epoch, text(gone), text(v.lost))
		}
		c.checkQuorum(prev, v)
	}
}

// checkBlame: what may a slot have been lost for? Each process is lost once.
func (c *Checker) checkBlame(v *view, slot int) {
	losses, fair := 0, 0
	for i := range c.views {
		if w := &c.views[i]; w.epoch <= v.epoch && w.lost.Has(slot) {
			losses++
		}
	}
	for p := range c.lives {
		l := &c.lives[p]
		if c.run.Procs[p].Slot == slot && (l.fair != 0 && l.fair <= v.at || l.left) {
			fair++
		}
	}
	if fair < losses {
		c.violate("P6", []Ref{v.ref}, "rank %d is lost in epoch %d, and nothing was done to it that it may be excluded for", slot, v.epoch)
	}
}

// checkQuorum: more than half of the last view must be behind the next one. Those count that are in it, those that left
// or ended by themselves (they say so), the dead of whose host somebody is in it, and the living that were lost and can have agreed to it.
func (c *Checker) checkQuorum(prev, v *view) {
	gone := prev.set.Minus(v.set)
	if gone.Empty() {
		return
	}
	behind := prev.set.And(v.set)
	for s := gone.Next(0); s >= 0; s = gone.Next(s + 1) {
		p := c.occupant(s, prev.epoch)
		if p < 0 {
			return // not told
		}
		x := &c.run.Procs[p]
		if l := &c.lives[p]; l.left || l.ended != 0 && l.endedAt <= v.at || x.Killed != 0 && x.Killed <= v.at && c.hasMate(x.Host, prev, v) || c.spoke(p, max(prev.at, c.lives[p].fair), v.at) {
			behind.Add(s)
		}
	}
	n, all := 2*behind.Len(), prev.set.Len()
	if n > all || n == all && (c.run.Witness || behind.Has(prev.set.Next(0))) {
		return
	}
	c.violate("P7", []Ref{prev.ref, v.ref}, "the view of epoch %d is %s after %s: only %s can have agreed", v.epoch, text(v.set), text(prev.set), text(behind))
}

// spoke says that a process can have been heard between two times: it lived, and was not stopped or cut off all the while.
// Who votes for its own exclusion does so after the deed that it is excluded for.
func (c *Checker) spoke(p int, from, to int64) bool {
	if x := &c.run.Procs[p]; x.Killed != 0 {
		to = min(to, x.Killed-1)
	}
	for again := true; again && from <= to; {
		again = false
		for i := range c.run.Deeds {
			d := &c.run.Deeds[i]
			if d.Proc != p || d.What != Stop && d.What != Cut || d.Time > from || d.Until != 0 && d.Until <= from {
				continue
			}
			if d.Until == 0 {
				return false
			}
			from, again = d.Until, true
		}
	}
	return from <= to
}

// hasMate says that somebody of a host can have voted for its dead: one that is in the view, or was and can have agreed.
func (c *Checker) hasMate(host int, prev, v *view) bool {
	for s := prev.set.Next(0); s >= 0; s = prev.set.Next(s + 1) {
		if p := c.occupant(s, prev.epoch); p >= 0 && c.run.Procs[p].Host == host && c.run.Procs[p].Killed == 0 && c.spoke(p, max(prev.at, c.lives[p].fair), v.at) {
			return true
		}
	}
	for s := v.set.Next(0); s >= 0; s = v.set.Next(s + 1) {
		if p := c.occupant(s, v.epoch); p >= 0 && c.run.Procs[p].Host == host {
			return true
		}
	}
	return false
}

// checkJoins: an identity is one process's, and rises (P8).
func (c *Checker) checkJoins() {
	for p := range c.lives {
		if c.lives[p].from == 0 {
			continue
		}
		x := &c.run.Procs[p]
		for q := range c.lives {
			y := &c.run.Procs[q]
			if q == p || y.Slot != x.Slot || c.lives[q].from == 0 {
				continue
			}
			if q > p && y.Inc == x.Inc {
				c.violate("P8", nil, "two processes are incarnation %d of rank %d", x.Inc, x.Slot)
			}
			if c.lives[q].from > c.lives[p].from && y.Inc < x.Inc {
				c.violate("P8", nil, "rank %d is incarnation %d in epoch %d and %d in epoch %d", x.Slot, x.Inc, c.lives[p].from, y.Inc, c.lives[q].from)
			}
		}
	}
}

// next is the epoch of the group's version after that of an epoch, 0 if there is none.
func (c *Checker) next(group, epoch uint64) uint64 {
	if group == c.nextGroup && epoch == c.nextEpoch {
		return c.nextIs
	}
	members, known := c.made[group]
	c.nextGroup, c.nextEpoch, c.nextIs = group, epoch, 0
	var last *Set
	if v := c.find(epoch); v != nil && !v.set.Empty() {
		last = &v.set
	}
	at, _ := slices.BinarySearchFunc(c.views, epoch+1, func(v view, e uint64) int { return cmp.Compare(v.epoch, e) })
	for i := at; i < len(c.views); i++ {
		v := &c.views[i]
		change := v.lost
		if last != nil && !v.set.Empty() {
			change = change.Or(last.Minus(v.set)).Or(v.set.Minus(*last))
		}
		if known {
			change = change.And(members)
		}
		if !change.Empty() {
			c.nextIs = v.epoch
			break
		}
		if !v.set.Empty() {
			last = &v.set
		}
	}
	return c.nextIs
}

// in says that a process is a member in an epoch.
func (c *Checker) in(p int, epoch uint64) bool {
	l := &c.lives[p]
	return l.from <= epoch && (l.to == 0 || epoch < l.to || l.left && epoch == l.to)
}

// counts says whether what a process returned in a version of a group binds the others.
func (c *Checker) counts(p int, group, epoch uint64) bool {
	l, x := &c.lives[p], &c.run.Procs[p]
	n := c.next(group, epoch)
	if n == 0 {
		return l.to == 0 && x.Killed == 0 && !x.Doomed && (l.ended == 0 || l.left)
	}
	return l.from <= n && (l.to == 0 || n < l.to || n == l.to && l.left)
}

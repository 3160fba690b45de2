package history

import (
	"cmp"
	"fmt"
	"slices"
)

func place(e *Event) string {
	return fmt.Sprintf("(group %x, call %x, sequence %d)", e.Group, e.Call, e.Seq)
}

// checkOutcomes compares what the members of the next view returned from each operation (P1, P2).
func (c *Checker) checkOutcomes() {
	slices.SortFunc(c.rets, func(a, b ret) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.call, b.call), cmp.Compare(a.ref.Proc, b.ref.Proc))
	})
	for i := 0; i < len(c.rets); {
		j := i + 1
		for j < len(c.rets) && c.rets[j].group == c.rets[i].group && c.rets[j].call == c.rets[i].call {
			j++
		}
		c.checkOutcome(c.rets[i:j])
		i = j
	}
	c.checkSilence()
}

func (c *Checker) checkOutcome(rs []ret) {
	// The last version that one of them is of. A cut falls if those who returned below it are lost: then they count no more.
	last := uint64(0)
	for i := range rs {
		if !c.event(rs[i].ref).Outcome.over() && c.counts(rs[i].ref.Proc, rs[i].group, rs[i].epoch) {
			last = max(last, rs[i].epoch)
		}
	}
	first := -1
	for i := range rs {
		e := c.event(rs[i].ref)
		if e.Op.Local() || e.Outcome.over() || !c.counts(rs[i].ref.Proc, rs[i].group, rs[i].epoch) || rs[i].epoch < last && !c.in(rs[i].ref.Proc, last) {
			continue
		}
		if first < 0 {
			first = i
			continue
		}
		f := c.event(rs[first].ref)
		if what, property := differ(f, e); what != "" {
			c.violate(property, []Ref{rs[first].ref, rs[i].ref}, "%s and %s return from %v %s with different %s: %s; %s",
				c.who(rs[first].ref.Proc), c.who(rs[i].ref.Proc), e.Op, place(e), what, describe(f), describe(e))
		}
	}
}

// differ says in what two outcomes of one operation differ that must not.
func differ(a, b *Event) (what, property string) {
	switch {
	case a.Op != b.Op:
		return "operations", "P1"
	case a.Outcome != b.Outcome:
		return "outcomes", "P1"
	case a.Outcome == RankLost && (a.Epoch != b.Epoch || a.Set != b.Set):
		return "losses", "P1"
	case a.Outcome != OK && a.Why != b.Why:
		return "reasons", "P1"
	case a.Outcome != OK:
		return "", ""
	case a.Op == Boundary && (a.N != b.N || a.Set != b.Set):
		return "newcomers", "P3"
	case !a.Op.ordered():
		return "", ""
	case a.Set != b.Set:
		return "sets", "P1"
	case a.Epoch != b.Epoch:
		return "epochs", "P1"
	case a.Seq != b.Seq:
		return "sequences", "P1"
	case a.Op.Alike() && a.Sum != b.Sum:
		return "bits", "P2"
	}
	return "", ""
}

func describe(e *Event) string {
	if e.Outcome == OK {
		return fmt.Sprintf("ok, sequence %d, epoch %d, ranks %s, sum %x", e.Seq, e.Epoch, text(e.Set), e.Sum)
	}
	return fmt.Sprintf("%v, epoch %d, ranks %s %s", e.Outcome, e.Epoch, text(e.Set), e.Why)
}

// checkSilence: who takes part in a group before and after an operation takes part in it (P1). It is asked only of who
// lives at the end: others may have been interrupted.
func (c *Checker) checkSilence() {
	for i := 0; i < len(c.rets); {
		group, j := c.rets[i].group, i
		for j < len(c.rets) && c.rets[j].group == group {
			j++
		}
		c.silent(c.rets[i:j])
		i = j
	}
}

func (c *Checker) silent(rs []ret) {
	for p := range c.lives {
		l := &c.lives[p]
		l.first, l.last, l.said = ^uint64(0), 0, ^uint64(0)
	}
	for i := range rs {
		if l := &c.lives[rs[i].ref.Proc]; !c.event(rs[i].ref).Op.Local() {
			l.first, l.last = min(l.first, rs[i].call), max(l.last, rs[i].call)
		}
	}
	for i, j := 0, 0; i < len(rs); i = j {
		said := -1 // one whose return counts
		for j = i; j < len(rs) && rs[j].call == rs[i].call; j++ {
			r := &rs[j]
			c.lives[r.ref.Proc].said = r.call
			if e := c.event(r.ref); !e.Op.Local() && e.Op != Close && !e.Outcome.over() && c.counts(r.ref.Proc, r.group, r.epoch) {
				said = j
			}
		}
		if said < 0 {
			continue
		}
		for p := range c.lives {
			l, x, call := &c.lives[p], &c.run.Procs[p], rs[i].call
			if x.Killed != 0 || x.Doomed || l.ended != 0 && !l.left || call <= l.first || call >= l.last || l.said == call {
				continue
			}
			e := c.event(rs[said].ref)
			c.violate("P1", []Ref{rs[said].ref}, "%s returns from %v %s, and %s, which goes on in the group, does not", c.who(rs[said].ref.Proc), e.Op, place(e), c.who(p))
		}
	}
}

// checkOrders: in the order of the program, the operations of a group that a process returned from have rising sequences
// and epochs that never fall, and what it was told of as lost is what the group's next version is without (P3, P6).
func (c *Checker) checkOrders() {
	slices.SortFunc(c.rets, func(a, b ret) int {
		return cmp.Or(cmp.Compare(a.ref.Proc, b.ref.Proc), cmp.Compare(a.group, b.group), cmp.Compare(a.call, b.call))
	})
	var last *ret
	seq := uint64(0)
	for i := range c.rets {
		r := &c.rets[i]
		e := c.event(r.ref)
		if !e.Op.ordered() || e.Outcome != OK && e.Outcome != RankLost {
			continue
		}
		if last != nil && (last.ref.Proc != r.ref.Proc || last.group != r.group) {
			last, seq = nil, 0
		}
		// A cut that falls fails an operation with a later loss than those after it.
		if last != nil && e.Epoch < c.event(last.ref).Epoch && (e.Outcome == OK || c.event(last.ref).Outcome == OK) {
			c.violate("P3", []Ref{last.ref, r.ref}, "%s: group %x falls back from epoch %d to %d", c.who(r.ref.Proc), r.group, c.event(last.ref).Epoch, e.Epoch)
		}
		if e.Outcome == RankLost {
			c.checkNames(r)
		} else {
			if e.Seq != 0 && e.Seq <= seq {
				c.violate("P3", []Ref{last.ref, r.ref}, "%s: group %x has sequence %d after %d", c.who(r.ref.Proc), r.group, e.Seq, seq)
			}
			seq = e.Seq
		}
		last = r
	}
}

// checkNames: a loss names ranks that were lost, by its epoch (P6).
func (c *Checker) checkNames(r *ret) {
	e := c.event(r.ref)
	if c.find(e.Epoch) == nil {
		return
	}
	named := e.Set
	for i := range c.views {
		if v := &c.views[i]; v.epoch <= e.Epoch {
			named = named.Minus(v.lost)
		}
	}
	if !named.Empty() || e.Set.Empty() {
		c.violate("P6", []Ref{r.ref}, "%s: %v %s names %s as lost in epoch %d, which were not", c.who(r.ref.Proc), e.Op, place(e), text(e.Set), e.Epoch)
	}
}

// checkMessages: a message between two ranks that live is not lost in a group that goes on (P6), and nothing is sent to a
// rank that the group has completed something without (P4).
func (c *Checker) checkMessages() {
	for i := range c.rets {
		r := &c.rets[i]
		e := c.event(r.ref)
		if !e.Op.Local() {
			continue
		}
		if e.Outcome == RankLost && c.run.Continue != nil && c.run.Continue(e.Group) && c.neverLost(int(e.Peer)) {
			c.violate("P6", []Ref{r.ref}, "%s: %v with rank %d %s is lost, and that rank never was", c.who(r.ref.Proc), e.Op, e.Peer, place(e))
		}
	}
}

func (c *Checker) neverLost(slot int) bool {
	for i := range c.views {
		if c.views[i].lost.Has(slot) {
			return false
		}
	}
	return true
}

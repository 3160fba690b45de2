package proof

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"
)

// survivor is what a rank that lived to the end has seen.
type survivor struct {
	slot    int
	records []record
	over    string
}

func parse(slot int, p *harness.Proc) (s survivor, err error) {
	s.slot = slot
	for _, line := range p.Lines() {
		if rest, ok := strings.CutPrefix(line, "record "); ok {
			var r record
			if err := json.Unmarshal([]byte(rest), &r); err != nil {
				return s, err
			}
			s.records = append(s.records, r)
		} else if rest, ok := strings.CutPrefix(line, "over "); ok {
			s.over = rest
		}
	}
	return s, nil
}

type place struct{ step, at int }

// check compares what the survivors have seen with each other, and with what the contributors give. It returns the
// problems, and the outcomes of all operations.
func check(args rankArgs, ss []survivor) (bad []string, count map[string]int) {
	seen := map[place]map[int]record{}
	ops := map[place]*op{}
	count = map[string]int{}
	complain := func(f string, a ...any) { bad = append(bad, fmt.Sprintf(f, a...)) }
	sets := map[string]record{}
	for _, s := range ss {
		for _, r := range s.records {
			k := place{r.Step, r.At}
			if seen[k] == nil {
				seen[k] = map[int]record{}
			}
			seen[k][s.slot] = r
			count[r.Result]++
			if r.local() {
				count[r.Kind+" "+r.Result]++
			}
			if r.Result == "over" {
				complain("rank %d: step %d.%d %s: %s", s.slot, r.Step, r.At, r.Kind, r.Why)
			}
		}
		bad = append(bad, checkOrder(s, sets)...)
	}
	for _, s := range ss {
		for _, r := range s.records {
			k := place{r.Step, r.At}
			if ops[k] == nil {
				for _, m := range planStep(args.Seed, r.Step) {
					ops[place{m.op.Step, m.op.At}] = m.op
				}
			}
		}
	}
	for _, s := range ss {
		bad = append(bad, checkGone(s, ops)...)
	}
	for k, rs := range seen {
		if o := ops[k]; o != nil && o.Kind == "p2p" {
			bad = append(bad, checkP2P(args, o, rs, ss)...)
			continue
		}
		var first *record
		var from int
		for _, s := range ss {
			r, ok := rs[s.slot]
			if !ok {
				continue
			}
			o := ops[k]
			if first == nil {
				first, from = &r, s.slot
			} else if !alike(first, &r, o) {
				complain("step %d.%d: rank %d has %+v, rank %d has %+v", k.step, k.at, from, *first, s.slot, r)
			}
			if o == nil || r.Result != "ok" || o.Kind == "sub" || o.Kind == "close" {
				continue
			}
			members := groupOf[o.Group]
			var active []int
			for _, slot := range r.Active {
				i := slices.Index(members, slot)
				if i < 0 {
					complain("rank %d: %v: slot %d is active and no member", s.slot, o, slot)
					continue
				}
				active = append(active, i)
			}
			if want := sum(o.want(slices.Index(members, s.slot), len(members), active)); r.Sum != want && o.Kind != "barrier" {
				complain("rank %d: %v: result %x, the contributors %v give %x", s.slot, o, r.Sum, r.Active, want)
			}
		}
		// Nobody may be silent about an operation that another member of its group reports.
		for _, s := range ss {
			if _, ok := rs[s.slot]; ok || first == nil || s.over != "" || len(s.records) == 0 || k.step < s.records[0].Step {
				continue
			}
			if o := ops[k]; o != nil && slices.Contains(groupOf[o.Group], s.slot) && o.Kind != "close" {
				complain("%v: rank %d has %+v, rank %d nothing", o, from, *first, s.slot)
			}
		}
	}
	slices.Sort(bad)
	return bad, count
}

// local says that the record is of a send or a receive.
func (r *record) local() bool { return r.Kind == "send" || r.Kind == "recv" }

// ordered says that the record is of an operation with a place in its group's order.
func (r *record) ordered() bool { return !r.local() && r.Kind != "sub" && r.Kind != "close" }

// group is which group it was: D is another one each time.
func (r *record) group() string {
	if r.Group == "D" {
		return fmt.Sprintf("D of step %d", r.Step)
	}
	return r.Group
}

// checkOrder checks that the operations of a group that a rank returned from, in the order of the program (it may have
// waited for them in another), have rising sequences, and epochs that never fall, a loss in between being of the epoch that
// those after it have or a later one; and that an epoch of a group has one set: sets has what was seen first of each.
func checkOrder(s survivor, sets map[string]record) (bad []string) {
	rs := slices.Clone(s.records)
	slices.SortStableFunc(rs, func(a, b record) int { return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.At, b.At)) })
	last := map[string]record{}
	seq := map[string]uint64{}
	for _, r := range rs {
		if !r.ordered() || r.Result != "ok" && r.Result != "lost" {
			continue
		}
		g := r.group()
		if l := last[g]; r.Epoch < l.Epoch {
			bad = append(bad, fmt.Sprintf("rank %d: group %s falls back to epoch %d of %+v after %+v", s.slot, g, r.Epoch, r, l))
		}
		last[g] = r
		if r.Result != "ok" {
			continue
		}
		if r.Seq <= seq[g] {
			bad = append(bad, fmt.Sprintf("rank %d: group %s: sequence %d after %d: %+v", s.slot, g, r.Seq, seq[g], r))
		}
		seq[g] = r.Seq
		e := fmt.Sprintf("%s, epoch %d", g, r.Epoch)
		if f, ok := sets[e]; !ok {
			sets[e] = r
		} else if !slices.Equal(f.Active, r.Active) {
			bad = append(bad, fmt.Sprintf("rank %d: group %s has two sets: %+v and %+v", s.slot, e, f, r))
		}
	}
	return bad
}

// checkGone checks that nothing can be sent to a rank after an operation of this step has completed without it.
func checkGone(s survivor, ops map[place]*op) (bad []string) {
	active := map[string][]int{}
	step := -1
	for _, r := range s.records {
		if r.Step != step { // after a Boundary: it may be back
			step = r.Step
			clear(active)
		}
		if r.Result == "ok" && r.ordered() {
			active[r.Group] = r.Active
		}
		o := ops[place{r.Step, r.At}]
		if r.Kind != "send" || o == nil || active[r.Group] == nil {
			continue
		}
		if to := groupOf[r.Group][o.To]; r.Result != "lost" && !slices.Contains(active[r.Group], to) {
			bad = append(bad, fmt.Sprintf("rank %d: %v to rank %d, which is gone: %+v", s.slot, o, to, r))
		}
	}
	return bad
}

// checkP2P checks a send and its receive. They are local: that one of them was lost says nothing about the other but that
// somebody was lost; but what was received is what was sent, in that order, and a loss of others does not touch a group that
// goes on. One end alone: the other one was dead, or died at it.
func checkP2P(args rankArgs, o *op, rs map[int]record, ss []survivor) (bad []string) {
	complain := func(f string, a ...any) { bad = append(bad, fmt.Sprintf(f, a...)) }
	members := groupOf[o.Group]
	both := 0
	for _, slot := range []int{members[o.Root], members[o.To]} {
		r, ok := rs[slot]
		if !ok {
			i := slices.IndexFunc(ss, func(s survivor) bool { return s.slot == slot })
			if i >= 0 && ss[i].over == "" && len(ss[i].records) > 0 && o.Step >= ss[i].records[0].Step {
				complain("%v: rank %d has nothing of it", o, slot)
			}
			continue
		}
		both++
		switch {
		case r.Result == "ok" && r.Got != o.Messages:
			complain("rank %d: %v: %d messages of %d and no error", slot, o, r.Got, o.Messages)
		case r.Result == "ok" || r.Result == "lost" || r.Result == "over": // which is said elsewhere
		case r.Result == "late" && args.Late != 0:
		default:
			complain("rank %d: %v: %+v", slot, o, r)
		}
		if r.Kind == "recv" {
			var want []byte
			for i := range r.Got {
				want = append(want, o.message(i)...)
			}
			if r.Sum != sum(want) {
				complain("rank %d: %v: received %x in %d messages, sent was %x", slot, o, r.Sum, r.Got, sum(want))
			}
		}
	}
	if both == 2 && args.Mode == pg.Continue {
		for slot, r := range rs {
			if r.Result == "lost" {
				complain("rank %d: %v between ranks that live: %+v", slot, o, r)
			}
		}
	}
	return bad
}

// alike says whether two ranks had the same outcome, up to the bits that differ by design.
func alike(a, b *record, o *op) bool {
	x, y := *a, *b
	if o != nil && (o.Kind == "all_to_all" || o.Kind == "pair") {
		x.Sum, y.Sum = 0, 0
	}
	if o != nil && o.Kind == "sub" { // of the world at one who is not in it
		x.Group, y.Group = "", ""
	}
	return x.Result == y.Result && x.Seq == y.Seq && x.Epoch == y.Epoch && x.Sum == y.Sum && x.Why == y.Why && x.Group == y.Group &&
		x.Kind == y.Kind && slices.Equal(x.Active, y.Active)
}

package proof

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/serry-project/serry/internal/harness"
)

// survivor is what a rank that lived to the end has seen.
type survivor struct {
	slot    int
	records []record
	over    string
	hits    map[string]int
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
		} else if rest, ok := strings.CutPrefix(line, "hits "); ok {
			if err := json.Unmarshal([]byte(rest), &s.hits); err != nil {
				return s, err
			}
		} else if rest, ok := strings.CutPrefix(line, "over "); ok {
			s.over = rest
		}
	}
	return s, nil
}

// check compares what the survivors have seen with each other, and with what the contributors give. It returns the
// problems, and the outcomes of all operations.
func check(seed uint64, ss []survivor) (bad []string, count map[string]int) {
	type place struct{ step, at int }
	seen := map[place]map[int]record{}
	ops := map[place]*op{}
	count = map[string]int{}
	complain := func(f string, a ...any) { bad = append(bad, fmt.Sprintf(f, a...)) }
	for _, s := range ss {
		last := map[string]uint64{}
		epoch := map[string]uint64{}
		for _, r := range s.records {
			k := place{r.Step, r.At}
			if seen[k] == nil {
				seen[k] = map[int]record{}
			}
			seen[k][s.slot] = r
			count[r.Result]++
			if r.Result == "over" {
				complain("rank %d: step %d.%d %s: %s", s.slot, r.Step, r.At, r.Kind, r.Why)
			}
			if r.Result == "ok" && r.Seq != 0 && r.Epoch < epoch[r.Group] && false {
				complain("rank %d: step %d.%d: epoch %d of group %s after %d", s.slot, r.Step, r.At, r.Epoch, r.Group, epoch[r.Group])
			}
			_ = last
		}
	}
	for _, s := range ss {
		for _, r := range s.records {
			k := place{r.Step, r.At}
			if ops[k] == nil {
				for _, m := range planStep(seed, r.Step) {
					ops[place{m.op.Step, m.op.At}] = m.op
				}
			}
		}
	}
	for k, rs := range seen {
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

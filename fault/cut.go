package fault

import (
	"cmp"
	"slices"
)

// vote is a promise, and whose.
type vote struct {
	from ID
	promise
}

// change is what a coordinator wants of the next view.
type change struct {
	drop    []suspicion
	fails   []failing
	joiners []Member
	at      uint64
}

// concerned is a group that needs a cut, with what the promises say of it.
type concerned struct {
	id    uint64
	slots Set
	fail  string
	order uint32
	done  map[int]uint64 // by slot
}

// plan computes the next view's value. missing are members of the next view of whom there is no word: neither their own
// promise, nor that of a living process of their host which says, for every group concerned, how far they are.
func plan(view View, votes []vote, ch change, b bug) (v Value, missing Set) {
	var out, in, left Set
	for _, d := range ch.drop {
		out.Add(d.ID.Slot)
		if d.Kind == kLeft {
			left.Add(d.ID.Slot)
		}
	}
	v = Value{Epoch: view.Epoch + 1, Size: view.Size, At: ch.at, Why: whyOf(ch.drop, ch.fails, ch.joiners)}
	for _, p := range view.Members {
		if !out.Has(p.Slot) {
			v.Members = append(v.Members, p)
		}
	}
	for _, p := range ch.joiners {
		in.Add(p.Slot)
		v.Size = max(v.Size, p.Slot+1)
		v.Members = append(v.Members, p)
	}
	slices.SortFunc(v.Members, func(a, b Member) int { return cmp.Compare(a.Slot, b.Slot) })

	// Whom a promise speaks for: those of its host that live.
	hosts, where := map[uint64]Set{}, map[int]uint64{}
	for _, p := range view.Members {
		s := hosts[p.Host]
		s.Add(p.Slot)
		hosts[p.Host], where[p.Slot] = s, p.Host
	}
	var own, vouched Set
	speaks := make([]Set, len(votes))
	for i, w := range votes {
		own.Add(w.from.Slot)
		s := hosts[where[w.from.Slot]]
		for _, id := range w.Gone {
			s.Del(id.Slot)
		}
		speaks[i] = s
		vouched = vouched.Or(s)
	}
	groups := gather(votes, speaks, ch.fails, out.Or(in))
	stay := slotsOf(v.Members).Minus(in)
	for s := stay.Next(0); s >= 0; s = stay.Next(s + 1) {
		if own.Has(s) {
			continue
		}
		if !vouched.Has(s) {
			missing.Add(s)
		}
		for _, g := range groups {
			if _, ok := g.done[s]; g.slots.Has(s) && !ok {
				missing.Add(s)
			}
		}
	}
	// What a leaver returned from binds, so its word is needed too, or that of a living process of its host.
	for s := left.Next(0); s >= 0; s = left.Next(s + 1) {
		for _, g := range groups {
			if _, ok := g.done[s]; g.slots.Has(s) && !ok && !own.Has(s) {
				missing.Add(s)
			}
		}
	}
	for _, g := range groups {
		c := Cut{Group: g.id, Fail: g.fail, Slots: g.slots}
		// What the dropped returned from does not bind; a leaver's does, the others hold what it has.
		for s, seq := range g.done {
			if stay.Has(s) != (b == bugCutFromDead) || left.Has(s) && vouched.Has(s) {
				c.Seq = max(c.Seq, seq)
			}
		}
		v.Cuts = append(v.Cuts, c)
	}
	return v, missing
}

// gather lists the groups that lose or gain one of the slots, or fail, the first ones of their members first.
func gather(votes []vote, speaks []Set, fails []failing, touched Set) (groups []*concerned) {
	for _, w := range votes {
		for _, h := range w.Groups {
			f := slices.IndexFunc(fails, func(f failing) bool { return f.Group == h.Group })
			if none(h.Slots.And(touched)) && f < 0 {
				continue
			}
			i := slices.IndexFunc(groups, func(g *concerned) bool { return g.id == h.Group })
			if i < 0 {
				groups = append(groups, &concerned{id: h.Group, done: map[int]uint64{}})
				i = len(groups) - 1
			}
			g := groups[i]
			if f >= 0 {
				g.fail = fails[f].Why
			}
			if h.Order > 0 && (g.order == 0 || h.Order < g.order) {
				g.order = h.Order
			}
			g.slots = g.slots.Or(h.Slots)
		}
	}
	// How far each member is: by its own word, or that of a process of its host.
	for i, w := range votes {
		for _, h := range w.Groups {
			k := slices.IndexFunc(groups, func(g *concerned) bool { return g.id == h.Group })
			if k < 0 {
				continue
			}
			for _, d := range h.Done {
				if speaks[i].Has(d.Slot) {
					groups[k].done[d.Slot] = max(groups[k].done[d.Slot], d.Seq)
				}
			}
		}
	}
	groups = slices.DeleteFunc(groups, func(g *concerned) bool { return g.slots.Empty() })
	slices.SortStableFunc(groups, func(a, b *concerned) int {
		if c := cmp.Compare(a.order, b.order); c != 0 {
			return c
		}
		return cmp.Compare(a.id, b.id)
	})
	return groups
}

package fault

import (
	"fmt"
	"slices"
	"strings"
)

// onCommit learns what was decided.
func (m *Machine) onCommit(r Received, v Value) {
	switch {
	case v.Epoch == m.view.Epoch+1:
		m.install(v)
	case v.Epoch > m.view.Epoch+1 && m.member(r.From) != nil && v.Epoch > m.asked:
		m.asked = v.Epoch
		m.send(r.From, hello{m.head()})
	}
}

// publish sends a decision to everybody of the old view: to those who stay, and to those who must know that they are out.
func (m *Machine) publish(v Value) {
	for _, p := range m.view.Members {
		if p.ID != m.self && !m.isDead(p.ID) {
			m.send(p.ID, commit{v})
		}
	}
}

// install goes on to the next view.
func (m *Machine) install(v Value) {
	old := m.view
	h := installed{value: v}
	var lost, joined []Member
	for _, p := range old.Members {
		if findMember(v.Members, p.ID) == nil {
			lost = append(lost, p)
			h.lost.Add(p.Slot)
			h.gone = append(h.gone, p.Nonce)
		}
	}
	for _, p := range v.Members {
		if findMember(old.Members, p.ID) == nil {
			joined = append(joined, p)
			h.gained.Add(p.Slot)
		}
	}
	if g := m.growth.hold; g != nil && v.At != 0 && g.quiet != nil {
		h.attach = g.quiet.Attach
	}
	closed, ballot := m.closed, m.promised
	m.view = View{Epoch: v.Epoch, Size: v.Size, Capacity: old.Capacity, Members: v.Members, Incs: incsOf(old.Incs, v.Members)}
	m.hist = append(m.hist, h)
	if len(m.hist) > keepHistory {
		m.hist = slices.Delete(m.hist, 0, len(m.hist)-keepHistory)
	}

	if m.member(m.self) == nil {
		if m.cfg.Witness && m.reachesNone(v.Members) {
			// It was not told, it found this at the witness, or one of its half did.
			m.end(fmt.Sprintf("the witness gave its vote for epoch %d to ranks %v, which cannot be reached: join them again once they can (%s)",
				v.Epoch, slotsOf(v.Members).Slots(), v.Why))
			return
		}
		m.evicted(v.Epoch, v.Why)
		return
	}
	reopen := m.applyCuts(v, h, closed)
	m.emit(Install{View: m.view, Cuts: v.Cuts, Lost: lost, Joined: joined, At: v.At, Why: v.Why})
	if len(reopen) > 0 {
		m.emit(Reopen{ballot, reopen})
	}
	if m.growth.hold != nil && v.At == 0 {
		m.emit(Release{})
	}
	m.newEpoch()
	for _, p := range joined {
		m.welcome(p, h)
	}

	// What waited for this view.
	waits := m.waits
	m.waits = nil
	for _, r := range waits {
		if m.over {
			return
		}
		m.receive(r)
	}
}

// applyCuts brings the groups to a new view, and returns those of closed that go on where they stood.
func (m *Machine) applyCuts(v Value, h installed, closed []uint64) (reopen []uint64) {
	now := slotsOf(v.Members)
	cut := func(id uint64) *Cut {
		for i := range v.Cuts {
			if v.Cuts[i].Group == id {
				return &v.Cuts[i]
			}
		}
		return nil
	}
	for i := range m.groups {
		g := &m.groups[i]
		c := cut(g.ID)
		lost := g.Slots.And(h.lost)
		switch {
		case c != nil:
			g.Active, g.Version, g.Cut = g.Slots.And(now), v.Epoch, c.Seq
			if v.At != 0 {
				g.floor = c.Seq
			}
			if g.Failed == "" {
				g.Failed = c.Fail
			}
			m.orphan = slices.DeleteFunc(m.orphan, func(id uint64) bool { return id == g.ID })
			if g.Failed != "" {
				m.fails = slices.DeleteFunc(m.fails, func(f failing) bool { return f.Group == g.ID })
			}
		case g.Failed != "":
			g.Active = g.Slots.And(now)
		case !lost.Empty() && !slices.Contains(m.orphan, g.ID):
			// Nobody who promised knew this group: the next change cuts it.
			m.orphan = append(m.orphan, g.ID)
		}
	}
	for _, id := range closed {
		if cut(id) == nil {
			reopen = append(reopen, id)
		}
	}
	return reopen
}

// newEpoch forgets what concerned only the old view.
func (m *Machine) newEpoch() {
	m.promised, m.accepted, m.value = Ballot{}, Ballot{}, Value{}
	m.maxNum = ballotBase(m.view.Epoch)
	m.closed, m.closing, m.states, m.joined = nil, false, nil, nil
	m.att, m.tries, m.takeAt, m.standDown, m.workAt, m.alone = nil, 0, 0, 0, 0, 0
	m.starved, m.unlinked, m.stood = 0, "", false
	m.witness.since, m.witness.again, m.witness.why = 0, 0, ""
	clear(m.unanswered)
	clear(m.caught)
	m.late, m.slow, m.sentTo, m.again = nil, nil, Set{}, 0
	// Who hears whom stays known; what the others want is theirs to say again.
	m.told = slices.DeleteFunc(m.told, func(r report) bool { return m.member(r.From) == nil })
	for i := range m.told {
		m.told[i].Suspects, m.told[i].Fails = nil, nil
	}
	if m.mine.N > 0 {
		m.mine.N++
	}
	m.blame.chases, m.blame.pending = nil, nil
	m.growth.hold, m.growth.run, m.growth.replaced = nil, nil, nil
	if m.hist[len(m.hist)-1].value.At != 0 {
		m.growth.patience = 0
		m.growth.joiners = nil // they are not linked to who came in: they link, and ask again
	}
	m.fails = slices.DeleteFunc(m.fails, func(f failing) bool { return m.group(f.Group) == nil })
	gone := func(id ID) bool {
		// One of a later view than ours may be told of before we learn that view.
		return m.member(id) == nil && id.Slot < len(m.view.Incs) && id.Inc <= m.view.Incs[id.Slot]
	}
	m.proof = slices.DeleteFunc(m.proof, gone)
	m.rumour = slices.DeleteFunc(m.rumour, gone)
	m.silent = slices.DeleteFunc(m.silent, gone)
	for id := range m.muteAt {
		if !m.isSilent(id) {
			delete(m.muteAt, id)
		}
	}
	m.asks = slices.DeleteFunc(m.asks, func(v vouching) bool { return gone(v.about) || gone(v.by) })
	m.vouched = slices.DeleteFunc(m.vouched, gone)
}

// welcome tells a newcomer all that it needs to start.
func (m *Machine) welcome(p Member, h installed) {
	w := Welcome{Self: p.ID, At: h.value.At, Attach: h.attach, Gained: h.gained, Change: h.value}
	w.View = View{Epoch: h.value.Epoch, Size: h.value.Size, Capacity: m.view.Capacity, Members: h.value.Members}
	// Of the view in which it enters, not of a later one: it learns what came after like any other member.
	w.View.Incs = incsAt(m.view.Incs, m.hist, h.value.Epoch)
	now := slotsOf(h.value.Members)
	for _, c := range h.value.Cuts {
		if c.Slots.Has(p.Slot) && c.Fail == "" {
			w.Groups = append(w.Groups, Group{ID: c.Group, Slots: c.Slots, Active: c.Slots.And(now),
				Version: h.value.Epoch, Cut: c.Seq})
		}
	}
	m.emit(Send{Nonce: p.Nonce, Msg: w})
}

// incsAt takes back what later growths numbered.
func incsAt(incs []uint32, hist []installed, epoch uint64) []uint32 {
	incs = slices.Clone(incs)
	for i := len(hist) - 1; i >= 0 && hist[i].value.Epoch > epoch; i-- {
		for s := hist[i].gained.Next(0); s >= 0; s = hist[i].gained.Next(s + 1) {
			incs[s]--
		}
	}
	for len(incs) > 0 && incs[len(incs)-1] == 0 {
		incs = incs[:len(incs)-1]
	}
	return incs
}

// onCreated adds a group, and what happened to it since the operation that made it.
func (m *Machine) onCreated(e Created) {
	if m.group(e.Group.ID) != nil {
		return
	}
	g := e.Group
	at := m.slots() // of the view with e.Epoch
	for i := len(m.hist) - 1; i >= 0 && m.hist[i].value.Epoch > e.Epoch; i-- {
		at = at.Minus(m.hist[i].gained).Or(m.hist[i].lost)
	}
	g.Active = g.Slots.And(at)
	orphan := false
	for _, h := range m.hist {
		if h.value.Epoch <= e.Epoch {
			continue
		}
		i := slices.IndexFunc(h.value.Cuts, func(c Cut) bool { return c.Group == g.ID })
		if i < 0 {
			// Others may have known the group by then, and for them it is an orphan: for us it has to be one too, or we
			// would lose a member in another version than they.
			orphan = orphan || !none(g.Slots.And(h.lost))
			continue
		}
		orphan = false
		g.Version, g.Cut, g.Active = h.value.Epoch, h.value.Cuts[i].Seq, g.Slots.And(slotsOf(h.value.Members))
		if g.Failed == "" {
			g.Failed = h.value.Cuts[i].Fail
		}
	}
	if orphan && g.Failed == "" {
		m.orphan = append(m.orphan, g.ID)
	}
	m.groups = append(m.groups, g)
	// A promise that we gave before we knew the group closes it too, before anything can be decided in it: also one that
	// named the group and nobody who is in it, to fail it or to cut it late.
	if m.promised != (Ballot{}) && g.Failed == "" &&
		(slices.Contains(m.closed, g.ID) || m.joined == nil && !none(g.Slots.And(m.namedSlots))) {
		m.closeGroups([]uint64{g.ID})
	}
}

// whyOf makes the sentence that goes with a change.
func whyOf(drop []suspicion, fails []failing, joiners []Member) string {
	var s []string
	for _, d := range drop {
		if len(s) == 8 && len(drop) > 9 {
			s = append(s, fmt.Sprintf("and %d more ranks were dropped", len(drop)-8))
			break
		}
		s = append(s, d.Why)
	}
	for _, f := range fails {
		if f.Why != "" {
			s = append(s, fmt.Sprintf("group %d is failed: %s", f.Group, f.Why))
		}
	}
	for _, j := range joiners {
		s = append(s, fmt.Sprintf("rank %d (incarnation %d) joins", j.Slot, j.Inc))
	}
	if len(s) == 0 {
		return "no member was lost: what was suspected did not hold"
	}
	return clip(strings.Join(s, "; "))
}

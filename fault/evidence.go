package fault

import (
	"cmp"
	"fmt"
	"slices"
)

func (m *Machine) onDied(id ID) {
	if id == m.self || slices.Contains(m.proof, id) {
		return
	}
	m.proof = append(m.proof, id)
	if m.member(id) == nil || m.promised == (Ballot{}) {
		return
	}
	// Our vote now counts for one more.
	if m.accepted == m.promised {
		m.sendAccepted()
	} else if !m.closing {
		m.sendPromise()
	}
}

func (m *Machine) onSilent(id ID) {
	if p := m.member(id); id == m.self || m.isSilent(id) || p != nil && p.Host == m.me.Host {
		return // of our own host the kernel tells us
	}
	m.silent = append(m.silent, id)
	m.muteAt[id] = m.t
}

func (m *Machine) onHeard(id ID) {
	if !m.isSilent(id) {
		return
	}
	m.silent = slices.DeleteFunc(m.silent, func(x ID) bool { return x == id })
	m.asks = slices.DeleteFunc(m.asks, func(v vouching) bool { return v.about == id })
	m.vouched = slices.DeleteFunc(m.vouched, func(x ID) bool { return x == id })
	m.slow = slices.DeleteFunc(m.slow, func(s suspicion) bool { return s.ID == id })
	m.send(id, hello{m.head()}) // one of us may have missed what was decided
}

// voucher returns a member of p's host that can be asked about p, or nil.
func (m *Machine) voucher(p Member) *Member {
	for i := range m.view.Members {
		q := &m.view.Members[i]
		if q.Host == p.Host && q.ID != p.ID && !m.isDead(q.ID) && !m.isSilent(q.ID) {
			return q
		}
	}
	return nil
}

// isOut says that nothing is heard of a member, and nobody of its host that is heard says that it lives.
func (m *Machine) isOut(id ID) bool {
	p := m.member(id)
	return m.isSilent(id) && (p == nil || !slices.Contains(m.vouched, id) || m.voucher(*p) == nil)
}

// askAbout asks a member of each silent one's host whether it lives.
func (m *Machine) askAbout() {
	for _, id := range m.silent {
		p := m.member(id)
		if p == nil || m.isDead(id) {
			continue
		}
		q := m.voucher(*p)
		if q == nil || slices.Contains(m.asks, vouching{id, q.ID}) {
			continue
		}
		m.asks = append(m.asks, vouching{id, q.ID})
		m.send(q.ID, ask{m.head(), id})
	}
}

func (m *Machine) onAsk(from ID, x ask) {
	if slices.Contains(m.proof, x.ID) {
		m.send(from, vouch{m.head(), x.ID, true})
	} else if p := m.member(x.ID); p != nil && p.Host == m.me.Host {
		m.send(from, vouch{m.head(), x.ID, false})
	}
}

func (m *Machine) onVouch(from ID, x vouch) {
	p, q := m.member(x.ID), m.member(from)
	if p == nil || q == nil || p.Host != q.Host {
		return
	}
	if x.Dead {
		m.hearDead(x.ID)
	} else {
		if m.isSilent(x.ID) && !slices.Contains(m.vouched, x.ID) {
			m.vouched = append(m.vouched, x.ID)
		}
		m.note("rank %d does not answer; rank %d, on its host, says that it lives: it is late, not lost", x.ID.Slot, from.Slot)
	}
}

func (m *Machine) hearDead(id ID) {
	if id != m.self && !m.isDead(id) {
		m.rumour = append(m.rumour, id)
	}
}

func (m *Machine) onAbort(e Abort) {
	if e.Group == 1 {
		if m.abort == "" {
			m.abort = fmt.Sprintf("rank %d aborted: %s", m.self.Slot, e.Reason)
		}
		return
	}
	if g := m.group(e.Group); g != nil && g.Failed != "" {
		return
	}
	m.fail(e.Group, fmt.Sprintf("aborted by rank %d: %s", m.self.Slot, e.Reason))
}

// fail asks for a group to be failed for good.
func (m *Machine) fail(group uint64, why string) {
	if !slices.ContainsFunc(m.fails, func(f failing) bool { return f.Group == group }) {
		m.fails = append(m.fails, failing{group, clip(why)})
	}
}

// own is what this process has against others now.
func (m *Machine) own() report {
	r := report{From: m.self, N: m.mine.N}
	for _, id := range m.silent {
		p := m.member(id)
		if p == nil || m.isDead(id) {
			continue
		}
		r.Silent.Add(id.Slot)
		if m.voucher(*p) == nil {
			r.Suspects = append(r.Suspects, suspicion{ID: id, Kind: kSilent, Why: fmt.Sprintf(
				"rank %d was silent for %v to rank %d, and nobody of its host speaks for it", id.Slot, m.cfg.HeartbeatLimit, m.self.Slot)})
		}
	}
	for _, id := range m.proof {
		if m.member(id) != nil {
			r.Suspects = append(r.Suspects, suspicion{ID: id, Kind: kDied,
				Why: fmt.Sprintf("rank %d died (seen by the kernel of rank %d's host)", id.Slot, m.self.Slot)})
		}
	}
	for _, id := range m.rumour {
		if m.member(id) != nil && !slices.Contains(m.proof, id) {
			r.Suspects = append(r.Suspects, suspicion{ID: id, Kind: kDied,
				Why: fmt.Sprintf("rank %d died (seen by the kernel of its host)", id.Slot)})
		}
	}
	r.Suspects = append(r.Suspects, m.late...)
	r.Suspects = append(r.Suspects, m.growth.replaced...)
	if m.leaving {
		r.Suspects = append(r.Suspects, suspicion{ID: m.self, Kind: kLeft, Why: fmt.Sprintf("rank %d left", m.self.Slot)})
	}
	if m.abort != "" {
		r.Suspects = append(r.Suspects, suspicion{ID: m.self, Kind: kAbort, Why: m.abort})
	}
	if m.unlinked != "" {
		r.Suspects = append(r.Suspects, suspicion{ID: m.self, Kind: kLink, Why: m.unlinked})
	}
	r.Fails = append(r.Fails, m.fails...)
	for _, id := range m.orphan {
		r.Fails = append(r.Fails, failing{Group: id})
	}
	return r
}

func sameReport(a, b report) bool {
	return a.Silent == b.Silent && slices.Equal(a.Suspects, b.Suspects) && slices.Equal(a.Fails, b.Fails)
}

// hearReports keeps what others have against others.
func (m *Machine) hearReports(rs []report) {
	for _, r := range rs {
		if m.member(r.From) == nil || r.From == m.self {
			continue
		}
		for _, s := range r.Suspects {
			if s.Kind == kDied {
				m.hearDead(s.ID)
			}
		}
		i, ok := slices.BinarySearchFunc(m.told, r.From, func(x report, id ID) int { return cmp.Compare(x.From.Slot, id.Slot) })
		switch {
		case !ok:
			m.told = slices.Insert(m.told, i, r)
		case r.N > m.told[i].N:
			m.told[i] = r
		default:
			continue
		}
		m.sentTo = Set{}
	}
}

// tell sends what we have against others to the coordinator, and to the owner of the ballot that we promised.
func (m *Machine) tell(c ID, work bool) {
	r := m.own()
	if !sameReport(r, m.mine) {
		r.N++
		m.mine, m.sentTo = r, Set{}
	}
	if work && m.t >= m.again {
		m.sentTo, m.again = Set{}, m.t+5*m.cfg.BallotTimeout
	}
	if m.mine.N == 0 && len(m.told) == 0 {
		return
	}
	to := SetOf(c.Slot)
	if m.promised != (Ballot{}) {
		to.Add(int(m.promised.Slot))
	}
	for s := to.Next(0); s >= 0; s = to.Next(s + 1) {
		p := m.at(s)
		if p == nil || p.ID == m.self || m.sentTo.Has(s) || m.isDead(p.ID) {
			continue
		}
		m.sentTo.Add(s)
		m.send(p.ID, suspect{m.head(), m.reports()})
	}
}

// reports is all that we know, our own first.
func (m *Machine) reports() []report {
	return append([]report{m.mine}, m.told...)
}

// judge says whom the next view should be without, by slot, and which groups need a cut of their own.
func (m *Machine) judge() (drop []suspicion, fails []failing) {
	all := append([]report{m.own()}, m.told...)
	silent := map[int]Set{}
	for _, r := range all {
		if r.Silent != (Set{}) {
			silent[r.From.Slot] = r.Silent
		}
	}
	// One that we do not hear, and others still do after all this time, lives: it is our link that is broken.
	for s := all[0].Silent.Next(0); s >= 0; s = all[0].Silent.Next(s + 1) {
		if m.heardBy(s) && m.t >= m.muteAt[m.at(s).ID]+m.cfg.HeartbeatLimit {
			x := silent[s]
			x.Add(m.self.Slot)
			silent[s] = x
		}
	}
	var out Set
	add := func(s suspicion) {
		if m.member(s.ID) != nil && !out.Has(s.ID.Slot) {
			out.Add(s.ID.Slot)
			drop = append(drop, s)
		}
	}
	for k := kDied; k < kEnd; k++ {
		for i, r := range all {
			for _, s := range r.Suspects {
				if s.Kind == k && m.counts(s, r.From, i == 0, silent) {
					add(s)
				}
			}
		}
	}
	for _, s := range m.slow {
		add(s)
	}

	// Those that are left must all reach each other.
	lost := unlink(m.slots().Minus(out), silent)
	if len(lost) == 0 {
		m.linkAt = 0
	} else if m.linkAt == 0 {
		m.linkAt = m.t
	}
	if m.linkAt != 0 && m.t-m.linkAt >= m.cfg.HeartbeatLimit/4 {
		for _, s := range lost {
			if s == m.self.Slot && m.nobodyElse() {
				continue
			}
			add(suspicion{ID: m.at(s).ID, Kind: kLink,
				Why: fmt.Sprintf("rank %d and others do not reach each other, and it has the fewest working links", s)})
		}
	}
	slices.SortFunc(drop, func(a, b suspicion) int { return cmp.Compare(a.ID.Slot, b.ID.Slot) })

	for _, r := range all {
		for _, f := range r.Fails {
			if g := m.group(f.Group); g != nil && g.Failed != "" {
				continue
			}
			i := slices.IndexFunc(fails, func(x failing) bool { return x.Group == f.Group })
			if i < 0 {
				fails = append(fails, f)
			} else if fails[i].Why == "" {
				fails[i].Why = f.Why
			}
		}
	}
	slices.SortFunc(fails, func(a, b failing) int { return cmp.Compare(a.Group, b.Group) })
	return drop, fails
}

// counts says whether a suspicion, said by a member, is reason enough.
func (m *Machine) counts(s suspicion, by ID, ours bool, silent map[int]Set) bool {
	switch s.Kind {
	case kDied:
		return s.ID != m.self
	case kReplaced:
		return true
	case kLeft, kAbort, kLink:
		return s.ID == by
	case kSilent:
		// If it says itself that it does not hear us, or others hear it, then it lives: a broken link, on which the working
		// links decide.
		r := silent[s.ID.Slot]
		return ours && (m.nobodyElse() || !r.Has(m.self.Slot) && !m.heardBy(s.ID.Slot))
	case kLate:
		if m.att == nil {
			return true
		}
		for _, v := range m.att.promises { // it has arrived meanwhile
			if v.from == s.ID {
				for _, g := range v.Groups {
					if g.Group == s.Group && g.Issued >= s.Seq {
						return false
					}
				}
			}
		}
		return true
	}
	return false
}

// waited says that a member has owed us a promise for HeartbeatLimit.
func (m *Machine) waited(slot int) bool {
	since, ok := m.unanswered[slot]
	return ok && m.t-since >= m.cfg.HeartbeatLimit
}

// nobodyElse says that we left it to others to drop us, and nobody did: then those whom we do not hear are not there.
func (m *Machine) nobodyElse() bool { return m.stood && m.t >= m.standDown }

// heardBy says that somebody of another host, whom we hear, hears a member.
func (m *Machine) heardBy(slot int) bool {
	for _, r := range m.told {
		p, q := m.at(slot), m.member(r.From)
		if q != nil && q.Slot != slot && q.Host != p.Host && !r.Silent.Has(slot) && !m.isSilent(q.ID) && !m.isDead(q.ID) {
			return true
		}
	}
	return false
}

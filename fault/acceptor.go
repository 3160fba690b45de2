package fault

import (
	"slices"
)

// Ballots of one epoch start at a number of their own, so that ballots of different epochs are never equal and a host can
// tell, of a word that is closed for a ballot, whether that ballot is already decided.
const ballotBits = 12

func ballotBase(epoch uint64) uint32 { return uint32(epoch) << ballotBits }

// Less orders the ballots of one epoch.
func (b Ballot) Less(o Ballot) bool {
	return b.Num < o.Num || b.Num == o.Num && b.Slot < o.Slot
}

// Void says that the ballot was for a change of a view before the one with this epoch: what it closed is decided.
func (b Ballot) Void(epoch uint64) bool {
	return int32((b.Num-1)>>ballotBits<<ballotBits-ballotBase(epoch)) < 0
}

// onPrepare is the first half of a vote: to accept nothing of a lower ballot, and to close the groups concerned.
func (m *Machine) onPrepare(from ID, x prepare) {
	if int(x.Ballot.Slot) != from.Slot {
		return
	}
	if x.Ballot.Less(m.promised) {
		m.send(from, nack{m.head(), x.Ballot, m.promised})
		return
	}
	if x.Ballot == m.promised {
		m.resetTake()
		if !m.closing {
			m.sendPromise()
		}
		return
	}
	if len(x.Joiners) > 0 && !m.standsIn(from, x.Token, x.At) {
		m.send(from, growNo{m.head(), x.Token})
		return
	}
	if m.cfg.bug == bugEarlyReopen && len(m.closed) > 0 {
		m.emit(Reopen{m.promised, m.closed})
		m.closed = nil
	}
	m.promised = x.Ballot
	m.maxNum = max(m.maxNum, x.Ballot.Num)
	if from != m.self {
		m.att = nil
		m.resetTake()
	}
	m.joined = nil
	if len(x.Joiners) > 0 {
		m.joined = &x
	}
	m.record()
	m.namedSlots = Set{}
	for _, s := range x.Suspects {
		m.namedSlots.Add(s.ID.Slot)
		if s.Kind == kDied {
			m.hearDead(s.ID)
		}
	}
	for _, j := range x.Joiners {
		m.namedSlots.Add(j.Slot)
	}
	// A group that we do not know is closed too if we are asked: a member of it on our host may be stopped.
	groups := slices.Clone(x.Groups)
	for _, g := range m.groups {
		if g.Failed == "" && !none(g.Slots.And(m.namedSlots)) {
			groups = append(groups, g.ID)
		}
	}
	m.closeGroups(groups)
}

// closeGroups closes these groups besides those that are closed already, and then sends the promise.
func (m *Machine) closeGroups(groups []uint64) {
	for _, id := range groups {
		if g := m.group(id); !slices.Contains(m.closed, id) && (g == nil || g.Failed == "") {
			m.closed = append(m.closed, id)
		}
	}
	if len(m.closed) == 0 {
		m.sendPromise()
		return
	}
	m.closing = true
	m.emit(Close{m.promised, slices.Clone(m.closed)})
}

// onClosed is the host's answer: now nothing more is decided in those groups on this host.
func (m *Machine) onClosed(e Closed) {
	if !m.closing || e.Ballot != m.promised {
		return
	}
	m.closing = false
	m.states = e.Groups
	m.sendPromise()
}

// keepPast is how many changes a record holds: more than a member can miss while all others of its host die.
const keepPast = 4

// missed is the change that follows our view, as the record of a process that has installed it tells.
func (m *Machine) missed(r Record) (v Value, ok bool) {
	for _, b := range r.Past {
		if v, err := parseValue(b); err == nil && v.Epoch == m.view.Epoch+1 {
			return v, true
		}
	}
	return v, false
}

// record publishes our vote for the others of our host.
func (m *Machine) record() {
	if m.cfg.Board == nil {
		return
	}
	r := Record{Epoch: m.view.Epoch, Promised: m.promised, Accepted: m.accepted}
	if m.accepted != (Ballot{}) {
		r.Value = appendValue(nil, m.value)
	}
	for _, h := range m.hist[max(0, len(m.hist)-keepPast):] {
		r.Past = append(r.Past, appendValue(nil, h.value))
	}
	m.cfg.Board.Publish(r)
}

// mates are the records of the other members of our host, alive or dead.
func (m *Machine) mates() (rs []Record) {
	if m.cfg.Board == nil {
		return nil
	}
	for _, p := range m.view.Members {
		if p.Host == m.me.Host && p.ID != m.self {
			if r, ok := m.cfg.Board.Read(p.ID); ok && r.Epoch >= m.view.Epoch {
				rs = append(rs, r)
			}
		}
	}
	return rs
}

// gone are the members of our host that are dead by our kernel's word.
func (m *Machine) gone() (ids []ID) {
	for _, p := range m.view.Members {
		if p.Host == m.me.Host && slices.Contains(m.proof, p.ID) {
			ids = append(ids, p.ID)
		}
	}
	return ids
}

// sendPromise says what we promised, what is accepted on our host, and how far its processes are. The promise is on the
// Board already, and the records are read only now: a proxy that accepts something of a lower ballot after this sees it.
func (m *Machine) sendPromise() {
	if m.promised == (Ballot{}) {
		return
	}
	x := promise{head: m.head(), Ballot: m.promised, Accepted: m.accepted, Value: m.value, Gone: m.gone()}
	x.Dead = x.Gone
	for _, r := range m.mates() {
		if m.cfg.bug == bugNoProxyRead {
			break
		}
		if r.Epoch > m.view.Epoch {
			if v, ok := m.missed(r); ok {
				m.install(v) // it was chosen: he has installed it
				return
			}
			x.Dead = nil // it knows a later view: what the dead had voted in this one may be overwritten
			continue
		}
		if x.Accepted.Less(r.Accepted) {
			v, err := parseValue(r.Value)
			if err != nil {
				x.Dead = nil
				m.note("the record of a process of this host cannot be read: %v", err)
				continue
			}
			x.Accepted, x.Value = r.Accepted, v
		}
	}
	if x.Accepted == (Ballot{}) {
		x.Value = Value{}
	}
	for _, s := range m.states {
		h := held{GroupDone: s}
		if i := slices.IndexFunc(m.groups, func(g Group) bool { return g.ID == s.Group }); i >= 0 {
			h.Slots, h.Order = m.groups[i].Slots, uint32(i)+1
			// A newcomer begins where the others stood, also one that has not told its host so yet. What a loss let succeed
			// may still fall, if those are lost who have returned from it.
			h.Done = slices.Clone(h.Done)
			for k := range h.Done {
				h.Done[k].Seq = max(h.Done[k].Seq, m.groups[i].floor)
			}
		}
		x.Groups = append(x.Groups, h)
	}
	if r := m.own(); !sameReport(r, m.mine) {
		r.N++
		m.mine, m.sentTo = r, Set{}
	}
	x.Reports = m.reports()
	if p := m.at(int(m.promised.Slot)); p != nil {
		m.send(p.ID, x)
	}
}

// onAccept is the second half of a vote.
func (m *Machine) onAccept(from ID, x accept) {
	if int(x.Ballot.Slot) != from.Slot || x.Value.Epoch != m.view.Epoch+1 {
		return
	}
	if x.Ballot.Less(m.promised) && m.cfg.bug != bugAnyAccept {
		m.send(from, nack{m.head(), x.Ballot, m.promised})
		return
	}
	if from != m.self {
		m.att = nil
		m.resetTake()
	}
	m.promised, m.accepted, m.value = x.Ballot, x.Ballot, x.Value
	m.maxNum = max(m.maxNum, x.Ballot.Num)
	m.closing = false
	m.record()
	m.sendAccepted()
}

// sendAccepted says that we accepted, and for whom else. The acceptance is on the Board already: of two proxies for the
// same dead process, of which one promises a higher ballot, at least one sees the other. If somebody of this host, dead
// perhaps, has promised a higher one, the dead are of no use to this ballot: who asks must hear of it, to ask with another.
func (m *Machine) sendAccepted() {
	dead := m.gone()
	var higher Ballot
	for _, r := range m.mates() {
		if m.cfg.bug == bugNoRecheck {
			break
		}
		if r.Epoch > m.view.Epoch || m.accepted.Less(r.Promised) {
			dead = nil
		}
		if r.Epoch == m.view.Epoch && m.accepted.Less(r.Promised) && higher.Less(r.Promised) {
			higher = r.Promised
		}
	}
	if p := m.at(int(m.accepted.Slot)); p != nil {
		m.send(p.ID, accepted{m.head(), m.accepted, dead})
		if higher != (Ballot{}) {
			m.send(p.ID, nack{m.head(), m.accepted, higher})
		}
	}
}

// resetTake puts off the time at which we overtake a coordinator that says nothing.
func (m *Machine) resetTake() {
	place := 0
	for _, p := range m.view.Members {
		if p.ID == m.self {
			break
		}
		if !m.isDead(p.ID) && !m.isSilent(p.ID) && place < 40 {
			place++
		}
	}
	m.takeAt = m.t + m.cfg.BallotTimeout<<min(m.tries, 6) + Time(place)*m.cfg.BallotTimeout/4
}

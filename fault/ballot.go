package fault

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// attempt is a ballot of ours.
type attempt struct {
	ballot   Ballot
	prep     prepare
	fails    []failing
	from     Time // when it began
	beat     Time // when to show next that we live
	beats    int
	promises []vote // by slot
	best     Ballot // the highest accepted that was reported
	found    Value
	asking   bool // accept has been sent
	since    Time // when what we wait for was asked first: promises, or acceptances
	witness  bool // the witness has promised, or accepted
	value    Value
	votes    Set // who accepted
}

// drive does what is due. It returns true when there may be more to do.
func (m *Machine) drive() bool {
	m.askAbout()
	m.driveBlame()
	if m.t >= m.standDown {
		m.unlinked = ""
	}
	drop, fails := m.judge()
	work := len(drop) > 0 || len(fails) > 0 || m.promised != (Ballot{})
	switch {
	case !work:
		m.workAt, m.takeAt, m.tries, m.alone, m.starved = 0, 0, 0, 0, 0
	case m.workAt == 0:
		m.workAt = m.t
	}
	if work && m.giveUp() {
		return false
	}
	c := m.coordinator(drop)
	m.tell(c, work)
	switch {
	case m.att != nil:
		if m.decide(drop, fails) {
			return true
		}
	case work && m.mayStart(c, drop):
		m.begin(drop, fails, nil)
		return true
	}
	m.driveGrowth(c, work)
	return false
}

// coordinator is the lowest member that is neither suspected nor silent.
func (m *Machine) coordinator(drop []suspicion) ID {
	for pass := range 2 {
		for _, p := range m.view.Members {
			out := slices.ContainsFunc(drop, func(s suspicion) bool {
				return s.ID == p.ID && (pass == 0 || s.Kind == kDied) // all leave: then one who leaves decides it
			})
			if !out && !m.isSilent(p.ID) && (p.ID != m.self || m.t >= m.standDown) {
				return p.ID
			}
		}
	}
	return m.self
}

// mayStart says whether it is our turn to start a ballot.
func (m *Machine) mayStart(c ID, drop []suspicion) bool {
	if c == m.self {
		owner := m.at(int(m.promised.Slot))
		lost := owner == nil || m.isSilent(owner.ID) || slices.ContainsFunc(drop, func(s suspicion) bool {
			return s.ID == owner.ID && s.Kind == kDied
		})
		if m.promised == (Ballot{}) || lost {
			return true
		}
	}
	if m.takeAt == 0 {
		m.resetTake()
	}
	return m.t >= m.takeAt && m.t >= m.standDown
}

// begin starts a ballot: an ordinary one, or a growth.
func (m *Machine) begin(drop []suspicion, fails []failing, grow *prepare) {
	m.tries++
	m.takeAt = 0
	m.maxNum++
	b := Ballot{m.maxNum, uint16(m.self.Slot)}
	a := &attempt{ballot: b, from: m.t, since: m.t, fails: fails}
	if grow != nil {
		a.prep = *grow
	}
	a.prep.head, a.prep.Ballot, a.prep.Suspects = m.head(), b, drop
	var named Set
	for _, s := range drop {
		named.Add(s.ID.Slot)
	}
	for _, f := range fails {
		a.prep.Groups = append(a.prep.Groups, f.Group)
	}
	for _, j := range a.prep.Joiners {
		named.Add(j.Slot)
	}
	for _, g := range m.groups {
		if g.Failed == "" && !none(g.Slots.And(named)) && !slices.Contains(a.prep.Groups, g.ID) {
			a.prep.Groups = append(a.prep.Groups, g.ID)
		}
	}
	a.beat = m.t + m.cfg.BallotTimeout/2
	m.att = a
	for _, p := range m.view.Members {
		if m.isDead(p.ID) {
			continue
		}
		if _, ok := m.unanswered[p.Slot]; !ok {
			m.unanswered[p.Slot] = m.t
		}
		m.send(p.ID, a.prep)
	}
}

func (m *Machine) onPromise(from ID, x promise) {
	m.hearReports(x.Reports)
	for _, id := range x.Gone {
		m.hearDead(id)
	}
	a := m.att
	if a == nil || x.Ballot != a.ballot || a.asking {
		return
	}
	delete(m.unanswered, from.Slot)
	i, ok := slices.BinarySearchFunc(a.promises, from, func(v vote, id ID) int { return cmp.Compare(v.from.Slot, id.Slot) })
	if ok {
		a.promises[i].promise = x
	} else {
		a.promises = slices.Insert(a.promises, i, vote{from, x})
	}
	if a.best.Less(x.Accepted) {
		a.best, a.found = x.Accepted, x.Value
	}
}

// onNack yields to a higher ballot.
func (m *Machine) onNack(x nack) {
	m.maxNum = max(m.maxNum, x.Promised.Num)
	if m.att != nil && m.att.ballot == x.Ballot {
		m.att = nil
		m.resetTake()
	}
}

func (m *Machine) onAccepted(from ID, x accepted) {
	a := m.att
	if a == nil || !a.asking || x.Ballot != a.ballot {
		return
	}
	a.votes.Add(from.Slot)
	a.votes = a.votes.Or(m.proxied(from, x.Dead))
}

// proxied are the dead that a living process of their host votes for.
func (m *Machine) proxied(by ID, dead []ID) (s Set) {
	for _, id := range dead {
		if p := m.member(id); p != nil && p.Host == m.member(by).Host {
			s.Add(id.Slot)
		}
	}
	return s
}

// decide brings our ballot on, and returns true when it did something.
func (m *Machine) decide(drop []suspicion, fails []failing) bool {
	a := m.att
	if a.asking {
		if m.enough(a.votes, a.witness) {
			v := a.value
			m.publish(v)
			m.install(v)
			return true
		}
		m.askWitness(a)
		m.beat(a)
		return false
	}
	var own Set
	for _, v := range a.promises {
		own.Add(v.from.Slot)
	}
	if !m.enough(m.votes(a), a.witness) {
		m.askWitness(a)
		m.beat(a)
		return false
	}
	if a.best != (Ballot{}) && m.cfg.bug != bugIgnoreAccepted {
		m.propose(a.found) // it may be chosen already
		return true
	}
	if m.unnamed(a, drop, fails) {
		m.begin(drop, fails, nil)
		return true
	}
	if len(a.prep.Joiners) > 0 {
		switch {
		case len(drop) > 0 || len(fails) > 0 || m.t-a.from > m.cfg.HeartbeatLimit:
			m.begin(drop, fails, nil) // the growth is off
			return true
		case own != m.slots():
			m.beat(a)
			return false
		}
	}
	for _, s := range drop {
		if s.ID == m.self && s.Kind == kLink {
			m.stepBack(s, drop)
			return true
		}
	}
	undecided := m.linkAt != 0 && m.t-m.linkAt < m.cfg.HeartbeatLimit/4 && len(drop)+len(fails) == 0
	if undecided || m.worthWaiting(a, own) {
		m.beat(a)
		return false
	}
	v, missing := plan(m.view, a.promises, change{drop, fails, a.prep.Joiners, a.prep.At}, m.cfg.bug)
	if m.overdue(missing, drop) {
		drop, fails = m.judge()
		m.begin(drop, fails, nil)
		return true
	}
	if m.cfg.bug == bugNoWord {
		missing = Set{}
	}
	if !missing.Empty() {
		m.beat(a)
		return false
	}
	if len(v.Members) == 0 && len(m.view.Members) > 0 {
		v.Cuts = nil // everybody left
	}
	m.propose(v)
	return true
}

// enough says whether votes are a quorum, with the vote of the witness or without.
func (m *Machine) enough(votes Set, witness bool) bool {
	switch m.cfg.bug {
	case bugNoQuorum:
		return !votes.Empty()
	case bugHalf:
		return 2*votes.Len() >= len(m.view.Members)
	case bugWitnessLowest:
		if quorum(m.view, votes) {
			return true
		}
	case bugWitnessUnasked:
		witness = true
	}
	if m.cfg.Witness {
		return majority(m.view, votes) || witness && exactlyHalf(m.view, votes)
	}
	return quorum(m.view, votes)
}

// unnamed says that there is somebody to drop, or a group to cut, that our prepare did not name.
func (m *Machine) unnamed(a *attempt, drop []suspicion, fails []failing) bool {
	for _, s := range drop {
		if !slices.ContainsFunc(a.prep.Suspects, func(x suspicion) bool { return x.ID == s.ID }) {
			return true
		}
	}
	for _, f := range fails {
		if !slices.Contains(a.prep.Groups, f.Group) {
			return true
		}
	}
	return false
}

// overdue finds members of whom we have waited long enough for a word, and takes them for lost.
func (m *Machine) overdue(missing Set, drop []suspicion) (found bool) {
	for s := missing.Next(0); s >= 0; s = missing.Next(s + 1) {
		if !m.waited(s) || s == m.self.Slot || m.linkAt != 0 {
			continue
		}
		found = true
		m.slow = append(m.slow, suspicion{ID: m.at(s).ID, Kind: kSlow, Why: fmt.Sprintf(
			"rank %d gave no word for %v, and nobody of its host gave it in its place", s, m.cfg.HeartbeatLimit)})
	}
	return found
}

// worthWaiting says that one who lives may still tell us something: for a moment anybody; and for longer one that still
// hears a member that we do not hear, as the silence of one that is dead is not noticed by all at the same time.
func (m *Machine) worthWaiting(a *attempt, own Set) bool {
	for _, p := range m.view.Members {
		if !own.Has(p.Slot) && !m.isDead(p.ID) && !m.isSilent(p.ID) && m.t-a.from < m.cfg.BallotTimeout {
			return true
		}
	}
	for _, s := range a.prep.Suspects {
		if s.Kind == kSilent && !m.stood && m.t-a.from < m.cfg.HeartbeatLimit/4 && m.isSilent(s.ID) && m.heardBy(s.ID.Slot) {
			return true
		}
	}
	return false
}

// stepBack leaves the change to others: it drops us, and we cannot reach all of them.
func (m *Machine) stepBack(s suspicion, drop []suspicion) {
	m.att = nil
	m.standDown, m.stood = m.t+m.cfg.HeartbeatLimit, true
	m.unlinked = s.Why
	m.tell(m.coordinator(drop), true)
}

// propose asks for the value to be accepted.
func (m *Machine) propose(v Value) {
	a := m.att
	if m.cfg.bug == bugAnyAccept && a.best == (Ballot{}) {
		v.Why = fmt.Sprintf("ballot %v", a.ballot) // or the values of two ballots are often the same
	}
	a.asking, a.value, a.since = true, v, m.t
	a.witness = a.witness && m.cfg.bug == bugWitnessOnce
	a.beat = m.t + 5*m.cfg.BallotTimeout
	for _, p := range m.view.Members {
		if !m.isDead(p.ID) {
			m.send(p.ID, accept{m.head(), a.ballot, v})
		}
	}
}

// beat shows that we live, and repeats what was not answered.
func (m *Machine) beat(a *attempt) {
	if m.t < a.beat {
		return
	}
	a.beats++
	if a.asking && m.wantsWitness(a) && a.beats%10 != 0 {
		a.beat = m.t + m.cfg.BallotTimeout/2
		m.broadcast(patience{m.head(), a.ballot}) // the witness is slower than members are
		return
	}
	if a.asking {
		a.beat = m.t + 5*m.cfg.BallotTimeout
		for _, p := range m.view.Members {
			if !a.votes.Has(p.Slot) && !m.isDead(p.ID) {
				m.send(p.ID, accept{m.head(), a.ballot, a.value})
			}
		}
		return
	}
	a.beat = m.t + m.cfg.BallotTimeout/2
	for _, p := range m.view.Members {
		promised := slices.ContainsFunc(a.promises, func(v vote) bool { return v.from == p.ID })
		switch {
		case p.ID == m.self || m.isDead(p.ID):
		case promised || a.beats%10 != 0:
			m.send(p.ID, patience{m.head(), a.ballot}) // also to one whose answer does not reach us
		default:
			m.send(p.ID, a.prep)
		}
	}
}

// votes are those that our ballot has: promises, or acceptances.
func (m *Machine) votes(a *attempt) (votes Set) {
	if a.asking {
		return a.votes
	}
	for _, v := range a.promises {
		votes.Add(v.from.Slot)
		votes = votes.Or(m.proxied(v.from, v.Dead))
	}
	return votes
}

// lonely is how long no quorum may be out of reach: less than a link needs to be noticed, as those who have a quorum do
// not wait either, and more than the step after a pause adds to our time.
func (m *Machine) lonely() Time { return m.cfg.HeartbeatLimit * 3 / 8 }

// giveUp ends the machine when a quorum has been out of reach for too long.
func (m *Machine) giveUp() bool {
	can := reachable(m.view, m.self, m.isDead, m.isOut)
	if quorum(m.view, can) || m.cfg.Witness && exactlyHalf(m.view, can) {
		m.alone = 0
	} else if m.alone == 0 {
		m.alone = m.t
	}
	if m.alone != 0 && m.t-m.alone >= m.lonely() {
		m.noQuorum(can, m.advice(can))
		return true
	}
	a, w := m.att, &m.witness
	if a == nil {
		w.since = 0
		return false
	}
	votes := m.votes(a)
	if m.wantsWitness(a) {
		if w.since != 0 && m.t-w.since >= m.cfg.WitnessLimit {
			m.noQuorum(votes, m.unwitnessed())
			return true
		}
		m.starved = 0
		return false
	}
	if m.enough(votes, a.witness) {
		m.starved, w.since = 0, 0
	} else if m.starved == 0 {
		m.starved = m.t
	}
	// Nobody is silent, but they do not answer. They may be stopped, so we wait longer.
	if m.starved != 0 && m.t-m.starved >= 8*m.cfg.HeartbeatLimit && m.t-a.from >= m.cfg.HeartbeatLimit {
		m.noQuorum(votes, m.advice(votes))
		return true
	}
	return false
}

// noQuorum ends the machine, and says why: whom it does not reach, and what to do.
func (m *Machine) noQuorum(can Set, what string) {
	var gone []string
	for _, p := range m.view.Members {
		if !can.Has(p.Slot) {
			gone = append(gone, fmt.Sprint(p.Slot))
		}
	}
	m.unable(fmt.Sprintf("%d of the %d ranks of epoch %d cannot be reached (%s): %s",
		len(gone), len(m.view.Members), m.view.Epoch, strings.Join(gone, ", "), what))
}

// unable tells the others, who may be half of a quorum only with us, and ends the machine.
func (m *Machine) unable(why string) {
	if m.cfg.Witness && !m.leaving {
		m.broadcast(noQuorum{m.head(), clip(why)})
	}
	m.end(why)
}

// end ends the machine without a quorum.
func (m *Machine) end(why string) {
	m.over = true
	if m.leaving {
		m.emit(Left{})
		return
	}
	m.emit(NoQuorum{clip(why)})
}

// onNoQuorum ends this machine too, if there is no quorum without who sent this.
func (m *Machine) onNoQuorum(from ID, x noQuorum) {
	can := reachable(m.view, m.self, m.isDead, m.isOut)
	can.Del(from.Slot)
	if m.cfg.Witness && !majority(m.view, can) && !exactlyHalf(m.view, can) {
		m.end(x.Why)
	}
}

// due is the next time at which drive has something to do, in our time; 0: none.
func (m *Machine) due() (at Time) {
	by := func(t Time) {
		if t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	if m.workAt != 0 {
		by(m.again)
		if m.att != nil {
			by(m.att.beat)
		} else {
			by(max(m.takeAt, m.standDown))
		}
		if m.alone != 0 {
			by(m.alone + m.lonely())
		}
		by(m.witnessDue())
	}
	if m.linkAt != 0 && m.t < m.linkAt+m.cfg.HeartbeatLimit/4 {
		by(m.linkAt + m.cfg.HeartbeatLimit/4)
	}
	for _, id := range m.silent {
		if t := m.muteAt[id] + m.cfg.HeartbeatLimit; m.t < t && m.member(id) != nil {
			by(t)
		}
	}
	by(m.blame.due())
	by(m.growth.due(m))
	return at
}

package fault

import (
	"cmp"
	"fmt"
	"slices"
)

// growth is the machine's part in admitting newcomers: as a member, and as the coordinator.
type growth struct {
	entered  uint64
	hold     *hold
	joiners  []joiner
	replaced []suspicion // members whose slot a joiner asks for
	run      *run
	token    uint64
	next     Time // not before
	patience int  // how often we gave up because somebody was not ready
}

// joiner is a process that asked this coordinator.
type joiner struct {
	Member // Slot as asked
	asked  Time
}

// hold is what keeps this member's caller in its Boundary.
type hold struct {
	by    ID
	token uint64
	at    uint64 // 0: the next one
	heard Time
	quiet *Quiet
	ready bool
}

// run is a growth that this process coordinates.
type run struct {
	token   uint64
	joiners []Member // numbered
	counts  map[int]uint64
	at      uint64
	ready   Set
	stands  Time // since when the first one stands and waits for the rest
	heard   Time // when a joiner asked last
	beat    Time
}

func (g *growth) due(m *Machine) (at Time) {
	by := func(t Time) {
		if t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	if g.run != nil {
		by(g.run.beat)
	} else if len(g.joiners) > 0 && m.workAt == 0 {
		by(max(g.next, m.t+m.cfg.BallotTimeout))
	}
	if g.hold != nil && m.promised == (Ballot{}) {
		by(g.hold.heard + 2*m.cfg.HeartbeatLimit)
	}
	return at
}

// onJoin takes a joiner's request, or passes it on.
func (m *Machine) onJoin(p Member, epoch uint64) {
	for _, x := range m.view.Members {
		if x.Nonce == p.Nonce {
			for _, h := range m.hist {
				if !h.told && h.gained.Has(x.Slot) && findMember(h.value.Members, x.ID) != nil {
					m.welcome(x, h)
				}
			}
			return
		}
	}
	for _, h := range m.hist {
		if slices.Contains(h.gone, p.Nonce) {
			m.refuse(p, fmt.Sprintf("this process was a member until epoch %d (%s): it asks again with a new nonce", h.value.Epoch, h.value.Why))
			return
		}
	}
	if epoch < m.view.Epoch {
		m.emit(Send{Nonce: p.Nonce, Msg: Stale{m.view}})
		return
	}
	if epoch > m.view.Epoch {
		return // it asks again
	}
	drop, _ := m.judge()
	if c := m.coordinator(drop); c != m.self {
		m.send(c, joinFwd{m.head(), p})
		return
	}
	if p.Slot >= m.view.Capacity {
		m.refuse(p, fmt.Sprintf("slot %d does not exist: the capacity is %d slots", p.Slot, m.view.Capacity))
		return
	}
	i := slices.IndexFunc(m.growth.joiners, func(j joiner) bool { return j.Nonce == p.Nonce })
	if i < 0 {
		m.growth.joiners = append(m.growth.joiners, joiner{p, m.t})
		i = len(m.growth.joiners) - 1
	}
	m.growth.joiners[i].asked = m.t
	if r := m.growth.run; r != nil && slices.ContainsFunc(r.joiners, func(x Member) bool { return x.Nonce == p.Nonce }) {
		r.heard = m.t
	}
	if x := m.at(p.Slot); x != nil && !slices.ContainsFunc(m.growth.replaced, func(s suspicion) bool { return s.ID == x.ID }) {
		m.growth.replaced = append(m.growth.replaced, suspicion{ID: x.ID, Kind: kReplaced,
			Why: fmt.Sprintf("rank %d (incarnation %d) is replaced by a new process", x.Slot, x.Inc)})
	}
}

func (m *Machine) refuse(p Member, why string) {
	m.emit(Send{Nonce: p.Nonce, Msg: Refused{why}})
	m.growth.joiners = slices.DeleteFunc(m.growth.joiners, func(j joiner) bool { return j.Nonce == p.Nonce })
}

// driveGrowth starts, keeps alive and ends growths.
func (m *Machine) driveGrowth(c ID, work bool) {
	g := &m.growth
	if h := g.hold; h != nil && m.promised == (Ballot{}) && m.t-h.heard >= 2*m.cfg.HeartbeatLimit {
		m.note("the growth that rank %d started is silent: going on without it", h.by.Slot)
		g.hold = nil
		m.emit(Release{})
	}
	g.joiners = slices.DeleteFunc(g.joiners, func(j joiner) bool {
		return m.t-j.asked >= m.cfg.HeartbeatLimit ||
			slices.ContainsFunc(m.view.Members, func(p Member) bool { return p.Nonce == j.Nonce })
	})
	switch r := g.run; {
	case r != nil && (c != m.self || work && (m.att == nil || len(m.att.prep.Joiners) == 0)):
		m.endGrowth("the view changes meanwhile")
	case r != nil && m.att != nil:
		if m.t >= r.beat {
			r.beat = m.t + m.cfg.HeartbeatLimit/2
		}
	case r != nil:
		m.keepGrowing(r)
	case c == m.self && !work && m.att == nil && len(g.joiners) > 0 && m.t >= g.next:
		m.startGrowth()
	}
}

// startGrowth numbers the joiners and stops everybody at the next Boundary.
func (m *Machine) startGrowth() {
	g := &m.growth
	taken := m.slots()
	size := m.view.Size
	var in []Member
	for _, j := range slices.Clone(g.joiners) {
		p := j.Member
		if p.Slot < 0 {
			p.Slot = 0
			for p.Slot < m.view.Capacity && taken.Has(p.Slot) {
				p.Slot++
			}
			if p.Slot >= m.view.Capacity {
				m.refuse(j.Member, fmt.Sprintf("no slot is free: %d of %d slots (the capacity) have a member",
					taken.Len(), m.view.Capacity))
				continue
			}
		}
		if taken.Has(p.Slot) {
			continue // of another joiner: after it
		}
		taken.Add(p.Slot)
		size = max(size, p.Slot+1)
		p.Inc = 1
		if p.Slot < len(m.view.Incs) && m.cfg.bug != bugReuse {
			p.Inc = m.view.Incs[p.Slot] + 1
		}
		in = append(in, p)
	}
	if len(in) == 0 {
		return
	}
	slices.SortFunc(in, func(a, b Member) int { return cmp.Compare(a.Slot, b.Slot) })
	g.token++
	g.run = &run{token: g.token, joiners: in, counts: map[int]uint64{}, heard: m.t, beat: m.t + m.cfg.HeartbeatLimit/2}
	for _, p := range m.view.Members {
		m.send(p.ID, growAsk{m.head(), g.token})
	}
}

// keepGrowing repeats what was not answered, and gives up when the joiners are gone or somebody is not ready for too long.
func (m *Machine) keepGrowing(r *run) {
	limit := m.cfg.HeartbeatLimit << min(m.growth.patience, 5)
	switch {
	case m.t-r.heard >= m.cfg.HeartbeatLimit:
		m.endGrowth("the joiner asks no more")
		return
	case r.stands != 0 && m.t-r.stands >= limit:
		m.growth.patience++
		m.endGrowth(fmt.Sprintf("ranks %v did not come to boundary %d in %v", m.slots().Minus(r.ready).Slots(), r.at, limit))
		return
	}
	if m.t < r.beat {
		return
	}
	r.beat = m.t + m.cfg.HeartbeatLimit/4
	for _, p := range m.view.Members {
		if r.at == 0 {
			m.send(p.ID, growAsk{m.head(), r.token})
		} else {
			m.send(p.ID, growAt{m.head(), r.token, r.at})
		}
	}
}

func (m *Machine) endGrowth(why string) {
	r := m.growth.run
	m.growth.run = nil
	m.growth.next = m.t + m.cfg.HeartbeatLimit/4
	for _, p := range m.view.Members {
		m.send(p.ID, growOff{m.head(), r.token})
	}
	m.note("the growth is put off: %s", why)
}

func (m *Machine) onEntered(count uint64) {
	g := &m.growth
	g.entered = max(g.entered, count)
	if h := g.hold; h != nil {
		m.send(h.by, growCount{m.head(), h.token, g.entered})
	}
}

func (m *Machine) onGrowAsk(from ID, x growAsk) {
	g := &m.growth
	if m.promised != (Ballot{}) {
		return // an ordinary change is on
	}
	if h := g.hold; h == nil || h.by != from || h.token != x.Token {
		g.hold = &hold{by: from, token: x.Token}
		m.emit(Hold{0})
	}
	g.hold.heard = m.t
	m.send(from, growCount{m.head(), x.Token, g.entered})
}

func (m *Machine) onGrowCount(from ID, x growCount) {
	r := m.growth.run
	if r == nil || r.token != x.Token || m.att != nil {
		return
	}
	r.counts[from.Slot] = max(r.counts[from.Slot], x.Count)
	at := r.at
	if at == 0 && len(r.counts) == len(m.view.Members) {
		at = 1
		for _, n := range r.counts {
			at = max(at, n+1)
		}
	}
	if r.at != 0 && x.Count > r.at { // it was in that Boundary before it learned of the growth
		at = x.Count + 1
	}
	if at != r.at {
		r.at, r.ready, r.stands = at, Set{}, 0
		for _, p := range m.view.Members {
			m.send(p.ID, growAt{m.head(), r.token, at})
		}
	}
}

func (m *Machine) onGrowAt(from ID, x growAt) {
	g := &m.growth
	h := g.hold
	if h == nil || h.by != from || h.token != x.Token {
		if m.promised == (Ballot{}) {
			m.send(from, growNo{m.head(), x.Token})
		}
		return
	}
	h.heard = m.t
	if h.at != x.At {
		h.at, h.ready = x.At, false
		m.emit(Hold{x.At})
	}
	m.checkReady()
}

func (m *Machine) onQuiet(e Quiet) {
	if h := m.growth.hold; h != nil {
		h.quiet = &e
		h.ready = false
		m.checkReady()
	}
}

// checkReady tells the coordinator once we stand where it wants us.
func (m *Machine) checkReady() {
	if h := m.growth.hold; h.at != 0 && h.quiet != nil && h.quiet.Count == h.at {
		h.ready = true
		m.send(h.by, growReady{m.head(), h.token, h.at})
	}
}

// standsIn says whether this member stands quiet in the Boundary of a growth, as its prepare demands.
func (m *Machine) standsIn(by ID, token, at uint64) bool {
	h := m.growth.hold
	return h != nil && h.by == by && h.token == token && h.at == at && h.ready || m.cfg.bug == bugUnsure
}

// onGrowReady starts the ballot when all stand.
func (m *Machine) onGrowReady(from ID, x growReady) {
	r := m.growth.run
	if r == nil || r.token != x.Token || r.at != x.At || m.att != nil {
		return
	}
	if r.stands == 0 {
		r.stands = m.t
	}
	r.ready.Add(from.Slot)
	if r.ready != m.slots() && m.cfg.bug != bugUnsure || m.promised != (Ballot{}) {
		return
	}
	// Only those who still ask.
	in := slices.DeleteFunc(slices.Clone(r.joiners), func(p Member) bool {
		return !slices.ContainsFunc(m.growth.joiners, func(j joiner) bool { return j.Nonce == p.Nonce })
	})
	drop, fails := m.judge()
	if len(in) == 0 || len(drop) > 0 || len(fails) > 0 {
		return // drive ends it
	}
	m.begin(nil, nil, &prepare{Token: r.token, At: r.at, Joiners: in})
}

// onGrowNo gives the growth up: a member went on.
func (m *Machine) onGrowNo(from ID, x growNo) {
	r := m.growth.run
	if r == nil || r.token != x.Token {
		return
	}
	if m.att == nil {
		m.endGrowth(fmt.Sprintf("rank %d went on", from.Slot))
		return
	}
	if !m.att.asking && len(m.att.prep.Joiners) > 0 { // what we closed must be reopened: an ordinary change
		drop, fails := m.judge()
		m.begin(drop, fails, nil)
	}
}

func (m *Machine) onGrowOff(from ID, x growOff) {
	if h := m.growth.hold; h != nil && h.by == from && h.token == x.Token && m.promised == (Ballot{}) {
		m.growth.hold = nil
		m.emit(Release{})
	}
}

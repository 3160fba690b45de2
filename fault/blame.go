package fault

import (
	"fmt"
	"slices"
	"strings"
)

// The wait-for graph. A chase starts at an operation whose deadline is over here, and asks along: each rank that an
// operation misses is asked about that operation, and those whom it waits for itself are asked next. A rank that has not
// arrived and waits for nothing, or does not answer, is a sink: it is late, unless it is held in a Boundary. The answers
// are given at different times, so a ring is asked a second time: whoever waits for the same operation in both answers
// waited for it all the time between, and so all of the ring did at once.

// wait is an operation that somebody waits in.
type wait struct{ group, seq uint64 }

// question asks a rank about an operation.
type question struct {
	slot int
	wait
}

// answer is what it said.
type answer struct {
	question
	sent  Time
	known bool
	mute  bool // did not answer in time
	status
}

type chase struct {
	token   uint64
	root    wait
	missing Set
	asked   []answer
	ring    []answer // to be confirmed
}

type blame struct {
	token   uint64
	chases  []chase
	pending []waiting // questions that our host answers
	over    []wait    // operations whose deadline is over here
	idle    []idler   // who was found to wait for nothing
}

// idler is a rank that answered that it has not arrived and waits for nothing. Others may have held it up until a moment
// ago, so it is late only if it still says so when it is asked again.
type idler struct {
	question
	at Time
}

// stillIdle says that a rank said the same AskTimeout ago, or longer.
func (m *Machine) stillIdle(q question) bool {
	b := &m.blame
	if i := slices.IndexFunc(b.idle, func(x idler) bool { return x.question == q }); i >= 0 {
		return m.t-b.idle[i].at >= m.cfg.AskTimeout
	}
	if len(b.idle) >= 4*MaxSlots {
		b.idle = b.idle[1:]
	}
	b.idle = append(b.idle, idler{q, m.t})
	return false
}

// waiting is a question of another that our host was asked about.
type waiting struct {
	token uint64
	from  ID
	x     askStatus
}

func (b *blame) due() (at Time) {
	for _, c := range b.chases {
		for _, a := range c.asked {
			if !a.known && !a.mute && (at == 0 || a.sent < at) {
				at = a.sent
			}
		}
	}
	return at
}

func (m *Machine) onOverdue(e Overdue) {
	w := wait{e.Group, e.Seq}
	b := &m.blame
	if !slices.Contains(b.over, w) {
		b.over = append(b.over, w)
		if len(b.over) > 64 {
			b.over = b.over[1:]
		}
	}
	if slices.ContainsFunc(b.chases, func(c chase) bool { return c.root == w }) {
		return
	}
	b.token++
	c := chase{token: b.token, root: w, missing: e.Missing.And(m.slots())}
	c.missing.Del(m.self.Slot)
	for s := c.missing.Next(0); s >= 0; s = c.missing.Next(s + 1) {
		m.question(&c, question{s, w})
	}
	b.chases = append(b.chases, c)
}

// question asks a rank once.
func (m *Machine) question(c *chase, q question) {
	p := m.at(q.slot)
	if p == nil || slices.ContainsFunc(c.asked, func(a answer) bool { return a.question == q }) {
		return
	}
	c.asked = append(c.asked, answer{question: q, sent: m.t + m.cfg.AskTimeout})
	m.send(p.ID, askStatus{m.head(), c.token, q.group, q.seq})
}

func (m *Machine) onAskStatus(from ID, x askStatus) {
	b := &m.blame
	b.token++
	b.pending = append(b.pending, waiting{b.token, from, x})
	if len(b.pending) > 4*MaxSlots {
		b.pending = b.pending[1:]
	}
	m.emit(AskWaiting{b.token, x.Group})
}

func (m *Machine) onWaiting(e Waiting) {
	b := &m.blame
	i := slices.IndexFunc(b.pending, func(w waiting) bool { return w.token == e.Token })
	if i < 0 {
		return
	}
	w := b.pending[i]
	b.pending = slices.Delete(b.pending, i, i+1)
	m.send(w.from, status{head: m.head(), Token: w.x.Token, Group: w.x.Group, Seq: w.x.Seq, Arrived: e.Arrived,
		WaitGroup: e.Group, WaitSeq: e.Seq, Missing: e.Missing, Over: slices.Contains(b.over, wait{e.Group, e.Seq}), Held: e.Held})
}

func (m *Machine) onStatus(from ID, x status) {
	for i := range m.blame.chases {
		c := &m.blame.chases[i]
		if c.token != x.Token {
			continue
		}
		q := question{from.Slot, wait{x.Group, x.Seq}}
		j := slices.IndexFunc(c.asked, func(a answer) bool { return a.question == q && !a.known })
		if j < 0 {
			return
		}
		c.asked[j].known, c.asked[j].status = true, x
		if x.Arrived >= x.Seq || x.WaitGroup == 0 || c.ring != nil {
			return
		}
		miss := x.Missing.And(m.slots())
		for s := miss.Next(0); s >= 0; s = miss.Next(s + 1) {
			m.question(c, question{s, wait{x.WaitGroup, x.WaitSeq}})
		}
		return
	}
}

// driveBlame ends the chases in which every question is answered or has timed out.
func (m *Machine) driveBlame() {
	b := &m.blame
	for i := 0; i < len(b.chases); i++ {
		c := &b.chases[i]
		open := false
		for j := range c.asked {
			a := &c.asked[j]
			if !a.known && m.t >= a.sent && a.slot != m.self.Slot {
				a.mute = true
			}
			open = open || !a.known && !a.mute && m.t < a.sent
		}
		if open {
			continue
		}
		done := *c
		b.chases = slices.Delete(b.chases, i, i+1)
		i--
		m.verdict(done)
	}
}

// verdict draws the conclusion of a chase: sinks are late, a ring fails its groups, and otherwise somebody has arrived.
func (m *Machine) verdict(c chase) {
	if c.ring != nil {
		m.confirm(c)
		return
	}
	late, ring := judgeWaits(c.root, c.asked)
	late = slices.DeleteFunc(late, func(a answer) bool { return !a.mute && !m.stillIdle(a.question) })
	for _, a := range late {
		if p := m.at(a.slot); p != nil && !slices.ContainsFunc(m.late, func(s suspicion) bool { return s.ID == p.ID }) {
			how := "waits for nothing"
			if a.mute {
				how = fmt.Sprintf("does not answer for %v", m.cfg.AskTimeout)
			}
			m.late = append(m.late, suspicion{ID: p.ID, Kind: kLate, Group: a.group, Seq: a.seq, Why: fmt.Sprintf(
				"rank %d is late: the deadline of operation %d of group %d is over, rank %d has not arrived and %s",
				a.slot, a.seq, a.group, a.slot, how)})
		}
	}
	if len(late) > 0 || len(ring) == 0 {
		return
	}
	m.blame.token++
	again := chase{token: m.blame.token, root: c.root, ring: ring}
	for _, a := range ring {
		m.question(&again, a.question)
	}
	m.blame.chases = append(m.blame.chases, again)
}

// confirm fails the groups of a ring that still stands.
func (m *Machine) confirm(c chase) {
	for _, a := range c.ring {
		if !slices.ContainsFunc(c.asked, func(b answer) bool {
			return b.question == a.question && b.known && b.Arrived < b.seq && b.WaitGroup == a.WaitGroup && b.WaitSeq == a.WaitSeq
		}) {
			return
		}
	}
	why := ringText(c.ring)
	for _, a := range c.ring {
		m.fail(a.WaitGroup, why)
	}
}

// judgeWaits finds the sinks that may be blamed (the deadline of an operation that misses them is over), or a ring.
func judgeWaits(root wait, asked []answer) (late, ring []answer) {
	over := func(w wait) bool {
		return w == root || slices.ContainsFunc(asked, func(a answer) bool {
			return a.known && a.Over && wait{a.WaitGroup, a.WaitSeq} == w
		})
	}
	for _, a := range asked {
		sink := a.mute || a.known && a.Arrived < a.seq && a.WaitGroup == 0 && !a.Held
		if sink && over(a.wait) && !slices.ContainsFunc(late, func(x answer) bool { return x.slot == a.slot }) {
			late = append(late, a)
		}
	}
	if len(late) > 0 {
		return late, nil
	}
	return nil, findRing(asked)
}

// findRing looks for a ring of ranks, each waiting for an operation at which the next has not arrived. The answer of each
// is the one about the operation in which the one before it waits. A rank whose answers differ has moved: it is on none.
func findRing(asked []answer) []answer {
	state := map[int]wait{}
	moved := Set{}
	for _, a := range asked {
		w := wait{a.WaitGroup, a.WaitSeq}
		if old, ok := state[a.slot]; ok && old != w || !a.known || a.WaitGroup == 0 {
			moved.Add(a.slot)
		}
		state[a.slot] = w
	}
	byWait := map[wait][]int{} // the answers about an operation, in the order asked
	for i, a := range asked {
		byWait[a.wait] = append(byWait[a.wait], i)
	}
	var onPath, finished Set
	var path []answer
	var visit func(a answer) []answer
	visit = func(a answer) []answer {
		if moved.Has(a.slot) || a.Arrived >= a.seq || finished.Has(a.slot) {
			return nil
		}
		if onPath.Has(a.slot) {
			i := slices.IndexFunc(path, func(p answer) bool { return p.slot == a.slot })
			ring := slices.Clone(path[i:])
			ring[0] = a // asked about the operation of the last one on the ring
			return ring
		}
		onPath.Add(a.slot)
		path = append(path, a)
		for _, i := range byWait[state[a.slot]] {
			if a.Missing.Has(asked[i].slot) {
				if ring := visit(asked[i]); ring != nil {
					return ring
				}
			}
		}
		path = path[:len(path)-1]
		onPath.Del(a.slot)
		finished.Add(a.slot)
		return nil
	}
	for _, a := range asked {
		if ring := visit(a); ring != nil {
			return ring
		}
	}
	return nil
}

// ringText names a deadlock. It starts at its lowest rank, so that all who find it say the same.
func ringText(ring []answer) string {
	low := 0
	for i, a := range ring {
		if a.slot < ring[low].slot {
			low = i
		}
	}
	var s []string
	for i := range ring {
		a, b := ring[(low+i)%len(ring)], ring[(low+i+1)%len(ring)]
		s = append(s, fmt.Sprintf("rank %d waits in group %d op %d for rank %d", a.slot, a.WaitGroup, a.WaitSeq, b.slot))
	}
	return clip("deadlock: " + strings.Join(s, ", "))
}

package fault

import (
	"fmt"
	"slices"
	"time"
)

const (
	keepHistory = 64   // installs that a member which missed them can still be told
	keepHeld    = 1024 // messages of newer epochs that wait for the view
)

// installed is a past change of the view.
type installed struct {
	value  Value
	lost   Set
	gained Set
	gone   []Nonce
	attach []byte // growth: what this member attached
	told   bool   // it made the view in which this process began: others welcome those who came in with us
}

// Machine decides with its peers who is a member. It is not safe for concurrent use.
type Machine struct {
	cfg    Config
	self   ID
	me     Member
	view   View
	over   bool // evicted, left or without a quorum: nothing happens any more
	first  uint64
	hist   []installed
	waits  []Received    // of newer epochs
	asked  uint64        // the newest epoch that we asked others about
	caught map[ID]uint64 // up to which epoch a member was told, in this epoch

	groups []Group // in the order in which this process came to know them
	orphan []uint64

	// Time. t counts only what passed while this process ran: a step that comes much later than the Timer asked for
	// was late because we were stopped, and must not make others look dead.
	last  Time
	t     Time
	timer Time
	out   []Effect
	loop  []Msg // to this process itself

	// Evidence, of any epoch.
	proof    []ID // members of this host that the kernel says are dead
	rumour   []ID // dead by the proof of others
	silent   []ID
	muteAt   map[ID]Time // since when a silent one is; read by key only
	leaving  bool
	abort    string // why this rank asks to be dropped
	fails    []failing
	late     []suspicion // of this epoch
	slow     []suspicion // of this epoch
	told     []report    // of others, by slot; of this epoch
	mine     report      // as last sent
	sentTo   Set         // who has it
	again    Time        // when to send it again
	asks     []vouching  // whom we asked about a silent member
	vouched  []ID        // silent, and a process of their host says that they live
	unlinked string      // why this rank asks to be dropped: it does not hear somebody whom others hear
	linkAt   Time        // since when two live members are known not to reach each other; 0: none

	// The acceptor, of this epoch.
	promised Ballot
	accepted Ballot
	value    Value
	maxNum   uint32
	closed   []uint64    // groups closed by us
	closing  bool        // Closed is awaited
	states   []GroupDone // what it said
	joined   *prepare    // the growth that is promised

	namedSlots Set // of the prepare that is promised

	// The coordinator.
	att        *attempt
	tries      int
	takeAt     Time         // when a ballot of ours overtakes; 0: unset
	standDown  Time         // we are to be dropped: others coordinate until then
	stood      bool         // we stood down in this epoch
	workAt     Time         // since when this epoch has something to decide; 0: nothing
	alone      Time         // since when no quorum can be reached; 0: it can
	starved    Time         // since when our ballots have had no quorum of answers; 0: they had
	unanswered map[int]Time // since when a member owes us a promise

	witness witness
	blame   blame
	growth  growth
}

type vouching struct{ about, by ID }

// New makes a Machine in the given view, and returns its first effects.
func New(cfg Config, now Time) (*Machine, []Effect) {
	if cfg.HeartbeatLimit == 0 {
		cfg.HeartbeatLimit = time.Second
	}
	if cfg.BallotTimeout == 0 {
		cfg.BallotTimeout = 20 * time.Millisecond
	}
	if cfg.AskTimeout == 0 {
		cfg.AskTimeout = 200 * time.Millisecond
	}
	if cfg.WitnessLimit == 0 {
		cfg.WitnessLimit = cfg.HeartbeatLimit * 3 / 8
	}
	m := &Machine{
		cfg: cfg, self: cfg.Self, first: cfg.View.Epoch, last: now, t: 1,
		unanswered: map[int]Time{}, caught: map[ID]uint64{}, muteAt: map[ID]Time{},
	}
	m.view = cloneView(cfg.View)
	m.view.Incs = incsOf(m.view.Incs, m.view.Members)
	m.view.Size = max(m.view.Size, len(m.view.Incs))
	if cfg.Change.Epoch == cfg.View.Epoch && cfg.Change.Epoch > 0 {
		m.first--
		m.hist = append(m.hist, installed{value: cfg.Change, gained: cfg.Gained, told: true})
	}
	m.groups = slices.Clone(cfg.Groups)
	for i := range m.groups {
		m.groups[i].floor = m.groups[i].Cut
	}
	if m.group(1) == nil {
		m.groups = slices.Insert(m.groups, 0, Group{ID: 1, Version: m.view.Epoch})
	}
	for i := range m.groups {
		g := &m.groups[i]
		if g.ID == 1 {
			for s := range m.view.Capacity {
				g.Slots.Add(s)
			}
		}
		g.Active = g.Slots.And(m.slots())
	}
	for _, x := range m.view.Members {
		if x.ID == m.self {
			m.me = x
		}
	}
	if m.me.ID != m.self || m.self.Inc == 0 {
		m.over = true
		m.emit(Evicted{m.view.Epoch, fmt.Sprintf("rank %d (incarnation %d) is not in the view that it starts in",
			m.self.Slot, m.self.Inc)})
		return m, m.out
	}
	m.mine.From = m.self
	m.maxNum = ballotBase(m.view.Epoch)
	if m.view.Epoch > 1 {
		m.broadcast(hello{m.head()}) // whoever is ahead tells us
	}
	return m, m.finish()
}

// View returns the view that is installed. The caller does not change it.
func (m *Machine) View() View { return m.view }

// Group returns what is known of a group of this process.
func (m *Machine) Group(id uint64) (Group, bool) {
	if g := m.group(id); g != nil {
		return *g, true
	}
	return Group{}, false
}

// Step takes an event at a time that never goes back, and returns what the host has to do, in order. A Close is the last
// effect but for a Timer; its Closed is the next event.
func (m *Machine) Step(now Time, ev Event) []Effect {
	m.out = nil
	if m.over {
		return nil
	}
	if now > m.last {
		m.t += min(now-m.last, m.gap())
		m.last = now
	}
	switch e := ev.(type) {
	case Received:
		m.receive(e)
	case Died:
		m.onDied(e.ID)
	case Silent:
		m.onSilent(e.ID)
	case Heard:
		m.onHeard(e.ID)
	case Closed:
		m.onClosed(e)
	case Created:
		m.onCreated(e)
	case Dropped:
		m.groups = slices.DeleteFunc(m.groups, func(g Group) bool { return g.ID == e.Group && g.ID != 1 })
		m.fails = slices.DeleteFunc(m.fails, func(f failing) bool { return f.Group == e.Group })
		m.orphan = slices.DeleteFunc(m.orphan, func(g uint64) bool { return g == e.Group })
	case Overdue:
		m.onOverdue(e)
	case Waiting:
		m.onWaiting(e)
	case Abort:
		m.onAbort(e)
	case Leave:
		m.leaving = true
	case JoinAsk:
		m.onJoin(e.Member, e.Epoch)
	case Entered:
		m.onEntered(e.Count)
	case Quiet:
		m.onQuiet(e)
	case Witnessed:
		m.onWitnessed(e)
	case Tick:
		m.timer = 0
	}
	return m.finish()
}

// gap is the most that one step may add to our time.
func (m *Machine) gap() Time { return m.cfg.HeartbeatLimit / 4 }

// finish delivers what this process sent itself, does what is due, and asks for the next Tick.
func (m *Machine) finish() []Effect {
	for !m.over {
		if len(m.loop) > 0 {
			x := m.loop[0]
			m.loop = m.loop[1:]
			m.dispatch(m.self, x)
			continue
		}
		if !m.drive() && len(m.loop) == 0 {
			break
		}
	}
	if m.over {
		return m.out
	}
	// Close goes last.
	var rest, closes []Effect
	for _, e := range m.out {
		if c, ok := e.(Close); ok {
			closes = []Effect{c} // a later one names all groups of an earlier one
		} else {
			rest = append(rest, e)
		}
	}
	m.out = append(rest, closes...)
	at := Time(0)
	if due := m.due(); due != 0 {
		at = m.last + max(min(due-m.t, m.gap()), 1)
	}
	if at != m.timer {
		m.timer = at
		m.emit(Timer{at})
	}
	return m.out
}

func (m *Machine) emit(e Effect)           { m.out = append(m.out, e) }
func (m *Machine) note(f string, a ...any) { m.emit(Note{fmt.Sprintf(f, a...)}) }
func (m *Machine) head() head              { return head{m.view.Epoch} }

// send delivers to a member; what is for this process waits until the step has done the rest.
func (m *Machine) send(to ID, x Msg) {
	if to == m.self {
		m.loop = append(m.loop, x)
		return
	}
	m.emit(Send{To: to, Msg: x})
}

// broadcast sends to all other members that are not known to be dead.
func (m *Machine) broadcast(x Msg) {
	for _, p := range m.view.Members {
		if p.ID != m.self && !m.isDead(p.ID) {
			m.send(p.ID, x)
		}
	}
}

// member returns the member of the view with this identity, or nil.
func (m *Machine) member(id ID) *Member { return findMember(m.view.Members, id) }

// at returns the member that holds a slot, or nil.
func (m *Machine) at(slot int) *Member {
	for i := range m.view.Members {
		if m.view.Members[i].Slot == slot {
			return &m.view.Members[i]
		}
	}
	return nil
}

func (m *Machine) slots() Set { return slotsOf(m.view.Members) }

func (m *Machine) group(id uint64) *Group {
	for i := range m.groups {
		if m.groups[i].ID == id {
			return &m.groups[i]
		}
	}
	return nil
}

func (m *Machine) isDead(id ID) bool {
	return slices.Contains(m.proof, id) || slices.Contains(m.rumour, id)
}

func (m *Machine) isSilent(id ID) bool { return slices.Contains(m.silent, id) }

func findMember(ms []Member, id ID) *Member {
	for i := range ms {
		if ms[i].ID == id {
			return &ms[i]
		}
	}
	return nil
}

func slotsOf(ms []Member) (s Set) {
	for _, x := range ms {
		s.Add(x.Slot)
	}
	return s
}

func cloneView(v View) View {
	v.Members = slices.Clone(v.Members)
	v.Incs = slices.Clone(v.Incs)
	return v
}

// incsOf brings the table of the last incarnations up to date.
func incsOf(incs []uint32, ms []Member) []uint32 {
	incs = slices.Clone(incs)
	for _, x := range ms {
		for len(incs) <= x.Slot {
			incs = append(incs, 0)
		}
		incs[x.Slot] = max(incs[x.Slot], x.Inc)
	}
	return incs
}

// receive sorts a message by its epoch.
func (m *Machine) receive(r Received) {
	switch x := r.Msg.(type) {
	case Join:
		m.onJoin(x.Member, x.Epoch)
		return
	case Welcome, Refused, Stale:
		return // not for a member
	case commit:
		m.onCommit(r, x.Value)
		return
	}
	e := r.Msg.(interface{ epoch() uint64 }).epoch()
	if r.From.Inc == 0 { // a newcomer that our host knows only by its nonce
		for _, p := range m.view.Members {
			if p.Nonce == r.Nonce {
				r.From = p.ID
			}
		}
	}
	switch {
	case e < m.view.Epoch:
		_, asks := r.Msg.(hello)
		m.catchUp(r.From, e, asks)
	case e > m.view.Epoch:
		m.await(r, e)
	case m.member(r.From) != nil && r.From != m.self:
		m.dispatch(r.From, r.Msg)
	}
}

// await keeps a message of a newer epoch, and asks for the view.
func (m *Machine) await(r Received, e uint64) {
	if b, ok := r.Msg.(behind); ok {
		if b.At >= m.view.Epoch { // or it answers what we sent long ago
			m.evicted(b.Epoch, b.Why)
		}
		return
	}
	if len(m.waits) < keepHeld {
		m.waits = append(m.waits, r)
	}
	if m.member(r.From) != nil {
		m.send(r.From, hello{m.head()})
	} else { // one that came in with the view that we have missed
		m.emit(Send{Nonce: r.Nonce, Msg: hello{m.head()}})
		if e > m.asked {
			m.broadcast(hello{m.head()})
		}
	}
	m.asked = max(m.asked, e)
}

// catchUp tells an old member, or one that missed it, what was decided since epoch e.
func (m *Machine) catchUp(to ID, e uint64, again bool) {
	if to.Inc == 0 || to == m.self || e < m.first || !again && m.caught[to] == m.view.Epoch {
		return
	}
	m.caught[to] = m.view.Epoch
	if len(m.hist) == 0 || m.hist[0].value.Epoch > e+1 {
		m.send(to, behind{m.head(), e, fmt.Sprintf("rank %d is %d epochs behind, of which the others do not know any more",
			to.Slot, m.view.Epoch-e)})
		return
	}
	for _, h := range m.hist {
		if h.value.Epoch > e {
			m.send(to, commit{h.value})
			if findMember(h.value.Members, to) == nil {
				return // it is out, and hears no more
			}
		}
	}
}

// dispatch handles a message of this epoch.
func (m *Machine) dispatch(from ID, x Msg) {
	if e, ok := x.(interface{ epoch() uint64 }); ok && e.epoch() != m.view.Epoch {
		return // to ourselves, before a change
	}
	switch x := x.(type) {
	case hello, behind:
	case prepare:
		m.onPrepare(from, x)
	case promise:
		m.onPromise(from, x)
	case nack:
		m.onNack(x)
	case accept:
		m.onAccept(from, x)
	case accepted:
		m.onAccepted(from, x)
	case patience:
		if x.Ballot == m.promised {
			m.resetTake()
		}
	case suspect:
		m.hearReports(x.Reports)
	case ask:
		m.onAsk(from, x)
	case vouch:
		m.onVouch(from, x)
	case askStatus:
		m.onAskStatus(from, x)
	case status:
		m.onStatus(from, x)
	case joinFwd:
		m.onJoin(x.Member, x.Epoch)
	case growAsk:
		m.onGrowAsk(from, x)
	case growCount:
		m.onGrowCount(from, x)
	case growAt:
		m.onGrowAt(from, x)
	case growReady:
		m.onGrowReady(from, x)
	case growNo:
		m.onGrowNo(from, x)
	case growOff:
		m.onGrowOff(from, x)
	case noQuorum:
		m.onNoQuorum(from, x)
	}
}

func (m *Machine) evicted(epoch uint64, why string) {
	m.over = true
	if m.leaving {
		m.emit(Left{})
		return
	}
	m.emit(Evicted{epoch, why})
}

// bug is a rule that a test breaks, to see that its checks see it.
type bug uint8

const (
	bugNone           bug = iota
	bugNoQuorum           // commit without a quorum
	bugIgnoreAccepted     // propose without regard to what was accepted
	bugNoRecheck          // a proxy does not read the promises after it accepted
	bugNoProxyRead        // a proxy promises without reading what its host accepted
	bugCutFromDead        // what the dropped have done counts for the cut, what survivors have done does not
	bugNoWord             // a cut without word of every member
	bugNoClose            // the host does not close its words
	bugEarlyReopen        // a higher ballot reopens what a lower one closed
	bugAnyAccept          // accept below the promise
	bugUnsure             // a growth is promised by one that does not stand in the Boundary
	bugReuse              // an incarnation is numbered again
	bugHalf               // any half is a quorum
	bugWitnessBlind       // what the witness has accepted is not looked at
	bugWitnessAny         // a vote of the witness is overwritten by one of a lower ballot
	bugWitnessLater       // a vote of the witness in a later epoch is overwritten
	bugWitnessLowest      // the half with the lowest slot decides without the witness, the other one with it
	bugWitnessUnasked     // a half decides without asking the witness
	bugWitnessOnce        // the vote of the witness for a ballot's promise is taken for its acceptance
	bugWitnessStore       // the witness stores without comparing
	bugLast           = bugWitnessStore
)

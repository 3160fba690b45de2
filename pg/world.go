package pg

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/fault/agent"
	"github.com/serry-project/serry/internal/wire"
	"github.com/serry-project/serry/mesh"
)

// worldID is the id of the group of all ranks.
const worldID = 1

// keepPast is how many views are remembered for groups that are made late.
const keepPast = 64

// World is this process's membership: its embedded Group is that of all ranks. Make it with Join.
type World struct {
	*Group
	cfg      Config
	slot     int
	inc      uint32
	ground   Ground
	mesh     *mesh.Mesh // nil in a simulation
	agent    *agent.Agent
	arena    *collectives.Arena
	words    []byte
	canSpin  atomic.Bool // the ranks of this host fit on its cores
	log      *slog.Logger
	joined   Joined
	identity identity
	early    []heldFrame         // of groups that we do not have yet
	gone     forgotten           // guarded by mu
	without  map[uint64]struct{} // groups that the others have, and that will be failed for it; the loop's own

	mu      sync.Mutex
	groups  map[uint64]*Group
	order   []uint64          // as Groups has it
	born    map[uint64]uint64 // by group
	clock   uint64
	view    fault.View
	members map[fault.ID]Peer // also of earlier views
	past    []fault.Install   // the last of them, oldest first
	over    atomic.Pointer[error]
	isOver  chan struct{} // closed when it is
	left    chan struct{}

	entered atomic.Uint64 // Boundaries
	hold    boundaryHold

	events    events
	completed atomic.Bool       // an operation of a group with remote members, since the loop looked
	ackAt     time.Duration     // when to tell them; 0: nothing to tell
	standing  map[uint64]uint64 // of a newcomer until its first Boundary: its groups, and how far they were; the caller's own
	tidyAt    time.Duration     // when to look for what can be forgotten; 0: nothing is kept
	owes      atomic.Bool       // a link had no room to say that messages were received
	oweAt     time.Duration     // when to say it again; 0: nothing to say
}

// Joined says how this process came in.
type Joined struct {
	Replacement bool   // it took a slot in a running world (Attach and Boundary say where)
	Boundary    uint64 // the number of the Boundary at which it entered, and in which it stands (see World.Boundary)
	Attach      []byte // what a member attached for it there
	Epoch       uint64
}

// Joined says how this process came in.
func (w *World) Joined() Joined { return w.joined }

// Incarnation is how many processes have held this slot, this one included.
func (w *World) Incarnation() uint32 { return w.inc }

// Epoch is that of the last view.
func (w *World) Epoch() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.view.Epoch
}

// Capacity is how many ranks the world can ever have.
func (w *World) Capacity() int { return w.cfg.Capacity }

// Groups are this process's groups in the order of creation, the world first. A replacement finds those of its slot here,
// in the same order as the other members have them.
//
// The order is that of a logical clock: each rank that takes part in Sub tells the highest place that it knows of, and the
// new group gets the next one after all of these. So it is the order in which each member has made them; of groups that
// were made at once, by calls that had no order, the lower id comes first, on all members.
func (w *World) Groups() []*Group {
	w.mu.Lock()
	defer w.mu.Unlock()
	var gs []*Group
	for _, id := range w.order {
		if g := w.groups[id]; g != nil && !g.retired.Load() {
			gs = append(gs, g)
		}
	}
	return gs
}

// enlist takes a group in. The caller holds w.mu.
func (w *World) enlist(g *Group, born uint64) {
	maps.DeleteFunc(w.born, func(id, _ uint64) bool { return w.groups[id] == nil })
	w.groups[g.id], w.born[g.id] = g, born
	w.clock = max(w.clock, born)
	at, _ := slices.BinarySearchFunc(w.order, born, func(id, born uint64) int {
		return cmp.Or(cmp.Compare(w.born[id], born), cmp.Compare(id, g.id))
	})
	w.order = slices.Insert(w.order, at, g.id)
}

func (w *World) bornAt(group uint64) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.born[group]
}

// tick brings the clock of creation to at least a time, and reads it.
func (w *World) tick(least uint64) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clock = max(w.clock, least)
	return w.clock
}

// missed is how many views have come since an epoch if the first of them are forgotten, and else 0.
func (w *World) missed(since uint64) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.past) == 0 || since+1 >= w.past[0].View.Epoch {
		return 0
	}
	return w.view.Epoch - since
}

// Links describes each peer's link, and why it is that one.
func (w *World) Links() []mesh.PeerStatus { return w.mesh.Status() }

func (w *World) overErr() error {
	if p := w.over.Load(); p != nil {
		return *p
	}
	return nil
}

// end ends everything here for good, once.
func (w *World) end(err error) {
	if w.over.CompareAndSwap(nil, &err) {
		close(w.isOver)
		w.wakeAll()
	}
}

// all are the groups, also those that are closed here and not everywhere.
func (w *World) all() []*Group {
	w.mu.Lock()
	defer w.mu.Unlock()
	gs := make([]*Group, 0, len(w.groups))
	for _, id := range w.order { // a map's order would be another each time, which a simulation could not run again
		gs = append(gs, w.groups[id])
	}
	return gs
}

func (w *World) wakeAll() {
	for _, g := range w.all() {
		g.comm.Wake()
		g.p2p.wake()
	}
	w.hold.wake()
}

// guard turns a panic of one of our goroutines into the end of the world here.
func (w *World) guard() {
	if r := recover(); r != nil {
		w.end(fmt.Errorf("serry: BUG: %v", r))
		panic(r)
	}
}

func (w *World) why(epoch uint64) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.past {
		if w.past[i].View.Epoch == epoch {
			return w.past[i].Why
		}
	}
	return ""
}

func (w *World) group(id uint64) *Group {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.groups[id]
}

// member is how collectives reaches a member of a view.
func (w *World) member(rank int, id fault.ID) collectives.Member {
	m := collectives.Member{Rank: rank, Slot: id.Slot, Inc: id.Inc}
	if id.Slot == w.slot && id.Inc == w.inc {
		m.Arena = w.ground.Arena()
		return m
	}
	if p := w.members[id]; p != nil {
		m.Arena, m.Send = p.Arena(), p.Send
	} else {
		m.Send = func(*device.Frame) error { return fmt.Errorf("%w: slot %d", device.ErrLost, id.Slot) }
	}
	return m
}

// membersOf lists those of a group's slots that a view has. The caller holds w.mu.
func (w *World) membersOf(slots []int, v *fault.View) (ms []collectives.Member) {
	at := 0
	for _, m := range v.Members {
		for at < len(slots) && slots[at] < m.Slot {
			at++
		}
		if at < len(slots) && slots[at] == m.Slot {
			ms = append(ms, w.member(at, m.ID))
		}
	}
	return ms
}

func (w *World) learn(v *fault.View) {
	local := 0
	for _, m := range v.Members {
		if m.Host == w.ground.Host() {
			local++
		}
		if w.members[m.ID] == nil {
			if p := w.find(m.Nonce); p != nil {
				w.members[m.ID] = p
			}
		}
	}
	w.canSpin.Store(local <= w.ground.Cores())
}

// host is the World as the agent sees it; its methods run on the loop thread.
type worldHost struct{ *World }

// Close implements agent.Host.
func (h worldHost) Close(epoch uint64, groups []uint64) (ds []fault.GroupDone) {
	w := h.World
	for _, id := range groups {
		g := w.group(id)
		if g == nil {
			if _, ok := w.without[id]; ok {
				ds = append(ds, fault.GroupDone{Group: id, Done: []fault.Done{{Slot: w.slot}}})
			}
			continue
		}
		d := fault.GroupDone{Group: id, Issued: g.issued.Load()}
		var alive Set // ranks
		for _, m := range g.comm.Members(g.comm.Current()) {
			if p := w.peerOf(fault.ID{Slot: m.Slot, Inc: m.Inc}); p != nil && !p.Dead() {
				alive.Add(m.Rank)
			}
		}
		done := g.comm.CloseWord(epoch, alive.Has)
		for r := range g.slots {
			if s, ok := done[r]; ok {
				d.Done = append(d.Done, fault.Done{Slot: g.slots[r], Seq: s})
			}
		}
		ds = append(ds, d)
	}
	return ds
}

func (w *World) peerOf(id fault.ID) Peer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.members[id]
}

// Reopen implements agent.Host.
func (h worldHost) Reopen(installed uint64, groups []uint64) {
	for _, id := range groups {
		if g := h.group(id); g != nil {
			g.comm.Reopen(installed)
		}
	}
}

// Install implements agent.Host.
func (h worldHost) Install(in fault.Install) {
	w := h.World
	in.Why, in.Cuts = plain(in.Why), slices.Clone(in.Cuts)
	for i := range in.Cuts {
		in.Cuts[i].Fail = plain(in.Cuts[i].Fail)
	}
	w.mu.Lock()
	w.learn(&in.View)
	w.view = in.View
	if len(w.past) == keepPast {
		w.past = slices.Delete(w.past, 0, 1)
	}
	w.past = append(w.past, in)
	type step struct {
		g  *Group
		c  fault.Cut
		ms []collectives.Member
	}
	var steps []step
	for _, c := range in.Cuts {
		if g := w.groups[c.Group]; g != nil {
			steps = append(steps, step{g, c, w.membersOf(g.slots, &in.View)})
		}
	}
	for _, id := range w.order {
		g := w.groups[id]
		if c, ms := g.remaining(&in); ms != nil {
			steps = append(steps, step{g, c, ms})
		}
	}
	for _, m := range in.Lost {
		delete(w.members, m.ID)
	}
	w.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(w.without)) {
		if failsIn(&in, id) {
			delete(w.without, id)
			w.agent.Post(fault.Dropped{Group: id})
		}
	}
	for _, s := range steps {
		s.g.comm.Install(in.View.Epoch, s.c.Seq, s.ms, s.c.Fail)
		s.g.p2p.wake()
	}
	w.Group.size.Store(int64(in.View.Size))
	w.tidyAt = w.ground.Now() + 100*time.Millisecond
	e := Event{Epoch: in.View.Epoch, Why: in.Why, At: time.Now()}
	for _, m := range in.View.Members {
		e.Active.Add(m.Slot)
	}
	for _, m := range in.Lost {
		e.Lost = append(e.Lost, m.Slot)
	}
	for _, m := range in.Joined {
		e.Joined = append(e.Joined, m.Slot)
	}
	if len(in.Joined) > 0 {
		w.hold.install(in.At, e.Joined)
	}
	w.log.Info("new view", "epoch", in.View.Epoch, "lost", e.Lost, "joined", e.Joined, "why", in.Why)
	w.events.put(e)
}

// Waiting implements agent.Host.
func (h worldHost) Waiting(group uint64) (out fault.Waiting) {
	w := h.World
	out.Held = w.hold.standing.Load() > 0
	if g := w.group(group); g != nil {
		out.Arrived = g.comm.Arrived()
	}
	for _, g := range w.Groups() {
		seq := g.waiting.seq.Load()
		if seq == 0 {
			continue
		}
		missing := g.comm.Missing(g.waiting.epoch.Load(), seq, uint8(g.waiting.phase.Load()))
		if out.Group == 0 || g.id == group {
			out.Group, out.Seq, out.Missing = g.id, seq, missing
		}
	}
	if out.Group != 0 {
		return out
	}
	for _, g := range w.Groups() {
		if x, ok := g.p2p.waiting(); ok { // in Send or Recv
			out.Group, out.Seq = g.id, x.seq
			out.Missing.Add(g.slots[x.rank])
			return out
		}
	}
	return out
}

// remaining is what a view that lost members changes in a group that is failed for good, of which the machine says nothing
// more: they need nothing of it any more. No members: nothing changes.
func (g *Group) remaining(in *fault.Install) (c fault.Cut, ms []collectives.Member) {
	v := g.comm.Current()
	if v.Fail == "" || cuts(in, g.id) {
		return c, nil
	}
	all := g.comm.Members(v)
	ms = slices.DeleteFunc(slices.Clone(all), func(m collectives.Member) bool {
		return slices.ContainsFunc(in.Lost, func(l fault.Member) bool { return l.Slot == m.Slot && l.Inc == m.Inc })
	})
	if len(ms) == len(all) {
		return c, nil
	}
	return fault.Cut{Group: g.id, Seq: v.From, Fail: v.Fail}, ms
}

func cuts(in *fault.Install, group uint64) bool {
	return slices.ContainsFunc(in.Cuts, func(c fault.Cut) bool { return c.Group == group })
}

// Over implements agent.Host.
func (h worldHost) Over(err error) {
	o := err.(*agent.Over)
	kind := ErrEvicted
	if o.NoQuorum {
		kind = ErrNoQuorum
	}
	h.log.Warn("this process is out", "epoch", o.Epoch, "why", o.Why)
	h.end(fmt.Errorf("%w (slot %d, epoch %d): %s", kind, h.slot, o.Epoch, o.Why))
	h.events.put(Event{Epoch: o.Epoch, Why: o.Error(), Over: true, At: time.Now()})
}

// Left implements agent.Host.
func (h worldHost) Left() {
	select {
	case <-h.left:
	default:
		close(h.left)
	}
	h.end(fmt.Errorf("%w: this process has left", ErrClosed))
}

// Data implements agent.Host.
func (h worldHost) Data(from fault.ID, f *device.Frame) {
	g := h.group(f.Group)
	if g == nil {
		h.World.held(from, f)
		return
	}
	g.frame(from, f)
}

func (g *Group) frame(from fault.ID, f *device.Frame) {
	for r, s := range g.slots {
		if s != from.Slot {
			continue
		}
		f.Inc = from.Inc // what the handshake proved, not what the header says
		if f.Kind == wire.KindP2P {
			g.p2pFrame(r, f)
		} else {
			g.comm.Frame(r, f)
		}
		return
	}
}

// Package agent runs the machine of package fault: it turns what the mesh sees into events, and carries the effects out.
// Everything happens on the mesh's loop thread; other threads post.
package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
	"github.com/serry-project/serry/mesh"
)

// Host is who owns the groups (pg). All methods are called on the loop thread and must not block.
type Host interface {
	// Close stops decisions in these groups until the view of epoch is installed and says how far they are.
	Close(epoch uint64, groups []uint64) []fault.GroupDone
	// Reopen takes a Close back.
	Reopen(installed uint64, groups []uint64)
	// Install is the next view.
	Install(in fault.Install)
	// Waiting says what the caller of this process waits for, and how far it has arrived in group.
	Waiting(group uint64) fault.Waiting
	// Entered is the number of the last Boundary that the caller has entered.
	Entered() uint64
	// Hold and Release: see fault.
	Hold(count uint64)
	Release()
	// Over ends everything: err is an *Over.
	Over(err error)
	// Left says that our Leave is done.
	Left()
	// Data is a frame of kind >= wire.KindData from a member.
	Data(from fault.ID, f *device.Frame)
	// Idle runs after each batch; it returns when it wants to run again (0: when something happens).
	Idle(now time.Duration) time.Duration
}

// Over is the end of this process's membership.
type Over struct {
	NoQuorum bool // else: evicted
	Epoch    uint64
	Why      string
}

func (o *Over) Error() string {
	if o.NoQuorum {
		return "serry: no quorum: " + o.Why
	}
	return fmt.Sprintf("serry: evicted in epoch %d: %s", o.Epoch, o.Why)
}

// Mesh is what the agent needs of its process: the clock of all times here, a wish that the loop calls Tick soon, and the
// own board. *mesh.Mesh is one; a simulation has its own.
type Mesh interface {
	Now() time.Duration
	Post()
	Board() []byte
}

// Peer is another process, in one incarnation: what *mesh.Peer says of it.
type Peer interface {
	Nonce() mesh.Nonce
	Name() string
	Send(*device.Frame) error
	Board() []byte // nil: not of this host
	Forget()
}

// Stepper is a Mesh that wants to run others between two accesses to boards: a simulation.
type Stepper interface{ Step() }

// Agent serves the machine of a process. Make it with New, give its Handler to mesh.Start, then Start it.
type Agent struct {
	m    Mesh
	host Host
	log  *slog.Logger

	mu     sync.Mutex
	posted []func() // run on the loop

	// The loop's own.
	machine *fault.Machine
	peers   map[mesh.Nonce]Peer
	ids     map[mesh.Nonce]fault.ID
	byID    map[fault.ID]mesh.Nonce
	early   []early // frames that came before the machine was there
	keep    int     // most bytes that are kept of one process, in early or strange
	kept    map[mesh.Nonce]int
	timer   time.Duration
	onJoin  func(mesh.Nonce, fault.Msg) // a joiner's answers
	over    bool
	died    map[mesh.Nonce]bool
	silent  map[mesh.Nonce]bool
	board   *board
	next    []func() fault.Event // answers that the machine waits for
	running bool
	strange map[mesh.Nonce][]device.Frame // data of linked processes that our view does not have yet
	parts   map[mesh.Nonce][]byte         // of a control message that comes in several frames
	gone    []gone
}

// gone is a process that died before a view had it; one that comes later may have it still.
type gone struct {
	p  Peer
	at time.Duration
}

const (
	maxKept    = 1 << 30         // bytes of one process that is no member yet, or of before this one is: see keepFrame
	frameCost  = 256             // of a frame that is kept, besides its payload
	maxControl = 32 << 20        // bytes of one control message
	keepGone   = 5 * time.Second // memory of one that no view has had
)

type early struct {
	p Peer
	f device.Frame
}

// New makes an agent.
func New(m Mesh, host Host, log *slog.Logger) *Agent {
	return &Agent{
		m: m, host: host, log: log,
		peers: map[mesh.Nonce]Peer{}, ids: map[mesh.Nonce]fault.ID{}, byID: map[fault.ID]mesh.Nonce{},
		died: map[mesh.Nonce]bool{}, silent: map[mesh.Nonce]bool{},
		strange: map[mesh.Nonce][]device.Frame{}, parts: map[mesh.Nonce][]byte{},
		keep: maxKept, kept: map[mesh.Nonce]int{},
	}
}

// Do runs f on the loop thread soon.
func (a *Agent) Do(f func()) {
	a.mu.Lock()
	a.posted = append(a.posted, f)
	a.mu.Unlock()
	a.m.Post()
}

// Post gives the machine an event.
func (a *Agent) Post(ev fault.Event) { a.Do(func() { a.step(ev) }) }

// Start makes the machine, on the loop thread: ready is called there before the first event, with the machine in place.
func (a *Agent) Start(cfg fault.Config, ready func()) {
	a.Do(func() {
		a.learn(cfg.View)
		a.board = newBoard(a.m, cfg.Self, func(id fault.ID) []byte {
			if p := a.peers[a.byID[id]]; p != nil {
				return p.Board()
			}
			return nil
		})
		cfg.Board = a.board
		if s, ok := a.m.(Stepper); ok {
			cfg.Board = stepped{a.board, s}
		}
		m, effs := fault.New(cfg, a.m.Now())
		a.machine = m
		ready()
		if a.over {
			return // too much came before: see keepFrame
		}
		a.run(effs)
		for _, m := range cfg.View.Members {
			if a.died[m.Nonce] {
				a.step(fault.Died{ID: m.ID})
			}
		}
		for _, m := range cfg.View.Members {
			if a.silent[m.Nonce] {
				a.step(fault.Silent{ID: m.ID})
			}
		}
		es := a.early
		a.early = nil
		clear(a.kept)
		for i := range es {
			a.Frame(es[i].p, &es[i].f)
		}
	})
}

// Asking makes answers to a joiner go to f, with whom they come from, until Start.
func (a *Agent) Asking(f func(mesh.Nonce, fault.Msg)) { a.Do(func() { a.onJoin = f }) }

// Step gives the machine an event at once. On the loop thread only (inside Do).
func (a *Agent) Step(ev fault.Event) { a.step(ev) }

func (a *Agent) learn(v fault.View) {
	for _, m := range v.Members {
		a.ids[m.Nonce] = m.ID
		a.byID[m.ID] = m.Nonce
	}
}

// Frame is mesh.Handler's, like Died, Silent, Heard, Linked, Tick and Refused.
func (a *Agent) Frame(p Peer, f *device.Frame) {
	if f.Kind == wire.KindControl && f.Total != 0 {
		if f = a.join(p, f); f == nil {
			return
		}
	}
	if f.Kind == wire.KindControl && a.machine == nil && a.onJoin != nil {
		if msg, err := fault.ParseMsg(f.Payload); err == nil {
			switch msg.(type) {
			case fault.Welcome, fault.Refused, fault.Stale:
				a.onJoin(p.Nonce(), msg)
				return
			}
		}
	}
	if a.over {
		return
	}
	if a.machine == nil {
		if g, ok := a.keepFrame(p, f); ok {
			a.early = append(a.early, early{p, g})
		} else {
			a.early = nil
			a.effect(fault.Evicted{Why: fmt.Sprintf("%s sent more than the %d MiB that are kept until this process has begun", p.Name(), a.keep>>20)})
		}
		return
	}
	id, known := a.ids[p.Nonce()]
	if f.Kind >= wire.KindData {
		if known {
			a.host.Data(id, f)
		} else if n := p.Nonce(); a.peers[n] == p && !a.died[n] {
			// A newcomer's that others have admitted, of which we hear in a moment.
			if g, ok := a.keepFrame(p, f); ok {
				a.strange[n] = append(a.strange[n], g)
			} else {
				a.log.Warn("a process that no view has sent more than is kept of it: it is dropped", "peer", p.Name(), "MiB", a.keep>>20)
				a.forget(n)
				a.silent[n] = true // a view that has it has one that we cannot hear
			}
		}
		return
	}
	if f.Kind != wire.KindControl {
		return
	}
	msg, err := fault.ParseMsg(f.Payload)
	if err != nil {
		a.log.Warn("a message cannot be read", "peer", p.Name(), "err", err)
		return
	}
	a.step(fault.Entered{Count: a.host.Entered()})
	if known {
		a.step(fault.Received{From: id, Nonce: p.Nonce(), Msg: msg})
	} else {
		a.step(fault.Received{Nonce: p.Nonce(), Msg: msg})
	}
}

// keepFrame copies a frame for later, and says whether there is room for it. A frame that is dropped never comes again, so
// who has none must end the link, or itself. What honest processes send before they are known are the contributions to the
// first operations and at most a window of messages. Contributions to other hosts may be of any size, and come as fast as
// the link takes them; the moment is short, so what comes in it is bounded by the link's speed, not by the group's depth.
func (a *Agent) keepFrame(p Peer, f *device.Frame) (g device.Frame, ok bool) {
	n := p.Nonce()
	if a.kept[n] += len(f.Payload) + frameCost; a.kept[n] > a.keep {
		return g, false
	}
	g = *f
	g.Payload = append([]byte(nil), f.Payload...)
	return g, true
}

// join puts a control message of several frames together; nil: it is not whole yet.
func (a *Agent) join(p Peer, f *device.Frame) *device.Frame {
	b := a.parts[p.Nonce()]
	if f.Offset == 0 {
		b = nil
	}
	if f.Total > maxControl || f.Offset != uint64(len(b)) || f.Offset+uint64(len(f.Payload)) > f.Total {
		a.log.Warn("a part of a message does not fit", "peer", p.Name(), "offset", f.Offset, "bytes", len(f.Payload), "of", f.Total, "have", len(b))
		delete(a.parts, p.Nonce())
		return nil
	}
	if b = append(b, f.Payload...); uint64(len(b)) < f.Total {
		a.parts[p.Nonce()] = b
		return nil
	}
	delete(a.parts, p.Nonce())
	g := *f
	g.Payload, g.Offset, g.Total = b, 0, 0
	return &g
}

// forget drops all that is kept of a process.
func (a *Agent) forget(n mesh.Nonce) {
	if p := a.peers[n]; p != nil {
		p.Forget() // and its memory
	}
	delete(a.peers, n)
	delete(a.died, n)
	delete(a.silent, n)
	delete(a.strange, n)
	delete(a.kept, n)
	delete(a.parts, n)
}

// Died: see Frame.
func (a *Agent) Died(p Peer) {
	a.died[p.Nonce()] = true
	id, ok := a.ids[p.Nonce()]
	if !ok {
		a.gone = append(a.gone, gone{p, a.m.Now()})
	} else if a.machine != nil {
		a.log.Info("the kernel says that a member of this host is dead", "slot", id.Slot, "inc", id.Inc)
		a.step(fault.Died{ID: id})
	}
}

// Silent: see Frame.
func (a *Agent) Silent(p Peer) {
	a.silent[p.Nonce()] = true
	if id, ok := a.ids[p.Nonce()]; ok && a.machine != nil {
		a.log.Info("a member of another host is silent", "slot", id.Slot, "inc", id.Inc)
		a.step(fault.Silent{ID: id})
	}
}

// Heard: see Frame.
func (a *Agent) Heard(p Peer) {
	delete(a.silent, p.Nonce())
	if id, ok := a.ids[p.Nonce()]; ok && a.machine != nil {
		a.step(fault.Heard{ID: id})
	}
}

// Refused: see Frame. A member that lives and does not know us any more has installed a view without us; what
// it sent to tell us was lost with the connection, because we did not read for so long.
func (a *Agent) Refused(p Peer, why error) {
	if a.machine == nil && a.onJoin != nil { // it was let in and dropped again, before it heard of either
		a.onJoin(p.Nonce(), fault.Refused{Reason: fmt.Sprintf("%v; it was a member, and dropped before it could begin: start it again", why)})
		return
	}
	id, ok := a.ids[p.Nonce()]
	if !ok || a.machine == nil || a.over {
		return
	}
	v := a.machine.View()
	if slices.ContainsFunc(v.Members, func(m fault.Member) bool { return m.ID == id }) {
		a.effect(fault.Evicted{Epoch: v.Epoch, Why: fmt.Sprintf("rank %d has dropped this process: %v", id.Slot, why)})
	}
}

// Linked: see Frame.
func (a *Agent) Linked(p Peer) { a.peers[p.Nonce()] = p }

// Tick: see Frame.
func (a *Agent) Tick(now time.Duration) time.Duration {
	for {
		a.mu.Lock()
		fs := a.posted
		a.posted = nil
		a.mu.Unlock()
		if len(fs) == 0 {
			break
		}
		for _, f := range fs {
			f()
		}
	}
	if a.machine != nil && a.timer != 0 && now >= a.timer {
		a.timer = 0
		a.step(fault.Tick{})
	}
	next := a.host.Idle(now)
	for a.machine != nil && len(a.gone) > 0 && now-a.gone[0].at >= keepGone {
		if n := a.gone[0].p.Nonce(); a.ids[n] == (fault.ID{}) {
			a.forget(n)
		}
		a.gone = a.gone[1:]
	}
	if a.machine != nil && len(a.gone) > 0 && (next == 0 || a.gone[0].at+keepGone < next) {
		next = a.gone[0].at + keepGone
	}
	if a.timer != 0 && (next == 0 || a.timer < next) {
		next = a.timer
	}
	return next
}

// step gives the machine an event and carries out what it asks for. An answer that it wants is the next event, after all
// effects of this one, in their order.
func (a *Agent) step(ev fault.Event) {
	if a.machine == nil || a.over {
		return
	}
	a.run(a.machine.Step(a.m.Now(), ev))
}

func (a *Agent) run(effs []fault.Effect) {
	for _, e := range effs {
		a.effect(e)
	}
	if a.running {
		return
	}
	a.running = true
	for len(a.next) > 0 && !a.over {
		f := a.next[0]
		a.next = a.next[1:]
		a.run(a.machine.Step(a.m.Now(), f()))
	}
	a.next, a.running = nil, false
}

func (a *Agent) effect(e fault.Effect) {
	switch e := e.(type) {
	case fault.Send:
		a.send(e)
	case fault.Close: // before any other answer: nothing may be decided in between
		faultpoint.Hit(faultpoint.AgentPromise)
		a.next = slices.Insert(a.next, 0, func() fault.Event {
			return fault.Closed{Ballot: e.Ballot, Groups: a.host.Close(a.machine.View().Epoch+1, e.Groups)}
		})
	case fault.Reopen:
		a.host.Reopen(a.machine.View().Epoch, e.Groups)
	case fault.Install:
		faultpoint.Hit(faultpoint.AgentCommit)
		a.learn(e.View)
		a.host.Install(e)
		for _, m := range e.Lost {
			a.forget(m.Nonce)
			delete(a.ids, m.Nonce)
			delete(a.byID, m.ID)
		}
		for _, m := range e.Joined {
			fs := a.strange[m.Nonce]
			delete(a.strange, m.Nonce)
			delete(a.kept, m.Nonce)
			for i := range fs {
				a.host.Data(m.ID, &fs[i])
			}
		}
		for _, m := range e.Joined { // it may have ended before it was a member
			if a.died[m.Nonce] {
				a.next = append(a.next, func() fault.Event { return fault.Died{ID: m.ID} })
			} else if a.silent[m.Nonce] {
				a.next = append(a.next, func() fault.Event { return fault.Silent{ID: m.ID} })
			}
		}
	case fault.Timer:
		a.timer = e.At
	case fault.AskWaiting:
		a.next = append(a.next, func() fault.Event {
			w := a.host.Waiting(e.Group)
			w.Token = e.Token
			return w
		})
	case fault.Hold:
		a.host.Hold(e.Count)
		a.next = append(a.next, func() fault.Event { return fault.Entered{Count: a.host.Entered()} })
	case fault.Release:
		a.host.Release()
	case fault.Evicted:
		a.over = true
		a.host.Over(&Over{Epoch: e.Epoch, Why: e.Why})
	case fault.NoQuorum:
		a.over = true
		a.host.Over(&Over{NoQuorum: true, Epoch: a.machine.View().Epoch, Why: e.Why})
	case fault.Left:
		a.over = true
		a.host.Left()
	case fault.Note:
		a.log.Debug(e.Text)
	}
}

func (a *Agent) send(e fault.Send) {
	n := mesh.Nonce(e.Nonce)
	if e.To.Inc != 0 {
		n = a.byID[e.To]
	}
	p := a.peers[n]
	if p == nil {
		return
	}
	if faultpoint.Enabled {
		switch fmt.Sprintf("%T", e.Msg) {
		case "fault.prepare":
			faultpoint.Hit(faultpoint.AgentPrepare)
		case "fault.accept":
			faultpoint.Hit(faultpoint.AgentAccept)
		}
	}
	b := fault.AppendMsg(nil, e.Msg)
	if len(b) > maxControl {
		a.log.Error("a message is too large to be sent", "peer", p.Name(), "bytes", len(b), "most", maxControl)
		return
	}
	for off := 0; off == 0 || off < len(b); off += wire.MaxPayload {
		var f device.Frame
		f.Kind, f.To, f.ToInc = wire.KindControl, uint16(max(e.To.Slot, 0)), e.To.Inc
		f.Payload = b[off:min(len(b), off+wire.MaxPayload)]
		if len(b) > wire.MaxPayload {
			f.Offset, f.Total = uint64(off), uint64(len(b))
		}
		f.Length = uint32(len(f.Payload))
		if err := p.Send(&f); err != nil && !errors.Is(err, device.ErrLost) && !errors.Is(err, device.ErrClosed) {
			a.log.Error("a message cannot be sent", "peer", p.Name(), "bytes", len(b), "err", err)
		} // what a lost link costs is evidence, which the mesh reports
	}
}

// SendTo sends a message to a peer that is not a member, or to a member as a joiner.
func (a *Agent) SendTo(n mesh.Nonce, msg fault.Msg) {
	a.Do(func() { a.send(fault.Send{Nonce: n, Msg: msg}) })
}

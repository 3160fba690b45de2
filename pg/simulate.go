package pg

import (
	"context"
	"fmt"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/fault/agent"
)

// Seat is a process of a simulated world: the World whose callers the simulation runs, and the agent whose loop it is.
// Everything above the Ground is what production runs; only how processes find each other (Join) is not.
type Seat struct {
	World   *World
	Agent   *agent.Agent
	answers *answers // of all that it has asked
}

// Simulate makes a process that stands on ground, and is no member yet. words are the shared words of its host, world
// names the world, and cfg.Rank is the slot (or -1).
func Simulate(cfg Config, ground Ground, words []byte, world [16]byte) (*Seat, error) {
	cfg.Size = max(cfg.Size, 1)
	_ = cfg.fill() // who sits here needs no rendezvous
	w := newWorld(cfg)
	w.ground, w.words, w.identity.world = ground, words, world
	w.identity.capacity = cfg.Capacity
	var err error
	if w.arena, err = collectives.NewArena(ground.Arena(), ground.Reserve, w.cfg.shape()); err != nil {
		return nil, err
	}
	w.arena.Memory = ground.Memory()
	w.agent = agent.New(ground, worldHost{w}, w.log)
	return &Seat{World: w, Agent: w.agent}, nil
}

// Found makes the process a founder: a member of the first view, with all others linked.
func (s *Seat) Found(ctx context.Context, view fault.View) error {
	s.World.inc = 1
	return s.World.begin(ctx, view, []fault.Group{worldGroup(view)}, nil, fault.Welcome{})
}

// Join asks a member, which this process is linked to, until it is let in. It returns without an error only then.
func (s *Seat) Join(ctx context.Context, by Peer, me fault.Member) error {
	w := s.World
	if s.answers == nil {
		s.answers = w.asking()
	}
	answers := s.answers
	m, err := w.ask(ctx, by, me, answers)
	if err != nil {
		return err
	}
	w.slot, w.inc = m.Self.Slot, m.Self.Inc
	if err := w.ground.Link(ctx, m.View.Members); err != nil {
		return fmt.Errorf("linking to the members of epoch %d: %w", m.View.Epoch, err)
	}
	return w.become(ctx, m, me, answers)
}

// Serve does what the progress goroutine of each group does in one turn, and says whether something moved.
func (s *Seat) Serve() (moved bool) {
	for _, g := range s.World.all() {
		if len(g.queue) == 0 || !g.take() {
			continue
		}
		moved = g.serve() || moved
		g.release()
	}
	return moved
}

// Locked says that a lock of this process is held, by one who was stopped between two accesses to shared memory: nobody
// else of the process can run then.
func (s *Seat) Locked() bool {
	w := s.World
	if !w.mu.TryLock() {
		return true
	}
	gs := make([]*Group, 0, len(w.order))
	for _, id := range w.order {
		gs = append(gs, w.groups[id])
	}
	w.mu.Unlock()
	for _, g := range gs {
		if g.comm.Locked() {
			return true
		}
	}
	return w.arena.Locked()
}

// Where says what the caller waits for, and in which versions its groups are: for a trace.
func (s *Seat) Where() string {
	x := worldHost{s.World}.Waiting(0)
	b := fmt.Sprintf("waits in group %x op %d for slots %v", x.Group, x.Seq, x.Missing.Slots())
	for _, g := range s.World.all() {
		v := g.comm.Current()
		b += fmt.Sprintf("; group %x: version %d from %d, slots %v, done %d, issued %d, arrived %d", g.id, v.Epoch, v.From, v.Active.Slots(), g.comm.Done(), g.seq, g.comm.Arrived())
		if len(g.queue) > 0 {
			o := &g.queue[0].op
			b += fmt.Sprintf(", head %v %d of version %d", o.Kind, o.Seq, o.Ver.Epoch)
		}
	}
	return b
}

package chaos

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

// attach is what a newcomer gets: the step, and the ids of the groups by name.
func (r *rank) attach(step int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(step))
	ids := map[string]uint64{}
	for name, g := range r.groups {
		ids[name] = g.ID()
	}
	j, _ := json.Marshal(ids)
	return append(b, j...)
}

// takeOver finds the groups of a newcomer, and the step. A group whose last other member died while it came in is no more.
func (r *rank) takeOver(attached []byte) (step int, err error) {
	if len(attached) < 4 {
		return 0, fmt.Errorf("chaos: nothing was attached for rank %d", r.Rank)
	}
	step = int(binary.LittleEndian.Uint32(attached))
	ids := map[string]uint64{}
	if err := json.Unmarshal(attached[4:], &ids); err != nil {
		return 0, err
	}
	for _, name := range groupNames[1:] {
		members := r.prog.members(name)
		if !slices.Contains(members, r.w.Rank()) {
			continue
		}
		for _, g := range r.w.Groups() {
			o := g.Options()
			if g.ID() != r.w.ID() && slices.Equal(g.Slots(), members) && (name == "P" || name == "E") == o.Pairs && (name == "E") == (o.SlotBytes == epSlot) {
				r.adopt(name, g)
			}
		}
		if g := r.groups[name]; ids[name] != 0 && (g == nil || g.ID() != ids[name]) {
			return 0, fmt.Errorf("the newcomer has no group %s (attached: %s)", name, attached[4:])
		}
	}
	return step, nil
}

// event is the operation as a history has it.
func (r *rank) event(o *op) history.Event {
	e := history.Event{Op: o.code(), Call: o.place(), Group: r.w.ID()}
	if g := r.groups[o.Group]; g != nil && o.Kind != "sub" {
		e.Group = g.ID()
	}
	if o.Kind == "p2p" {
		e.Op, e.Peer = history.Send, int16(o.members(o.Group)[o.To])
		if r.w.Rank() == o.members(o.Group)[o.To] {
			e.Op, e.Peer = history.Recv, int16(o.members(o.Group)[o.Root])
		}
	}
	return e
}

// issue writes down that an operation is called.
func (r *rank) issue(e history.Event) {
	e.Kind = history.Issue
	r.rec.put(&e)
	r.take(e.Op)
}

// note writes down how it ended. It returns an error if the program is over for this rank.
func (r *rank) note(o *op, res pg.Result, err error, data []byte) error {
	e := r.event(o)
	return r.end(&e, res, err, sum(data))
}

func (r *rank) end(e *history.Event, res pg.Result, err error, sum uint64) error {
	e.Kind = history.Return
	r.miss(e.Op)
	if outcome(err, e.Op.Local(), e); err == nil {
		e.Seq, e.Epoch, e.Set, e.Sum = res.Seq, res.Epoch, res.Active, sum
	}
	if e.Epoch == 0 {
		if g := r.groupOf(e.Group); g != nil {
			_, e.Epoch = g.Active()
		}
	}
	r.rec.put(e)
	if e.Outcome >= history.Evicted {
		return fmt.Errorf("step %d.%d %v: %w", e.Call>>10, int(e.Call&1023)-1, e.Op, err)
	}
	return nil
}

func (r *rank) groupOf(id uint64) *pg.Group {
	for _, g := range r.groups {
		if g.ID() == id {
			return g
		}
	}
	return nil
}

func (r *rank) move(m move) error {
	o := m.op
	switch o.Kind {
	case "sub":
		return r.sub(o)
	case "step":
		return r.epStep(o)
	}
	g := r.groups[o.Group]
	if g == nil {
		return nil // not a member, or it could not be made, alike on all
	}
	members := o.members(o.Group)
	rank := slices.Index(members, r.w.Rank())
	switch m.do {
	case "call":
		if o.Kind == "close" {
			e := r.event(o)
			r.issue(e)
			delete(r.groups, "D")
			return r.end(&e, pg.Result{}, g.Close(r.ctx), 0)
		}
		c, guards := o.call(rank, len(members))
		r.issue(r.event(o))
		res, err := g.Do(r.ctx, c)
		return r.returned(o, c, guards, res, err)
	case "start":
		c, guards := o.call(rank, len(members))
		r.issue(r.event(o))
		w, err := g.Start(c)
		if err != nil {
			return r.returned(o, c, guards, pg.Result{}, err)
		}
		r.works[o] = &started{work: w, call: c, guards: guards}
		return nil
	case "wait":
		s := r.works[o]
		if s == nil {
			return nil // it was not started
		}
		delete(r.works, o)
		res, err := s.work.Wait(r.ctx)
		return r.returned(o, s.call, s.guards, res, err)
	case "p2p":
		return r.p2pMove(o, g, rank)
	}
	return r.pairMove(m, g, rank)
}

// returned writes down how an operation with buffers ended, and watches them from here on.
func (r *rank) returned(o *op, c *collectives.Call, g guarded, res pg.Result, err error) error {
	over := r.note(o, res, err, c.Out)
	if !g.whole() {
		r.say("violation %v has written around its output", o)
	}
	r.canaries.keep(o.String(), err != nil, g.all)
	if len(c.In) > 0 && (len(c.Out) == 0 || &c.In[0] != &c.Out[0]) {
		r.canaries.keep(o.String(), err != nil, c.In)
	}
	return over
}

// checkCanaries says if a buffer was touched after its call had returned.
func (r *rank) checkCanaries() {
	if err := r.canaries.check(); err != nil {
		r.say("violation %v", err)
		r.canaries = canaries{}
	}
}

// sub makes a group for one step.
func (r *rank) sub(o *op) error {
	e := r.event(o)
	r.issue(e)
	g, err := r.w.Sub(r.ctx, o.members("D"), r.options())
	if err == nil && g != nil {
		r.adopt("D", g)
	}
	return r.end(&e, pg.Result{}, err, 0)
}

// p2pMove sends or receives the messages of o, until one of them fails.
func (r *rank) p2pMove(o *op, g *pg.Group, rank int) (err error) {
	if rank != o.Root && rank != o.To {
		return nil
	}
	tag := o.tag(r.Late != UsualLate)
	e := r.event(o)
	r.issue(e)
	var all []byte
	n := 0
	for ; n < o.Messages && err == nil; n++ {
		if e.Op == history.Send {
			err = g.Send(r.ctx, pg.U8(o.message(n)), o.To, tag)
			continue
		}
		b := dirty(o.N)
		if err = g.Recv(r.ctx, pg.U8(b), o.Root, tag); err == nil {
			all = append(all, b...)
		}
	}
	if err != nil {
		n--
	}
	e.N = uint32(n)
	if e.Op == history.Recv {
		e.Sum = sum(all)
	}
	return r.end(&e, pg.Result{}, err, e.Sum)
}

func (r *rank) pairMove(m move, g *pg.Group, rank int) error {
	o, n := m.op, r.Ranks
	exchange := func(s *started, half int) *pg.Exchange {
		s.got[half] = make([][]byte, n)
		x := &pg.Exchange{Sizes: make([]int, n), Digest: uint64(o.Step)}
		for to := range x.Sizes {
			x.Sizes[to] = o.pairCount(rank, to, half == 1)
		}
		x.Fill = func(to int, dst []byte) { copy(dst, o.pairInput(rank, to, half == 1)) }
		x.Take = func(parts [][]byte) error {
			for from, b := range parts {
				s.got[half][from] = bytes.Clone(b)
			}
			return nil
		}
		return x
	}
	end := func(res pg.Result, err error) error {
		s := r.works[o]
		delete(r.works, o)
		var all []byte
		if err == nil {
			all = slices.Concat(slices.Concat(s.got[0]...), slices.Concat(s.got[1]...))
		}
		return r.note(o, res, err, all)
	}
	s := r.works[o]
	if m.do == "dispatch" {
		s = &started{}
		r.works[o] = s
		r.issue(r.event(o))
		p, err := g.StartPair(r.ctx, exchange(s, 0))
		if err != nil {
			return end(pg.Result{}, err)
		}
		s.pair = p
		return nil
	}
	if s == nil {
		return nil // it has failed before
	}
	switch m.do {
	case "dispatched":
		if err := s.pair.Dispatched(r.ctx); err != nil {
			return end(pg.Result{}, err)
		}
	case "combine":
		if err := s.pair.StartCombine(r.ctx, exchange(s, 1)); err != nil {
			return end(pg.Result{}, err)
		}
	case "combined":
		res, err := s.pair.Combined(r.ctx)
		return end(res, err)
	}
	return nil
}

package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/pg"
)

// step is a place of the program that all ranks run. Who is not in its group goes on.
type step struct {
	op     history.Op
	group  int   // index; of Sub: the parent
	child  int   // of Sub: the index of what it makes
	slots  []int // of Sub
	opts   pg.Options
	root   int // rank
	n      int // elements
	async  bool
	within bool // in place
}

// program is where a process is in it.
type program struct {
	at      int
	groups  map[int]*pg.Group
	works   []issued
	tail    int
	leaving bool
	quiet   bool
}

type issued struct {
	w    *pg.Work
	st   *step
	call uint64
	out  []byte
	in   []byte
	g    *pg.Group
}

// slotsOf is a World's draw of n slots.
func (w *World) draw(n, of int) (s []int) {
	for len(s) < n {
		if x := w.rnd.IntN(of); !slices.Contains(s, x) {
			s = append(s, x)
		}
	}
	slices.Sort(s)
	return s
}

// plan draws the program: at least 20 operations in at least two groups, a Boundary every few of them.
func (w *World) plan() {
	mode := func() pg.Mode { return pg.Mode(w.rnd.IntN(2)) }
	opts := func() pg.Options {
		o := pg.Options{Mode: mode(), Timeout: opTimeout, SlotBytes: 8192, Depth: 1 + w.rnd.IntN(4)}
		if o.Mode == pg.Raise && w.chance(0.5) {
			o.Pairs = true
		}
		return o
	}
	sub := func(parent int) {
		of := w.size
		k := 2 + w.rnd.IntN(max(1, of-1))
		w.kinds = append(w.kinds, opts())
		w.steps = append(w.steps, step{op: history.Sub, group: parent, child: len(w.kinds) - 1, slots: w.draw(min(k, of), of), opts: w.kinds[len(w.kinds)-1]})
	}
	w.kinds = append(w.kinds, pg.Options{Mode: mode(), Timeout: opTimeout, SlotBytes: 8192, Depth: 1 + w.rnd.IntN(4)})
	for range 1 + w.rnd.IntN(2) {
		sub(0)
	}
	ops := 20 + w.rnd.IntN(16)
	open := len(w.kinds)
	closed := map[int]bool{}
	for n := 0; n < ops; {
		if w.chance(0.25) {
			w.steps = append(w.steps, step{op: history.Boundary})
		}
		switch {
		case w.chance(0.03) && open < 5:
			sub(0)
			open++
			n++
			continue
		case w.chance(0.02) && n > ops/2:
			if g := 1 + w.rnd.IntN(len(w.kinds)-1); !closed[g] {
				closed[g] = true
				w.steps = append(w.steps, step{op: history.Close, group: g})
				n++
			}
			continue
		}
		g := w.rnd.IntN(len(w.kinds))
		if closed[g] {
			continue
		}
		run := 1
		if w.chance(0.3) {
			run = 2 + w.rnd.IntN(4)
		}
		for range run {
			st := step{group: g, async: run > 1, n: 1 + w.rnd.IntN(8), within: w.chance(0.3)}
			if w.chance(0.05) {
				st.n = w.large
			}
			switch k := w.rnd.IntN(10); {
			case k < 4:
				st.op = history.AllReduce
			case k < 5:
				st.op = history.AllGather
			case k < 6:
				st.op = history.AllToAll
			case k < 7:
				st.op = history.Broadcast
				st.root = w.rnd.IntN(w.size)
			case k < 8:
				st.op = history.Barrier
			default:
				st.op = history.AllReduce
				if w.kinds[g].Pairs && run == 1 {
					st.op, st.n = history.Pair, 1+w.rnd.IntN(8)
				}
			}
			w.steps = append(w.steps, st)
			n++
		}
	}
	w.steps = append(w.steps, step{op: history.Boundary})
}

// call numbers of the program: places rise, and a tail follows that goes on until the world is quiet.
func (p *proc) call() uint64 { return uint64(p.prog.at+1)<<20 + uint64(p.prog.tail) }

func (p *proc) note(e history.Event) {
	e.Time = int64(p.w.now)
	if p.w.trace != nil {
		p.w.tell("%v: %s", p, strings.TrimSpace(string(e.AppendJSON(nil))))
	}
	p.events = append(p.events, e)
}

// news takes the views that have come into the history.
func (p *proc) news() {
	if !p.member {
		return // it has not begun yet
	}
	for {
		select {
		case e := <-p.seat.World.Events():
			if e.Over {
				continue
			}
			p.note(history.Event{Kind: history.View, Epoch: e.Epoch, Set: e.Active})
			if len(e.Lost) > 0 {
				p.note(history.Event{Kind: history.Lost, Epoch: e.Epoch, Set: slots.Of(e.Lost...), Why: e.Why})
			}
			p.w.viewed(p, &e)
		default:
			return
		}
	}
}

// live is what the caller of a process does: it becomes a member, and runs the program.
func (p *proc) live(found bool) {
	ctx := context.Background()
	w := p.w
	p.prog.groups = map[int]*pg.Group{}
	if found {
		if err := p.seat.Found(ctx, w.first); err != nil {
			w.violate("P8", "%v cannot found: %v", p, err)
			return
		}
		p.came(1, 0)
	} else if !p.join(ctx) {
		return
	}
	for p.prog.at < len(w.steps) {
		st := &w.steps[p.prog.at]
		if !p.do1(ctx, st) {
			return
		}
		p.prog.at++
	}
	for !p.prog.quiet {
		p.prog.tail++
		if !p.do1(ctx, &step{op: history.Boundary}) || !p.quiet(ctx) {
			return
		}
	}
	if p.over = true; p.leaves() {
		w.deed(p, history.Leave, 0, true)
		p.ends(p.seat.World.Leave(ctx))
	}
}

// came notes that the process is a member.
func (p *proc) came(epoch uint64, boundary uint64) {
	p.member = true
	p.slot, p.inc = p.seat.World.Rank(), p.seat.World.Incarnation()
	p.note(history.Event{Kind: history.Joined, Epoch: epoch, N: uint32(boundary), Inc: p.inc})
	if boundary > 0 && epoch < uint64(len(p.w.since)) && p.w.now-p.w.since[epoch] > heartbeatLimit/2 {
		// It was let in and could not begin: it waited for one that has died, to learn of a group that both are in.
		p.w.deeds = append(p.w.deeds, history.Deed{Time: int64(p.w.since[epoch]), What: history.Slow, Proc: p.pid, Fair: true})
	}
	if set, e := p.seat.World.Active(); e == epoch {
		p.note(history.Event{Kind: history.View, Epoch: epoch, Set: set})
	}
	p.w.founded(p, epoch)
	p.has(0, p.seat.World.Group)
}

// has takes a group in under its index of the program.
func (p *proc) has(i int, g *pg.Group) {
	p.prog.groups[i] = g
	all := slots.Of(g.Slots()...)
	if i == 0 {
		for s := range p.w.capacity {
			all.Add(s)
		}
	}
	p.note(history.Event{Kind: history.Made, Group: g.ID(), Set: all})
	p.w.groupIs(i, g)
}

// join asks members to be let in, until one does.
func (p *proc) join(ctx context.Context) bool {
	w := p.w
	for try := 0; ; try++ {
		q := w.someone(p)
		if q == nil {
			w.sleep(p.caller, w.between(5e6, 20e6))
			continue
		}
		if p.peers[q.pid] == nil {
			w.sleep(p.caller, w.between(100e3, 2e6))
			if !w.open(p, q) || p.peers[q.pid] != nil {
				continue
			}
			w.meet(p, q)
		}
		me := p.memberOf()
		w.tell("%v asks %v to be let in", p, q)
		err := p.seat.Join(ctx, p.peers[q.pid], me)
		if err == nil {
			break
		}
		w.tell("%v is not let in: %v", p, err)
		if strings.HasPrefix(err.Error(), "refused: ") { // its launcher starts it again
			p.note(history.Event{Kind: history.Ended, Outcome: history.Evicted, Why: err.Error()})
			w.gone(p, history.Evicted)
		}
		if p.seat.World.Incarnation() > 0 {
			p.ends(err)
			return false
		}
		w.sleep(p.caller, w.between(1e6, 10e6))
	}
	j := p.seat.World.Joined()
	if len(j.Attach) != 8 {
		w.violate("P8", "%v was given %d bytes that nobody attached", p, len(j.Attach))
		return false
	}
	p.came(j.Epoch, j.Boundary)
	p.prog.at, p.prog.tail = int(binary.LittleEndian.Uint32(j.Attach)), int(binary.LittleEndian.Uint32(j.Attach[4:]))
	for _, g := range p.seat.World.Groups()[1:] {
		if i := slices.Index(w.ids, g.ID()); i > 0 {
			p.has(i, g)
		}
	}
	// It stands in that Boundary: its own call of it is the next step.
	if p.prog.at == len(w.steps) {
		p.prog.tail--
	}
	return true
}

// ends tells why the membership of a process is over, and ends it.
func (p *proc) ends(err error) {
	o := outcome(err)
	if err == nil {
		o = history.Left
	}
	why := ""
	if o != history.Left {
		why = err.Error()
	}
	p.news()
	if !p.member { // it had not begun: the others may have dropped it for that
		p.w.deeds = append(p.w.deeds, history.Deed{Time: int64(p.born), What: history.Slow, Proc: p.pid, Fair: true})
	}
	p.note(history.Event{Kind: history.Ended, Outcome: o, Why: why})
	p.w.gone(p, o)
}

func outcome(err error) history.Outcome {
	var lost *pg.RankLost
	var source *collectives.ErrSourceLost
	switch {
	case err == nil:
		return history.OK
	case errors.Is(err, pg.ErrEvicted):
		return history.Evicted
	case errors.Is(err, pg.ErrNoQuorum):
		return history.NoQuorum
	case errors.Is(err, pg.ErrFailed):
		return history.Failed
	case errors.As(err, &lost):
		return history.RankLost
	case errors.As(err, &source):
		return history.SourceLost
	case errors.Is(err, pg.ErrClosed):
		return history.ClosedHere
	}
	return history.Other
}

// do1 runs a step; false: the process is out.
func (p *proc) do1(ctx context.Context, st *step) bool {
	if !st.async && len(p.prog.works) > 0 || len(p.prog.works) > 0 && p.prog.works[0].st.group != st.group {
		if !p.reap(ctx) {
			return false
		}
	}
	p.w.place(p)
	if st.op == history.Boundary {
		return p.boundary(ctx)
	}
	g := p.prog.groups[st.group]
	if g == nil {
		return true
	}
	call := p.call()
	p.note(history.Event{Kind: history.Issue, Op: st.op, Group: g.ID(), Call: call})
	switch {
	case st.op == history.Sub:
		return p.sub(ctx, g, st, call)
	case st.op == history.Close:
		err := g.Close(ctx)
		delete(p.prog.groups, st.group)
		return p.returned(st, g, call, pg.Result{}, 0, err)
	case st.op == history.Pair:
		res, sum, err := p.pair(ctx, g, st, call)
		return p.returned(st, g, call, res, sum, err)
	case st.async:
		in, out, c := p.buffers(st, g, call)
		work, err := g.Start(c)
		if err != nil {
			return p.returned(st, g, call, pg.Result{}, 0, err)
		}
		p.pending++
		p.stir()
		p.prog.works = append(p.prog.works, issued{work, st, call, out, in, g})
		return true
	}
	_, out, c := p.buffers(st, g, call)
	res, err := g.Do(ctx, c)
	return p.returned(st, g, call, res, sum(out), err)
}

// reap waits for what was issued.
func (p *proc) reap(ctx context.Context) bool {
	ws := p.prog.works
	p.prog.works = nil
	for _, x := range ws {
		res, err := x.w.Wait(ctx)
		p.pending--
		if !p.returned(x.st, x.g, x.call, res, sum(x.out), err) {
			return false
		}
	}
	return true
}

// returned notes how an operation has ended; false: the process is out.
func (p *proc) returned(st *step, g *pg.Group, call uint64, res pg.Result, sum uint64, err error) bool {
	p.news()
	e := history.Event{Kind: history.Return, Op: st.op, Group: g.ID(), Call: call, Outcome: outcome(err), Seq: res.Seq, Epoch: res.Epoch, Set: res.Active, Sum: sum}
	var lost *pg.RankLost
	var failed *pg.GroupFailed
	switch {
	case errors.As(err, &lost):
		e.Epoch, e.Set = lost.Epoch, slots.Of(lost.Slots...)
	case errors.As(err, &failed):
		e.Epoch, e.Why = failed.Epoch, failed.Reason
	case err != nil && e.Outcome != history.SourceLost:
		e.Why = err.Error()
	}
	p.note(e)
	p.w.progress(p, &e)
	switch e.Outcome {
	case history.Evicted, history.NoQuorum, history.Other:
		p.ends(err)
		return false
	case history.Failed:
		if st.group == 0 {
			p.w.violate("P3", "%v: the world's group is failed: %v", p, err)
			return false
		}
		delete(p.prog.groups, st.group)
		_ = g.Close(context.Background())
	}
	return true
}

func (p *proc) boundary(ctx context.Context) bool {
	call := p.call()
	p.note(history.Event{Kind: history.Issue, Op: history.Boundary, Group: p.w.ids[0], Call: call})
	passed, err := p.seat.World.Boundary(ctx, func() []byte {
		b := binary.LittleEndian.AppendUint32(nil, uint32(p.prog.at))
		return binary.LittleEndian.AppendUint32(b, uint32(p.prog.tail))
	})
	p.news()
	e := history.Event{Kind: history.Return, Op: history.Boundary, Group: p.w.ids[0], Call: call, Outcome: outcome(err), N: uint32(passed.Count), Set: slots.Of(passed.Joined...)}
	if err != nil {
		e.Why = err.Error()
	}
	p.note(e)
	if err != nil {
		p.ends(err)
		return false
	}
	return true
}

func (p *proc) sub(ctx context.Context, g *pg.Group, st *step, call uint64) bool {
	n, err := g.Sub(ctx, st.slots, st.opts)
	if !p.returned(st, g, call, pg.Result{}, 0, err) {
		return false
	}
	if err == nil && n != nil {
		p.has(st.child, n)
	}
	return true
}

// quiet asks all whether something is still to come; so all end the tail at the same place.
func (p *proc) quiet(ctx context.Context) bool {
	w := p.w
	g := p.prog.groups[0]
	x := make([]byte, 8)
	if !w.settled() {
		x[0] = 1
		w.sleep(p.caller, w.between(8e6, 40e6))
	}
	p.prog.tail++
	call := p.call()
	st := &step{op: history.AllReduce}
	p.note(history.Event{Kind: history.Issue, Op: st.op, Group: g.ID(), Call: call})
	res, err := g.Do(ctx, &collectives.Call{Kind: collectives.AllReduce, DType: dtype.I64, Reduce: dtype.Max, In: x, Out: x})
	if err == nil {
		p.prog.quiet = x[0] == 0
	}
	return p.returned(st, g, call, res, sum(x), err)
}

// second drives what the caller does not wait for.
func (p *proc) serve() {
	w := p.w
	for {
		if p.pending == 0 || !p.member {
			p.Await(context.Background(), 0)
			continue
		}
		if !p.seat.Serve() {
			w.sleep(p.second, w.between(50e3, 1e6))
		} else {
			w.sleep(p.second, w.between(100, 20e3))
		}
	}
}

func (p *proc) pair(ctx context.Context, g *pg.Group, st *step, call uint64) (res pg.Result, s uint64, err error) {
	half := func(k int, before uint64) *pg.Exchange {
		sizes := make([]int, g.Size())
		for r := range sizes {
			sizes[r] = 8 * st.n
		}
		return &pg.Exchange{
			Sizes: sizes,
			Fill:  func(r int, dst []byte) { fill(dst, p.slot, p.inc, call, pairSalt(k, g.Slots()[r])) },
			Take: func(parts [][]byte) error { // once more if they have changed meanwhile
				s = before
				for r, b := range parts {
					s += sumAt(b, k<<20+r<<10)
				}
				return nil
			},
		}
	}
	x, err := g.StartPair(ctx, half(0, 0))
	if err != nil {
		return res, 0, err
	}
	if err = x.Dispatched(ctx); err != nil {
		return res, 0, err
	}
	if err = x.StartCombine(ctx, half(1, s)); err != nil {
		return res, 0, err
	}
	res, err = x.Combined(ctx)
	return res, s, err
}

func pairSalt(half, slot int) int { return 1 + half<<16 + slot }

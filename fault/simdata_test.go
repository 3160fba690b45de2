package fault

import (
	"bytes"
	"encoding/binary"
	"strings"
)

// The simulated data plane: operations of groups complete on a host when every member of the group's version has arrived
// and the host's word is open in that version; then each process of the host may return at any time.

func (p *proc) start(self ID, v View, gs []Group, in Welcome) {
	w := p.w
	for _, x := range gs {
		p.known[x.ID] = true
		p.done[x.ID], p.ver[x.ID] = x.Cut, x.Version
		g := w.groups[x.ID].words[p.host]
		if g.version < x.Version {
			*g = word{version: x.Version, done: x.Cut}
		}
	}
	cfg := Config{Self: self, View: v, Groups: gs, Board: board{p, self},
		HeartbeatLimit: simHL, BallotTimeout: w.bt, AskTimeout: simAsk, bug: w.bug, Witness: w.witness != nil, Change: in.Change, Gained: in.Gained}
	var es []Effect
	p.m, es = New(cfg, w.now)
	w.tr("%v (pid %d, host %d) starts in epoch %d", p.id, p.pid, p.host, v.Epoch)
	p.effects(es)
	for _, q := range w.procs { // it may have missed who died or is mute
		if q != p && q.id.Inc > 0 && q.host == p.host && q.dead {
			w.at(w.rnd(0, ms), func() { p.do(func() { p.step(Died{q.id}) }) })
		}
		if q.host != p.host {
			w.watchPair(q, p)
			w.watchPair(p, q)
		}
	}
	p.think()
}

// think goes on to the next operation after a while.
func (p *proc) think() {
	d := p.w.rnd(ms, 14*ms) + p.slow
	p.slow = 0
	p.w.at(d, func() { p.do(p.next) })
}

const boundaryEvery = 2 // rounds of the program

func (p *proc) next() {
	w := p.w
	if p.busy || p.m == nil || p.inBound {
		return
	}
	if p.stuck {
		return
	}
	if p.index%(len(w.prog)*boundaryEvery) == 0 && uint64(p.index/(len(w.prog)*boundaryEvery))+1 > p.bound {
		p.bound = uint64(p.index/(len(w.prog)*boundaryEvery)) + 1
		p.inBound = true
		p.step(Entered{p.bound})
		if !p.dead {
			p.boundary()
		}
		return
	}
	if p.leave && p.index%len(w.prog) == 0 {
		p.leave = false
		p.stuck = true
		p.step(Leave{})
		return
	}
	id := w.prog[p.index%len(w.prog)]
	if p.order != nil {
		id = p.order[p.index%len(w.prog)]
	}
	g, ok := p.m.Group(id)
	if !ok || !p.known[id] || g.Failed != "" {
		p.index++
		p.think()
		return
	}
	p.busy, p.group, p.seq, p.since, p.over = true, id, p.done[id]+1, w.now, w.now+4*simHL
	p.arrive()
	p.tryWait()
	p.overdue()
}

// boundary stands still if a growth holds us here.
func (p *proc) boundary() {
	if !p.holding || p.holdAt != 0 && p.holdAt > p.bound {
		p.leaveBoundary()
		return
	}
	if p.holdAt == p.bound {
		b := binary.BigEndian.AppendUint64(nil, uint64(p.index))
		p.step(Quiet{Count: p.bound, Attach: b, Groups: nil})
	}
}

func (p *proc) leaveBoundary() {
	if p.inBound {
		p.inBound = false
		p.think()
	}
}

// arrive shows this process's contribution to every host, after a while.
func (p *proc) arrive() {
	w := p.w
	a := arrival{p.ver[p.group], p.seq}
	p.arrived[p.group] = a
	id := p.group
	for h := range w.hosts {
		put := func() {
			old := w.groups[id].at(h, p.pid)
			if old.version < a.version || old.version == a.version && old.seq < a.seq {
				*old = a
				for _, q := range w.procs {
					if q.host == h && q.busy && q.group == id {
						q.do(q.tryWait)
					}
				}
			}
		}
		if h == p.host {
			put()
		} else {
			w.at(w.rnd(ms/20, 2*ms), func() {
				if !p.dead || w.chance(0.5) {
					put()
				}
			})
		}
	}
}

// missing are the members of the version that have not arrived, as far as this host knows.
func (p *proc) missing() (s Set) {
	g, _ := p.m.Group(p.group)
	for _, x := range p.m.view.Members {
		if !g.Slots.Has(x.Slot) {
			continue
		}
		q := p.w.find(x.ID)
		a := p.w.groups[p.group].at(p.host, q.pid)
		if a.version != p.ver[p.group] || a.seq < p.seq {
			s.Add(x.Slot)
		}
	}
	return s
}

func (w *world) find(id ID) *proc {
	for _, p := range w.procs {
		if p.id == id {
			return p
		}
	}
	return nil
}

// tryWait completes the operation on the host if it can be, and returns from it.
func (p *proc) tryWait() {
	w := p.w
	if !p.busy || p.dead || p.m == nil {
		return
	}
	x := w.groups[p.group].words[p.host]
	if x.closed && x.ballot.Void(p.m.view.Epoch) {
		x.closed = false // whoever sees it
	}
	v := p.ver[p.group]
	if x.version == v && !x.closed && x.done == p.seq-1 {
		g, _ := p.m.Group(p.group)
		if g.Version != v {
			w.bad("rank %v: group %d has version %d in the machine and %d outside", p.id, p.group, g.Version, v)
		}
		// All slots that the version counts, also of a member that the view lost without a cut for the group.
		all := true
		for s := g.Active.Next(0); s >= 0 && all; s = g.Active.Next(s + 1) {
			ok := false
			for _, q := range w.procs {
				if q.id.Slot != s {
					continue
				}
				a := w.groups[p.group].at(p.host, q.pid)
				ok = ok || a.version == v && a.seq >= p.seq
			}
			all = all && ok
		}
		if all {
			x.done = p.seq
			for _, q := range w.procs { // wake the host
				if q != p && q.host == p.host && q.busy && q.group == p.group {
					w.at(w.rnd(0, ms), func() { q.do(q.tryWait) })
				}
			}
		}
	}
	if x.version == v && x.done >= p.seq {
		p.finish(v)
	}
}

// finish returns from the operation that this process waits in.
func (p *proc) finish(ver uint64) {
	w := p.w
	w.note(p, p.group, p.seq, ver)
	p.done[p.group] = p.seq
	p.busy = false
	w.doneSum++
	if w.create > 0 && p.index%len(w.prog) == w.create && p.group == 1 && p.index < len(w.prog) && w.groups[200].slots.Has(p.id.Slot) {
		p.known[200], p.ver[200] = true, ver
		p.step(Created{Group{ID: 200, Slots: w.groups[200].slots, Version: ver}, ver})
		if g, ok := p.m.Group(200); ok {
			p.ver[200], p.done[200] = g.Version, g.Cut
			if x := w.groups[200].words[p.host]; x.version < g.Version {
				*x = word{version: g.Version, done: g.Cut}
			}
		}
	}
	p.index++
	p.think()
}

// note checks that no two members of the next view returned from the same operation with different sets.
func (w *world) note(p *proc, group, seq, ver uint64) {
	k := [2]uint64{group, seq}
	for _, r := range w.returns[k] {
		q := w.procs[r.pid]
		next := w.values[max(r.ver, ver)].Members
		if r.ver != ver && findMember(next, p.id) != nil && findMember(next, q.id) != nil {
			w.bad("group %d op %d: rank %v returned with version %d, rank %v with %d", group, seq, p.id, ver, q.id, r.ver)
		}
	}
	w.returns[k] = append(w.returns[k], returned{p.pid, ver})
}

// overdue reports an operation whose deadline is over, again and again.
func (p *proc) overdue() {
	w := p.w
	id, seq := p.group, p.seq
	w.at(max(p.over-w.now, simAsk), func() {
		p.do(func() {
			if p.busy && p.group == id && p.seq == seq {
				if miss := p.missing(); !miss.Empty() {
					p.step(Overdue{id, seq, miss})
				}
				p.overdue()
			}
		})
	})
}

// poke tries again what may have been stopped by a closed word.
func (p *proc) poke() {
	for _, q := range p.w.procs {
		if q.host == p.host && q.busy {
			p.w.at(p.w.rnd(0, ms/2), func() { q.do(q.tryWait) })
		}
	}
}

// close closes the words, and says how far everybody of the host is.
func (p *proc) close(e Close) {
	w := p.w
	c := Closed{Ballot: e.Ballot}
	for _, id := range e.Groups {
		g := w.groups[id]
		if g == nil {
			continue
		}
		if !p.known[id] {
			continue // a host knows only its own groups, and their words
		}
		x := g.words[p.host]
		if !x.closed || x.ballot.Void(p.m.view.Epoch) || x.ballot.Less(e.Ballot) {
			if !x.closed || !e.Ballot.Void(epochOf(x.ballot)) {
				x.closed, x.ballot = w.bug != bugNoClose, e.Ballot
			}
		}
		d := GroupDone{Group: id, Issued: p.arrived[id].seq}
		for _, m := range p.m.view.Members {
			q := w.find(m.ID)
			if q == nil || q.host != p.host || q.dead || !g.slots.Has(m.Slot) {
				continue
			}
			seq := q.done[id]
			if q.known[id] && x.version >= q.ver[id] {
				seq = max(seq, x.done)
			}
			d.Done = append(d.Done, Done{m.Slot, seq})
		}
		c.Groups = append(c.Groups, d)
	}
	p.step(c)
}

func epochOf(b Ballot) uint64 { return uint64((b.Num - 1) >> ballotBits) }

// install checks the next view, and takes it into the data plane.
func (p *proc) install(e Install) {
	w := p.w
	v := w.check(p, e.View.Epoch)
	inside := func(q *proc) bool { return findMember(v.Members, q.id) != nil }
	for _, c := range e.Cuts {
		g := w.groups[c.Group]
		if g == nil {
			w.bad("a cut of a group that nobody made: %d", c.Group)
			continue
		}
		for _, q := range w.procs { // nobody of the next view is past it
			if q.known[c.Group] && !q.dead && inside(q) && q.ver[c.Group] < v.Epoch && q.done[c.Group] > c.Seq {
				w.bad("epoch %d cuts group %d at %d, rank %v returned from %d", v.Epoch, c.Group, c.Seq, q.id, q.done[c.Group])
			}
		}
		x := g.words[p.host]
		if x.version < v.Epoch {
			*x = word{version: v.Epoch, done: c.Seq}
		}
		if !p.known[c.Group] {
			continue
		}
		if c.Seq > p.arrived[c.Group].seq && c.Seq > p.done[c.Group] {
			w.bad("epoch %d cuts group %d at %d, rank %v has only arrived at %d", v.Epoch, c.Group, c.Seq, p.id, p.arrived[c.Group].seq)
		}
		old := p.ver[c.Group]
		p.ver[c.Group] = v.Epoch
		if p.busy && p.group == c.Group {
			switch {
			case p.seq <= c.Seq:
				p.finish(old)
			case c.Fail != "":
				p.busy = false
				p.index++
				p.think()
			default:
				p.since, p.over = w.now, max(p.over, w.now+simHL)
				p.arrive() // redo
				w.at(0, func() { p.do(p.tryWait) })
			}
			if p.dead {
				return
			}
		}
	}
	for _, c := range e.Cuts { // a cut in the middle of an operation of another group changes nothing there
		if g, ok := p.m.Group(c.Group); ok && g.Version == v.Epoch && g.Cut != c.Seq {
			w.bad("group %d of rank %v has cut %d, the view has %d", c.Group, p.id, g.Cut, c.Seq)
		}
	}
	if e.At != 0 {
		if !p.inBound || p.bound != e.At {
			w.bad("rank %v is not in boundary %d: in %v, %d", p.id, e.At, p.inBound, p.bound)
		}
		w.grown++
	}
	w.changes++
	p.holding = false
	if p.inBound {
		p.leaveBoundary()
	}
	p.poke()
}

// check holds an installed view against what others installed.
func (w *world) check(p *proc, epoch uint64) Value {
	var v Value
	for _, h := range p.m.hist { // there may be more than one in one step
		if h.value.Epoch == epoch {
			v = h.value
		}
	}
	b := appendValue(nil, v)
	if old, ok := w.chosen[v.Epoch]; ok && !bytes.Equal(old, b) {
		w.bad("epoch %d is two things: rank %v has %+v, others %+v", v.Epoch, p.id, v, w.values[v.Epoch])
	} else if !ok {
		w.chosen[v.Epoch], w.values[v.Epoch] = b, v
		for _, x := range v.Members {
			if n, ok := w.numbers[x.ID]; ok && n != x.Nonce {
				w.bad("%v is numbered twice", x.ID)
			}
			w.numbers[x.ID] = x.Nonce
			w.numbered(x)
		}
	}
	return v
}

// numbered gives a newcomer its number.
func (w *world) numbered(x Member) {
	q := w.procs[binary.BigEndian.Uint64(x.Nonce[:])-1]
	if q.id == x.ID {
		return
	}
	// Again, after it was dropped before it was welcomed, by one who came later and does not know that: the host tells
	// of the number that the nonce has in the view. It will find that it is out when it starts.
	q.id = x.ID
	w.watch(q)
	if q.dead { // it died while it joined
		for _, o := range w.procs {
			if o.host == q.host && o != q {
				w.at(w.rnd(ms/10, 5*ms), func() { o.do(func() { o.step(Died{q.id}) }) })
			}
		}
	}
}

// join makes a process ask for a place until it has one.
func (p *proc) join(slot int) {
	p.joinSlot = slot
	p.askJoin()
}

func (p *proc) askJoin() {
	w := p.w
	if p.dead || p.m != nil {
		return
	}
	if p.joinView.Epoch == 0 || w.chance(0.05) {
		for _, q := range w.procs {
			if q.m != nil && !q.dead && !q.pause {
				p.joinView = q.m.view
			}
		}
	}
	if n := len(p.joinView.Members); n > 0 {
		x := p.joinView.Members[w.rng.IntN(n)]
		w.send(p, Send{To: x.ID, Msg: Join{Member{ID: ID{Slot: p.joinSlot}, Nonce: p.nonce, Host: uint64(p.host)}, p.joinView.Epoch}})
	}
	w.at(simHL/20, func() { p.do(p.askJoin) })
}

func (p *proc) joinReply(msg Msg) {
	switch x := msg.(type) {
	case Stale:
		if x.View.Epoch > p.joinView.Epoch {
			p.joinView = x.View
		}
	case Refused:
		p.end("refused: " + x.Reason)
		if strings.Contains(x.Reason, "new nonce") {
			p.w.newProc(p.host).join(p.joinSlot)
		}
	case Welcome:
		p.index = int(binary.BigEndian.Uint64(x.Attach))
		p.bound = x.At
		p.start(x.Self, x.View, x.Groups, x)
	}
}

package fault

import (
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// A simulated world: processes on hosts, links that delay, a data plane whose words live in the memory of a host, and
// faults. One seed, one run: everything that is random comes from one generator, and events run one at a time.

const (
	simHL  = 100 * time.Millisecond
	simBT  = 4 * time.Millisecond
	simAsk = 25 * time.Millisecond
	ms     = time.Millisecond
)

type simEvent struct {
	at  Time
	n   uint64
	run func()
}

type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	o := *q
	e := o[len(o)-1]
	*q = o[:len(o)-1]
	return e
}

// word is the decision word of a group on a host.
type word struct {
	version, done uint64
	closed        bool
	ballot        Ballot
}

type simGroup struct {
	id    uint64
	slots Set
	words []*word     // by host
	arr   [][]arrival // by host, pid: what has reached a host
}

// arrival is what a host has of a process's contribution.
type arrival struct{ version, seq uint64 }

type proc struct {
	w     *world
	pid   int
	host  int
	nonce Nonce
	m     *Machine
	id    ID
	dead  bool // crashed, or gone after it was evicted
	ended string
	pause bool
	back  []func() // what waits for the end of the pause
	timer Time
	fuse  int // effects until it crashes in mid-step; 0: not

	joinSlot int
	joinView View
	silent   map[int]bool // by pid

	// The program.
	index   int // next operation
	busy    bool
	group   uint64
	seq     uint64
	since   Time
	over    Time
	stuck   bool // never arrives anywhere again
	done    map[uint64]uint64
	arrived map[uint64]arrival
	known   map[uint64]bool
	ver     map[uint64]uint64
	bound   uint64 // boundaries entered
	inBound bool
	holding bool
	holdAt  uint64
	leave   bool
	slow    Time
	order   []uint64 // its own program, wrongly
}

type link struct {
	last  Time
	queue []func()
	down  bool
}

type returned struct {
	pid int
	ver uint64
}

type world struct {
	rng    *rand.Rand
	now    Time
	n      uint64
	q      simQueue
	hosts  int
	procs  []*proc
	boards []map[ID]Record
	groups map[uint64]*simGroup
	prog   []uint64
	bt     Time
	create int // program index of the operation that makes group 200
	links  map[[2]int]*link

	chosen  map[uint64][]byte
	values  map[uint64]Value
	numbers map[ID]Nonce
	returns map[[2]uint64][]returned
	fails   []string
	steps   int
	wire    bool
	trace   bool
	log     strings.Builder
	bug     bug
	witness *simWitness                  // nil: none is configured
	before  func(p *proc, e Effect) bool // a script: true crashes p instead
	nested  int
	doneSum int
	grown   int
	changes int
}

func (w *world) at(d Time, f func()) {
	w.n++
	heap.Push(&w.q, simEvent{w.now + d, w.n, f})
}

func (w *world) bad(f string, a ...any) {
	if len(w.fails) < 5 {
		w.fails = append(w.fails, fmt.Sprintf("%v: ", w.now)+fmt.Sprintf(f, a...))
	}
	w.tr("VIOLATION "+f, a...)
}

func (w *world) tr(f string, a ...any) {
	if w.trace {
		fmt.Fprintf(&w.log, "%10v  "+f+"\n", append([]any{w.now}, a...)...)
	}
}

func (w *world) rnd(lo, hi Time) Time { return lo + Time(w.rng.Int64N(int64(hi-lo)+1)) }
func (w *world) chance(p float64) bool {
	return w.rng.Float64() < p
}

// newWorld founds a world of n processes on some hosts, with groups as the seed wants.
func newWorld(seed uint64, n, hosts int, b bug) *world {
	w := emptyWorld(seed, hosts, b)
	w.wire = w.chance(0.2)
	if w.chance(0.4) {
		w.bt = ms / 2 // impatient: ballots cross
	}
	var at []int
	for range n {
		at = append(at, w.rng.IntN(hosts))
	}
	var subs []Set
	for range 1 + w.rng.IntN(2) {
		var s Set
		for s.Len() < 2 {
			s.Add(w.rng.IntN(n))
			s.Add(w.rng.IntN(n))
			if w.chance(0.5) {
				s.Add(w.rng.IntN(n))
			}
		}
		subs = append(subs, s)
	}
	var late Set
	if w.chance(0.3) {
		late = SetOf(w.rng.IntN(n), w.rng.IntN(n), w.rng.IntN(n))
	}
	w.found(at, subs, late)
	return w
}

func emptyWorld(seed uint64, hosts int, b bug) *world {
	w := &world{
		rng: rand.New(rand.NewPCG(seed, 77)), hosts: hosts, groups: map[uint64]*simGroup{}, links: map[[2]int]*link{},
		chosen: map[uint64][]byte{}, values: map[uint64]Value{}, numbers: map[ID]Nonce{},
		returns: map[[2]uint64][]returned{}, bug: b, bt: simBT,
	}
	for range hosts {
		w.boards = append(w.boards, map[ID]Record{})
	}
	return w
}

// found starts a process on each of these hosts, with the world's group, subgroups 100, 101.., and one, 200, that an
// operation makes later.
func (w *world) found(at []int, subs []Set, late Set) {
	n := len(at)
	view := View{Epoch: 1, Size: n, Capacity: n + 2}
	for i, h := range at {
		p := w.newProc(h)
		p.id = ID{i, 1}
		view.Members = append(view.Members, Member{ID: p.id, Nonce: p.nonce, Host: uint64(p.host)})
		w.numbers[p.id] = p.nonce
	}
	w.group(1, SetOf(upTo(n+2)...))
	w.prog = []uint64{1}
	for i, s := range subs {
		w.group(uint64(100+i), s)
		w.prog = append(w.prog, uint64(100+i))
	}
	w.prog = append(w.prog, 1)
	if !late.Empty() {
		w.create = len(w.prog) - 1
		w.prog = append(w.prog, 200)
		w.group(200, late)
	}
	for _, p := range w.procs {
		var gs []Group
		for _, id := range w.ids() {
			g := w.groups[id]
			if id != 200 && g.slots.Has(p.id.Slot) {
				gs = append(gs, Group{ID: id, Slots: g.slots, Version: 1})
			}
		}
		p.start(p.id, view, gs, Welcome{})
	}
}

func upTo(n int) (s []int) {
	for i := range n {
		s = append(s, i)
	}
	return s
}

func (g *simGroup) at(host, pid int) *arrival {
	for len(g.arr[host]) <= pid {
		g.arr[host] = append(g.arr[host], arrival{})
	}
	return &g.arr[host][pid]
}

func (w *world) ids() (ids []uint64) {
	for id := range w.groups {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (w *world) group(id uint64, slots Set) {
	g := &simGroup{id: id, slots: slots}
	for range w.hosts {
		g.words = append(g.words, &word{version: 1})
	}
	g.arr = make([][]arrival, w.hosts)
	w.groups[id] = g
}

func (w *world) newProc(host int) *proc {
	p := &proc{w: w, pid: len(w.procs), host: host, silent: map[int]bool{}, done: map[uint64]uint64{},
		arrived: map[uint64]arrival{}, known: map[uint64]bool{}, ver: map[uint64]uint64{}}
	binary.BigEndian.PutUint64(p.nonce[:], uint64(p.pid)+1)
	w.procs = append(w.procs, p)
	return p
}

// board is a host's memory. Between any two accesses another process of the host may run.
type board struct {
	p  *proc
	id ID
}

func (b board) Publish(r Record) {
	b.p.w.boards[b.p.host][b.id] = r
	b.p.preempt()
}

func (b board) Read(id ID) (Record, bool) {
	b.p.preempt()
	r, ok := b.p.w.boards[b.p.host][id]
	return r, ok
}

// preempt lets a process of the same host take a message in the middle of this one's step.
func (p *proc) preempt() {
	w := p.w
	if w.nested > 0 || !w.chance(0.1) {
		return
	}
	w.nested++
	for _, q := range w.procs {
		if q.host == p.host && q != p && q.m != nil && !q.dead && !q.pause && w.chance(0.5) {
			for _, o := range w.procs {
				l := w.links[[2]int{o.pid, q.pid}]
				if o != p && l != nil && !l.down && len(l.queue) > 0 {
					l.pop()
					break
				}
			}
		}
	}
	w.nested--
}

func (l *link) pop() {
	if len(l.queue) > 0 {
		f := l.queue[0]
		l.queue = l.queue[1:]
		f()
	}
}

// do runs f in the process: now, or when it runs again.
func (p *proc) do(f func()) {
	switch {
	case p.dead:
	case p.pause:
		p.back = append(p.back, f)
	default:
		f()
	}
}

// step gives the machine an event.
func (p *proc) step(e Event) {
	if p.m == nil || p.dead {
		return
	}
	p.w.steps++
	if p.w.trace {
		p.w.tr("%v <- %s", p.id, text(e))
	}
	p.effects(p.m.Step(p.w.now, e))
}

func text(x any) string {
	s := strings.ReplaceAll(fmt.Sprintf("%T%+v", x, x), "fault.", "")
	var b strings.Builder
	for len(s) > 0 { // sets are long
		i := strings.Index(s, "[")
		if i < 0 {
			break
		}
		j := strings.Index(s[i:], "]")
		if j > 0 && len(strings.Fields(s[i+1:i+j])) == MaxSlots/64 && !strings.ContainsAny(s[i+1:i+j], "[{:") {
			b.WriteString(s[:i] + "set(" + strings.TrimRight(s[i+1:i+j], " 0") + ")")
			s = s[i+j+1:]
			continue
		}
		b.WriteString(s[:i+1])
		s = s[i+1:]
	}
	r := b.String() + s
	if len(r) > 700 {
		r = r[:700] + "..."
	}
	return strings.ReplaceAll(strings.ReplaceAll(r, "Nonce:[0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0] ", ""), "head:", "")
}

func (p *proc) effects(es []Effect) {
	for _, e := range es {
		if p.dead {
			return
		}
		if p.fuse > 0 {
			if p.fuse--; p.fuse == 0 {
				p.w.tr("%v crashes in mid-step", p.id)
				p.crash()
				return
			}
		}
		if p.w.trace {
			if t, ok := e.(Timer); !ok || t.At == 0 && false {
				p.w.tr("%v    -> %s", p.id, text(e))
			}
		}
		if p.w.before != nil && p.w.before(p, e) {
			p.crash()
			return
		}
		p.effect(e)
	}
}

func (p *proc) effect(e Effect) {
	w := p.w
	switch e := e.(type) {
	case Send:
		w.send(p, e)
	case Timer:
		p.timer = e.At
		if e.At != 0 {
			at := e.At
			w.at(max(at-w.now, 0), func() {
				p.do(func() {
					if p.timer == at {
						p.timer = 0
						p.step(Tick{})
					}
				})
			})
		}
	case Close:
		p.close(e)
	case Reopen:
		for _, id := range e.Groups {
			if g := w.groups[id]; g != nil && g.words[p.host].closed && g.words[p.host].ballot == e.Ballot {
				g.words[p.host].closed = false
			}
		}
		p.poke()
	case Install:
		p.install(e)
	case AskWaiting:
		tok, id := e.Token, e.Group
		w.at(w.rnd(0, ms/2), func() {
			p.do(func() {
				x := Waiting{Token: tok, Arrived: p.arrived[id].seq}
				if p.busy {
					x.Group, x.Seq, x.Missing = p.group, p.seq, p.missing()
				}
				p.step(x)
			})
		})
	case AskWitness:
		w.askWitness(p, e)
	case Hold:
		p.holding, p.holdAt = true, e.Count
		if p.inBound {
			p.boundary()
		}
	case Release:
		p.holding = false
		if p.inBound {
			p.leaveBoundary()
		}
	case Evicted:
		if v := w.check(p, e.Epoch); findMember(v.Members, p.id) != nil {
			w.bad("rank %v is evicted and is in epoch %d: %s", p.id, e.Epoch, e.Why)
		}
		p.end("evicted: " + e.Why)
	case NoQuorum:
		p.end("no quorum: " + e.Why)
	case Left:
		p.end("left")
	}
}

func (p *proc) end(why string) {
	p.ended = why
	p.w.tr("%v ends: %s", p.id, why)
	p.crash()
}

// crash ends a process: what it sent last may be lost, its host sees it soon.
func (p *proc) crash() {
	if p.dead {
		return
	}
	w := p.w
	p.dead = true
	for _, q := range w.procs {
		if l := w.links[[2]int{p.pid, q.pid}]; l != nil && p.ended == "" && w.chance(0.3) {
			l.queue = l.queue[:w.rng.IntN(len(l.queue)+1)]
		}
		if q.host == p.host && q != p {
			w.at(w.rnd(ms/10, 5*ms), func() { q.do(func() { q.step(Died{p.id}) }) })
		}
	}
	w.watch(p)
}

// watch looks after HeartbeatLimit whether somebody is still not heard.
func (w *world) watch(p *proc) {
	for _, q := range w.procs {
		if q.host != p.host {
			w.watchPair(p, q)
			w.watchPair(q, p)
		}
	}
}

func (w *world) mute(p, q *proc) bool { // q hears nothing of p
	l := w.links[[2]int{p.pid, q.pid}]
	return p.dead || p.pause || l != nil && l.down
}

func (w *world) watchPair(p, q *proc) {
	if p.id.Inc == 0 && p.m == nil {
		return
	}
	if w.mute(p, q) {
		if !q.silent[p.pid] {
			w.at(simHL+w.rnd(0, 5*ms), func() {
				if w.mute(p, q) && !q.silent[p.pid] && !q.dead && !q.pause && p.id.Inc > 0 && q.m != nil {
					q.silent[p.pid] = true
					q.step(Silent{p.id})
				}
			})
		}
	} else if q.silent[p.pid] {
		w.at(w.rnd(ms, 3*ms), func() {
			q.do(func() {
				if !w.mute(p, q) && q.silent[p.pid] {
					q.silent[p.pid] = false
					q.step(Heard{p.id})
				}
			})
		})
	}
}

// send puts a message on a link: in order, after a while.
func (w *world) send(p *proc, s Send) {
	var q *proc
	for _, x := range w.procs {
		if s.To.Inc != 0 && x.id == s.To || s.To.Inc == 0 && x.nonce == s.Nonce {
			q = x
		}
	}
	if q == nil || q.dead {
		return
	}
	msg := s.Msg
	if w.wire {
		b := AppendMsg(nil, msg)
		x, err := ParseMsg(b)
		if err != nil {
			w.bad("codec: %v of %T", err, msg)
			return
		}
		if !bytes.Equal(AppendMsg(nil, x), b) {
			w.bad("codec: %T is not the same after parsing", msg)
		}
		msg = x
	}
	k := [2]int{p.pid, q.pid}
	l := w.links[k]
	if l == nil {
		l = &link{}
		w.links[k] = l
	}
	l.queue = append(l.queue, func() {
		q.do(func() { q.receive(p, msg) })
	})
	d := w.rnd(ms/20, ms)
	if w.chance(0.05) {
		d = w.rnd(ms, 8*ms)
	}
	l.last = max(l.last, w.now+d)
	w.at(l.last-w.now, func() {
		if !l.down {
			l.pop()
		}
	})
}

func (q *proc) receive(p *proc, msg Msg) {
	if q.m == nil {
		q.joinReply(msg)
		return
	}
	r := Received{Msg: msg, Nonce: p.nonce}
	if p.id.Inc != 0 && (findMember(q.m.view.Members, p.id) != nil || p.id.Inc == 1 || q.everKnew(p.id)) {
		r = Received{From: p.id, Msg: msg}
	}
	q.step(r)
}

func (q *proc) everKnew(id ID) bool {
	return id.Slot < len(q.m.view.Incs) && id.Inc <= q.m.view.Incs[id.Slot]
}

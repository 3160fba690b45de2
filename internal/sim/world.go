package sim

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/pg"
)

const (
	heartbeatLimit = 300 * time.Millisecond
	opTimeout      = 600 * time.Millisecond
	detect         = time.Second // detection and agreement, generously: P5's bound is made of it
	endOfTime      = 120 * time.Second
	mostTurns      = 3_000_000
)

// hostOf is a machine.
type hostOf struct {
	id    int
	words []byte
	delay time.Duration // to others
}

// World is a simulated world, and what is known of it.
type World struct {
	kernel
	Seed     uint64
	size     int // founders
	capacity int
	onlyTCP  bool
	grain    uint32 // how seldom an access to memory gives way: a mask

	hosts   []*hostOf
	procs   []*proc
	byNonce map[mesh.Nonce]*proc
	first   fault.View

	sleepers  []*thread
	accesses  uint64
	changes   int
	cut       map[[2]int]int // from, to: by how many faults
	slow      map[[2]int]time.Duration
	corrupt   int
	pipeBytes int

	frameBytes int
	large      int
	retain     int

	steps []step
	kinds []pg.Options // by group
	ids   []uint64
	slots map[uint64][]int // of a group

	faults  []*strike
	running int // faults that are not over
	fuse    struct {
		on   bool
		p    *proc // nil: who comes first
		left int
	}
	trap struct {
		kind Kind
		msg  string
		left int
	}
	front    int
	formed   int
	returns  int
	deeds    []history.Deed
	last     fault.Set // members of the newest view that somebody has
	epoch    uint64
	since    []time.Duration // by epoch: when somebody had that view
	joined   [][]entry       // by slot, in the order of coming
	Coverage Coverage
	Bad      []history.Violation
	Stuck    string
	pool     *pool
	trace    *strings.Builder
}

func (w *World) violate(property, f string, a ...any) {
	if len(w.Bad) < 10 {
		w.Bad = append(w.Bad, history.Violation{Property: property, Text: fmt.Sprintf(f, a...)})
	}
}

// pool keeps memory from one world to the next.
type pool struct {
	arenas [][]byte
	words  [][]byte
	boards [][]byte
	frames [][]byte
	used   []struct {
		b []byte
		n int
	}
}

func take(free *[][]byte, n int) []byte {
	if k := len(*free); k > 0 {
		b := (*free)[k-1]
		*free = (*free)[:k-1]
		if len(b) >= n {
			return b[:n]
		}
	}
	return make([]byte, n)
}

const (
	arenaBytes = 1 << 20
	wordsBytes = 16<<10 + 64*512
	boardBytes = 16 << 10
	frameBytes = 32 << 10
)

func newWorld(seed uint64, o *Options, pl *pool) *World {
	w := &World{Seed: seed, cut: map[[2]int]int{}, slow: map[[2]int]time.Duration{}, slots: map[uint64][]int{}, byNonce: map[mesh.Nonce]*proc{},
		pool: pl}
	w.rnd = rand.New(rand.NewPCG(seed, 0x5e44))
	switch x := w.rnd.Float64(); {
	case o.Ranks > 0:
		w.size = o.Ranks
	case x < 0.72:
		w.size = 2 + w.rnd.IntN(4)
	case x < 0.96:
		w.size = 5 + w.rnd.IntN(4)
	case x < 0.999:
		w.size = 9 + w.rnd.IntN(8)
	default:
		w.size = 17 + w.rnd.IntN(48)
	}
	hosts := 1
	if o.Hosts > 0 {
		hosts = o.Hosts
	} else if w.chance(0.65) {
		hosts = 1 + w.rnd.IntN(min(w.size, 16))
	}
	w.capacity = w.size
	if w.chance(0.3) {
		w.capacity += 1 + w.rnd.IntN(2)
	}
	w.onlyTCP = w.chance(0.15)
	w.grain = uint32(1)<<(1+w.rnd.IntN(6)) - 1
	w.frameBytes, w.large, w.pipeBytes, w.retain = frameBytes, 200, 256<<10, 64<<10
	if w.size > 12 {
		w.frameBytes = 256 << 10
	}
	if w.chance(0.1) {
		w.frameBytes, w.large = 256<<10, 2600 // more than a slot: in chunks
	}
	if w.chance(0.2) {
		w.retain = -1 // everything takes the completion hop
	}
	for i := range hosts {
		h := &hostOf{id: i, delay: w.between(20*time.Microsecond, 400*time.Microsecond)}
		h.words = w.lend(take(&pl.words, wordsBytes), wordsBytes)
		w.hosts = append(w.hosts, h)
	}
	w.joined = make([][]entry, w.capacity)
	w.plan()
	w.ids = make([]uint64, len(w.kinds))
	w.ids[0] = 1
	for s := range w.capacity {
		w.slots[1] = append(w.slots[1], s)
	}
	return w
}

// lend remembers to give b back, of which the first n bytes may be used.
func (w *World) lend(b []byte, n int) []byte {
	w.pool.used = append(w.pool.used, struct {
		b []byte
		n int
	}{b, n})
	return b
}

// giveBack clears what was used and keeps it for the next world.
func (w *World) giveBack() {
	for _, u := range w.pool.used {
		clear(u.b[:u.n])
		switch len(u.b) {
		case arenaBytes:
			w.pool.arenas = append(w.pool.arenas, u.b)
		case wordsBytes:
			w.pool.words = append(w.pool.words, u.b)
		case boardBytes:
			w.pool.boards = append(w.pool.boards, u.b)
		case frameBytes:
			w.pool.frames = append(w.pool.frames, u.b)
		}
	}
	w.pool.used = w.pool.used[:0]
}

// Reserve implements pg.Ground.
func (p *proc) Reserve(n int) error {
	if n > len(p.arena) {
		return fmt.Errorf("sim: arena of %d bytes, %d are asked for", len(p.arena), n)
	}
	for i := range p.w.pool.used {
		if u := &p.w.pool.used[i]; len(u.b) == len(p.arena) && &u.b[0] == &p.arena[0] {
			u.n = max(u.n, n)
		}
	}
	return nil
}

func (w *World) newProc(h *hostOf, slot int, rejoin bool) *proc {
	p := &proc{w: w, pid: len(w.procs), host: h, slot: slot, peers: map[int]*peer{}, rate: 1, since: w.now, born: w.now, base: w.now + w.between(0, time.Hour), ran: -time.Hour}
	if w.chance(0.2) {
		p.rate = 0.8 + 0.4*w.rnd.Float64()
		w.count(Skew)
	}
	le.PutUint64(p.nonce[:], uint64(p.pid)+1)
	p.arena = w.lend(take(&w.pool.arenas, arenaBytes), 0)
	board := boardBytes
	if w.size > 12 {
		board = 64 << 10
	}
	p.board = w.lend(take(&w.pool.boards, board), board)
	p.words = h.words
	if w.onlyTCP {
		p.words = w.lend(take(&w.pool.words, wordsBytes), wordsBytes)
	}
	w.procs = append(w.procs, p)
	w.byNonce[p.nonce] = p
	opts := w.kinds[0]
	var err error
	p.seat, err = pg.Simulate(pg.Config{
		Rank: slot, Size: w.size, Capacity: w.capacity, Rejoin: rejoin, Options: opts, Retain: w.retain, HeartbeatLimit: heartbeatLimit,
		ArenaBytes: arenaBytes, Log: w.logger(p),
	}, p, p.words, [16]byte{1})
	if err != nil {
		panic(err)
	}
	p.loop = w.spawn(p, p.turn)
	p.caller = w.spawn(p, func() { p.live(!rejoin) })
	w.wake(p.loop, 0)
	w.wake(p.caller, w.between(0, 100*time.Microsecond))
	if w.chance(0.5) {
		p.second = w.spawn(p, p.serve)
		w.wake(p.second, 0)
	}
	return p
}

func (p *proc) memberOf() fault.Member {
	m := fault.Member{Nonce: p.nonce, Host: p.Host(), Addr: []byte{byte(p.pid)}}
	m.Slot = p.slot
	return m
}

// found puts the founders on hosts and links them.
func (w *World) found() {
	w.first = fault.View{Epoch: 1, Size: w.size, Capacity: w.capacity}
	for s := range w.size {
		h := w.hosts[s%len(w.hosts)]
		if w.chance(0.3) {
			h = w.hosts[w.rnd.IntN(len(w.hosts))]
		}
		p := w.newProc(h, s, false)
		m := p.memberOf()
		m.Inc = 1
		w.first.Members = append(w.first.Members, m)
	}
	for i, p := range w.procs {
		for _, q := range w.procs[:i] {
			w.meet(p, q)
		}
	}
}

func (w *World) capacityOf(group int) int {
	if group == 0 {
		return w.capacity
	}
	return 0
}

// baseOf is how many ranks a group had at first.
func (w *World) baseOf(i int, g *pg.Group) int {
	if i == 0 {
		return w.size
	}
	return len(g.Slots())
}

func (w *World) base(id uint64) int {
	if id == 1 {
		return w.size
	}
	return len(w.slots[id])
}

// What processes tell.

func (w *World) founded(p *proc, epoch uint64) {
	w.joined[p.slot] = append(w.joined[p.slot], entry{epoch, p.inc})
	if epoch == 1 {
		if w.formed++; w.formed == w.size {
			w.last, w.epoch = fault.Set{}, 1
			for s := range w.size {
				w.last.Add(s)
			}
		}
	}
}

func (w *World) viewed(p *proc, e *pg.Event) {
	if e.Epoch > w.epoch {
		w.epoch, w.last = e.Epoch, e.Active
		for uint64(len(w.since)) <= e.Epoch {
			w.since = append(w.since, w.now)
		}
		w.Coverage.Views++
		w.minorities()
	}
}

// incAt is the incarnation that held a slot in an epoch.
func (w *World) incAt(slot int, epoch uint64) (inc uint32) {
	best := uint64(0)
	for _, x := range w.joined[slot] {
		if x.epoch <= epoch && x.epoch > best {
			best, inc = x.epoch, x.inc
		}
	}
	return inc
}

// entry is the epoch in which an incarnation came in.
type entry struct {
	epoch uint64
	inc   uint32
}

func (w *World) groupIs(i int, g *pg.Group) {
	if w.ids[i] == 0 {
		w.ids[i] = g.ID()
		w.slots[g.ID()] = append([]int(nil), g.Slots()...)
	} else if w.ids[i] != g.ID() {
		w.violate("P9", "group %d of the program has ids %x and %x", i, w.ids[i], g.ID())
	}
}

// place: a process has come to a place of the program.
func (w *World) place(p *proc) {
	if p.prog.at > w.front {
		w.front = p.prog.at
		w.strikeAt(w.front)
	}
}

func (w *World) progress(p *proc, e *history.Event) {
	w.returns++
	w.Coverage.Returns++
}

// gone: a process ends by itself.
func (w *World) gone(p *proc, o history.Outcome) {
	if o == history.NoQuorum { // the others may go on without it, if they find that they can
		w.deed(p, history.Minority, 0, true)
	}
	if o != history.Left && w.chance(0.8) && !w.memberless(p) && !w.taken(p) {
		w.restart(p, w.between(time.Millisecond, 50*time.Millisecond))
	}
	w.crash(p, o)
}

// someone is a living member that a newcomer asks.
func (w *World) someone(p *proc) *proc {
	var qs []*proc
	for _, q := range w.procs {
		if q != p && !q.dead && q.member && w.last.Has(q.slot) {
			qs = append(qs, q)
		}
	}
	if len(qs) == 0 {
		return nil
	}
	return qs[w.rnd.IntN(len(qs))]
}

// memberless says that nobody but p is a member any more.
func (w *World) memberless(p *proc) bool {
	for _, q := range w.procs {
		if q != p && !q.dead && q.member {
			return false
		}
	}
	return true
}

// taken says that another living process asks for p's slot, or has it.
func (w *World) taken(p *proc) bool {
	for _, q := range w.procs {
		if q != p && !q.dead && q.slot == p.slot {
			return true
		}
	}
	return false
}

// restart starts a replacement after a while.
func (w *World) restart(p *proc, d time.Duration) {
	w.later(d, func() {
		if !w.taken(p) {
			w.count(Restart)
			w.newProc(p.host, p.slot, true)
		}
	})
}

// settled says that nothing is still to come.
func (w *World) settled() bool {
	if w.running > 0 || w.front < len(w.steps)-1 {
		return false
	}
	w.fuse.on, w.trap.msg = false, "" // what has not gone off by now does not any more
	for _, f := range w.faults {
		if !f.done {
			return false
		}
	}
	for _, p := range w.procs {
		if !p.dead && (p.stopped || !p.member || p.seat.World.Epoch() != w.epoch) { // one that does not know yet that it is out
			return false
		}
	}
	return true
}

// done says that the run is over.
func (w *World) done() bool {
	if w.formed < w.size {
		return false
	}
	members := false
	for _, p := range w.procs {
		if !p.dead && p.member {
			members = true
			if !p.over {
				return false
			}
		}
	}
	return !members || w.settled() || w.running == 0 // who came too late is not let in any more
}

func (w *World) latency(p, q *proc) time.Duration {
	if p.host == q.host {
		return w.between(3*time.Microsecond, 30*time.Microsecond)
	}
	d := p.host.delay + w.between(0, q.host.delay)
	if w.rnd.Uint32()&31 == 0 {
		d += w.between(0, 5*time.Millisecond)
	}
	return d + w.slow[[2]int{p.host.id, q.host.id}]
}

func (w *World) isCut(p, q *hostOf) bool { return p != q && w.cut[[2]int{p.id, q.id}] > 0 }

// minorities notes who may now find out that too few are in its reach.
func (w *World) minorities() {
	if w.formed < w.size {
		return
	}
	n := w.last.Len()
	for _, p := range w.procs {
		if p.dead || !p.member {
			continue
		}
		var seen, looked fault.Set
		for i := len(w.procs) - 1; i >= 0; i-- { // who holds a slot now is the last that came in there
			q := w.procs[i]
			if !q.member || !w.last.Has(q.slot) || looked.Has(q.slot) {
				continue
			}
			looked.Add(q.slot)
			switch {
			case q == p, !q.dead && !q.stopped && !w.isCut(p.host, q.host) && !w.isCut(q.host, p.host), !q.dead && q.host == p.host:
				seen.Add(q.slot)
			case q.dead:
				for _, r := range w.procs {
					if !r.dead && !r.stopped && r.member && r.host == q.host && !w.isCut(p.host, r.host) && !w.isCut(r.host, p.host) {
						seen.Add(q.slot)
						break
					}
				}
			}
		}
		if 2*seen.Len() <= n {
			w.deeds = append(w.deeds, history.Deed{Time: int64(w.now), What: history.Minority, Proc: p.pid})
		}
	}
}

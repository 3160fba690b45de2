package collectives

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/dtype"
)

// stConfig is one exploration.
type stConfig struct {
	ranks    int
	depth    int
	ops      []Kind
	ahead    bool // a caller issues as many operations as the slots hold, not one after the other
	faults   int  // crashes, exclusions of living ranks, and changes that nobody is lost in, of these
	crash    bool // before any step
	stop     bool // a rank that lives is excluded, as one that was stopped is, and may go on at any time
	all      bool // who is to be excluded may promise that too
	empty    bool // a change closes the word and is given up, or loses nobody
	fine     bool // stops also after each load of a seal
	exact    bool // nothing that a thread has seen is forgotten before its next call
	switches int  // at most so many times a thread that could go on is set aside; -1: any number
	limit    int  // states; 0: all
}

// stView is a view that the oracle has decided. One in which nobody is lost changes no version.
type stView struct {
	members uint8 // ranks
	cut     uint64
	version int // index of the view whose version the group has with it
}

// stOracle is the agreement, in the simplest way that keeps its rules: the living speak, at least one; the cut is the most
// that any member of the next view has, as they say. It is a plain value, so that it can be tried out.
type stOracle struct {
	dead   uint8 // crashed
	faults int8
	last   int8 // thread that ran last
	used   int8 // switches
	views  [5]stView
	n      int8 // views decided
	at     [3]int8

	open  bool  // a change is under way
	named uint8 // without these
	spoke uint8
	said  [3]int8 // -1: nobody has said
}

func (o *stOracle) view() *stView { return &o.views[o.n-1] }

// gone says that a rank is in no view any more.
func (o *stOracle) gone(r int) bool { return o.view().members&(1<<r) == 0 }

func (o *stOracle) alive(r int) bool { return o.dead&(1<<r) == 0 }

// survivors are the ranks that must get on: who lives and nobody wants to be rid of.
func (o *stOracle) survivors() (m uint8) {
	m = o.view().members &^ o.dead
	if o.open {
		m &^= o.named
	}
	return m
}

// stResult is what an operation returned.
type stResult struct {
	epoch uint64 // 0: it has not returned
	set   uint8
	sum   uint64
}

type stRank struct {
	w       *stWorld
	rank    int
	mem     []byte
	comm    *Comm
	ops     []Op
	in      [][]byte
	out     [][]byte
	first   int // operations that have returned
	issued  int
	results []stResult
	redone  uint8 // operations that somebody had done again in a later version when it last looked
}

// head is the sequence of the oldest operation that has not returned.
func (x *stRank) head() uint64 { return uint64(x.first + 1) }

// stWorld is the ranks of one host, their callers and loops, and the oracle.
type stWorld struct {
	cfg     stConfig
	shape   Shape
	mem     *stMemory
	words   []byte
	ranks   []*stRank
	threads []*stThread // callers, then loops
	oracle  stOracle
	bad     string // what is wrong
	trace   func(f string, a ...any)
}

const stSlot = 64

func newStWorld(cfg stConfig) *stWorld {
	w := &stWorld{cfg: cfg, shape: Shape{Size: cfg.ranks, SlotBytes: stSlot, Depth: cfg.depth, Lanes: 1}}
	w.mem = &stMemory{w: w, words: map[stPlace]any{}}
	w.words = make([]byte, wordIndex+wordEntry)
	for r := range cfg.ranks {
		x := &stRank{w: w, rank: r, mem: make([]byte, dirBytes+w.shape.Bytes()), results: make([]stResult, len(cfg.ops))}
		for range cfg.ops {
			x.in, x.out = append(x.in, make([]byte, 8)), append(x.out, make([]byte, 8))
		}
		x.ops = make([]Op, len(cfg.ops))
		w.ranks = append(w.ranks, x)
	}
	for i := range 2 * cfg.ranks {
		w.threads = append(w.threads, &stThread{w: w, rank: i % cfg.ranks, loop: i >= cfg.ranks})
	}
	return w
}

// region says whose memory b is; -1: the host's words.
func (w *stWorld) region(b []byte) int {
	for r, x := range w.ranks {
		if &b[0] == &x.mem[0] {
			return r
		}
	}
	return -1
}

// value is what a rank gives to an operation: no two sums of a set of them are equal, nor their halves.
func value(r int, seq uint64) uint64 { return (seq + 2) * (1<<32 + 1) << (8 * r) }

// reset makes the world new. Of its memory the parts that are used are cleared.
func (w *stWorld) reset() {
	for _, t := range w.threads {
		t.kill()
		*t = stThread{w: w, rank: t.rank, loop: t.loop, next: t.next, stop: t.stop, yield: t.yield}
	}
	w.oracle = stOracle{faults: int8(w.cfg.faults), last: -1, n: 1, said: [3]int8{-1, -1, -1}}
	w.oracle.views[0].members = 1<<w.cfg.ranks - 1
	clear(w.words[:8])
	clear(w.words[wordIndex:])
	var ms []Member
	for r, x := range w.ranks {
		clear(x.mem[:entryBytes])
		clear(x.mem[firstArea : firstArea+areaHeader])
		for i := range w.cfg.depth {
			b := firstArea + areaHeader + i*w.shape.slotStride()
			clear(x.mem[b : b+slotCounts])
			clear(x.mem[b+w.shape.dataOffset():][:stSlot])
		}
		ms = append(ms, Member{Rank: r, Slot: r, Inc: 1, Arena: x.mem})
	}
	for r, x := range w.ranks {
		a, err := NewArena(x.mem, func(int) error { return nil }, w.shape)
		if err == nil {
			a.Memory = w.mem
			x.comm, err = New(Config{Group: 5, Rank: r, Slots: []int{0, 1, 2}[:w.cfg.ranks], Arena: a, Words: w.words, Shape: w.shape}, 1, 0, ms)
		}
		if err != nil {
			panic(err)
		}
		x.first, x.issued, x.redone = 0, 0, 0
		clear(x.results)
		for i := range x.ops {
			binary.LittleEndian.PutUint64(x.in[i], value(r, uint64(i+1)))
			clear(x.out[i])
			x.ops[i] = Op{Call: Call{Kind: w.cfg.ops[i]}}
			if w.cfg.ops[i] == AllReduce {
				x.ops[i].Call = Call{Kind: AllReduce, DType: dtype.I64, Reduce: dtype.Sum, In: x.in[i], Out: x.out[i]}
			}
		}
	}
	for r, x := range w.ranks {
		for _, p := range x.comm.Current().locals {
			if a, err := x.comm.bind(p); a == nil || err != nil {
				panic("an area is missing")
			}
		}
		w.threads[r].start(x.call)
	}
}

func (w *stWorld) members(mask uint8) (ms []Member) {
	for m := mask; m != 0; m &= m - 1 {
		r := bits.TrailingZeros8(m)
		ms = append(ms, Member{Rank: r, Slot: r, Inc: 1, Arena: w.ranks[r].mem})
	}
	return ms
}

func (w *stWorld) fail(f string, a ...any) {
	if w.bad == "" {
		w.bad = fmt.Sprintf(f, a...)
	}
}

// process is what a thread reads beside words: a caller its process's version, which the loop changes; a loop who has died.
func (w *stWorld) process(t *stThread) uint64 {
	if t.loop {
		return uint64(w.oracle.dead)
	}
	return w.ranks[t.rank].comm.Current().Epoch
}

// call is a caller: it steps its operations as pg does, and sleeps when there is nothing to do.
func (x *stRank) call(t *stThread) {
	for x.first < len(x.ops) {
		x.boundary(t, 1)
		if !x.step(t) {
			x.comm.Sleep(time.Second, func() bool {
				x.boundary(t, 2)
				return x.step(t)
			})
			t.hasGen = false
		}
	}
	t.over = true
	t.hist = 0
}

// boundary forgets what the thread has seen: what its next call depends on is explicit.
func (x *stRank) boundary(t *stThread, tag uint64) {
	t.hist = mix(tag, uint64(x.first)<<8|uint64(x.issued))
	t.hist = mix(t.hist, x.w.process(t))
	x.redone = 0
	for i := x.first; i < x.issued; i++ {
		o := &x.ops[i]
		f := uint64(b2i(o.decided)) | uint64(b2i(o.pulled))<<1 | uint64(b2i(o.Err != nil))<<2
		t.hist = mix(t.hist, o.Ver.Epoch<<32|uint64(o.published)<<24|uint64(o.arrived)<<16|uint64(o.sentTo)<<8|f)
		t.hist = mix(t.hist, binary.LittleEndian.Uint64(x.out[i]))
	}
	t.mark = t.hist
	x.look()
}

// look notes which of the rank's operations others have done again. It is called when the rank begins a call, and when it
// looks at the seal of another: who looks after that must not take what it finds for his operation any more.
func (x *stRank) look() {
	for i := x.first; i < x.issued; i++ {
		for q, y := range x.w.ranks {
			if x.w.oracle.alive(q) && y.results[i].epoch > x.ops[i].Ver.Epoch {
				x.redone |= 1 << i
			}
		}
	}
}

// step takes the operations on once, and says whether something moved.
func (x *stRank) step(t *stThread) (moved bool) {
	room := 1
	if x.w.cfg.ahead {
		room = x.w.cfg.depth
	}
	for x.issued < len(x.ops) && x.issued < x.first+room {
		if err := x.comm.Start(&x.ops[x.issued], uint64(x.issued+1), x.comm.Current()); err != nil {
			panic(err)
		}
		x.issued++
		moved = true
	}
	for i := x.first; i < x.issued; i++ {
		o := &x.ops[i]
		switch st := x.comm.Step(o, i == x.first); st {
		case Done:
			x.returned(o)
			x.first++
			return true
		case Moved:
			x.comm.Restart(o)
			return true
		case Mismatch, Failed:
			x.w.fail("%v: operation %d: status %d: %v", t, o.Seq, st, o.Err)
			return false
		case Progress:
			moved = true
		}
	}
	return moved
}

// returned notes what a rank returned, and checks it.
func (x *stRank) returned(o *Op) {
	w, i := x.w, int(o.Seq-1)
	r := stResult{epoch: o.Ver.Epoch, sum: binary.LittleEndian.Uint64(x.out[i])}
	for q := range w.ranks {
		if o.Ver.Active.Has(q) {
			r.set |= 1 << q
		}
	}
	x.results[i] = r
	if w.trace != nil {
		w.trace("rank %d returns from operation %d: version %d, set %b, sum %x", x.rank, o.Seq, r.epoch, r.set, r.sum)
	}
	want := uint64(0)
	for q := range w.ranks {
		if r.set&(1<<q) != 0 {
			want += value(q, o.Seq)
		}
	}
	if o.Kind == Barrier {
		want = 0
	}
	if r.sum != want {
		w.fail("P2: rank %d returns from operation %d with %x, the contributions of set %b make %x", x.rank, o.Seq, r.sum, r.set, want)
	}
	if n := int(r.epoch) - 1; n < 0 || n >= int(w.oracle.n) || w.oracle.views[n].members != r.set {
		w.fail("P3: rank %d returns from operation %d of version %d with set %b, which that version has not", x.rank, o.Seq, r.epoch, r.set)
	}
	if x.redone&(1<<i) != 0 {
		w.fail("P4: rank %d returns from operation %d in version %d, and others had done it again before it last looked at their seals", x.rank, o.Seq, r.epoch)
	}
}

// agree checks that no two living members of the newest view have returned differently, and that none has returned in an
// earlier version from what its cut leaves to a later one.
func (w *stWorld) agree() {
	o := &w.oracle
	for r, x := range w.ranks {
		for n := 1; n < int(o.n) && !o.gone(r) && o.alive(r); n++ {
			for i, q := range x.results {
				if v := o.views[n]; v.version == n && q.epoch != 0 && q.epoch <= uint64(n) && uint64(i+1) > v.cut {
					w.fail("P3: rank %d returned from operation %d in version %d, and version %d begins after operation %d", r, i+1, q.epoch, n+1, v.cut)
				}
			}
		}
	}
	for i := range w.cfg.ops {
		var first *stRank
		for r, x := range w.ranks {
			if o.gone(r) || !o.alive(r) || x.results[i].epoch == 0 {
				continue
			}
			if first == nil {
				first = x
			} else if first.results[i] != x.results[i] {
				w.fail("P1: operation %d: rank %d returned %+v, rank %d %+v", i+1, first.rank, first.results[i], r, x.results[i])
			}
		}
	}
}

// close is a promise: the loop of a rank closes the word and says what it finds.
func (w *stWorld) close(t *stThread) {
	epoch := uint64(w.oracle.n) + 1
	done := w.ranks[t.rank].comm.CloseWord(epoch, w.oracle.alive)
	o := &w.oracle
	if int(o.n)+1 != int(epoch) || !o.open {
		return // too late: it has been decided
	}
	o.spoke |= 1 << t.rank
	for r := range w.ranks {
		if seq, ok := done[r]; ok {
			o.said[r] = max(o.said[r], int8(seq))
		}
	}
}

// install is a commit: the rank's loop learns of the next view.
func (w *stWorld) install(t *stThread) {
	o, c := &w.oracle, w.ranks[t.rank].comm
	n := int(o.at[t.rank])
	o.at[t.rank]++
	v := o.views[n+1]
	if v.version == n+1 {
		c.Install(uint64(n+2), v.cut, w.members(v.members), "")
	} else {
		c.Reopen(uint64(n + 2))
	}
}

// key hashes all that the future depends on.
func (w *stWorld) key() uint64 {
	le, h := binary.LittleEndian, uint64(1)
	o := &w.oracle
	gen := le.Uint32(w.words[wordIndex+128:])
	for r, x := range w.ranks {
		h = mix(h, w.bytes(r))
		if !o.alive(r) {
			continue // of the dead the area remains
		}
		h = mix(h, uint64(x.redone))
		for _, q := range x.results {
			h = mix(h, q.epoch<<8|uint64(q.set))
			h = mix(h, q.sum)
		}
	}
	h = mix(h, le.Uint64(w.words[wordIndex:]))
	h = mix(h, uint64(le.Uint32(w.words[wordIndex+256:])))
	h = mix(h, le.Uint64(w.words[wordIndex+448:])) // free in production; a mutation counts there
	for _, t := range w.threads {
		if !o.alive(t.rank) {
			continue
		}
		h = mix(h, t.hist)
		h = mix(h, uint64(b2i(t.busy))|uint64(b2i(t.asleep))<<1|uint64(b2i(t.hasGen))<<2|uint64(b2i(t.hasGen && t.gen == gen))<<3|uint64(b2i(t.over))<<4)
	}
	h = mix(h, uint64(o.dead)|uint64(o.faults)<<8|uint64(o.n)<<16|uint64(b2i(o.open))<<24|uint64(o.named)<<32|uint64(o.spoke)<<40)
	for r := range o.said {
		h = mix(h, uint64(uint8(o.said[r]))|uint64(o.at[r])<<8)
	}
	for i := range o.n {
		h = mix(h, uint64(o.views[i].members)|o.views[i].cut<<8|uint64(o.views[i].version)<<16)
	}
	if w.cfg.switches >= 0 {
		h = mix(h, uint64(uint8(o.last))|uint64(o.used)<<8)
	}
	return h
}

// end hashes what a path came to, without how.
func (w *stWorld) end() uint64 {
	o, h := &w.oracle, uint64(2)
	for r, x := range w.ranks {
		h = mix(h, w.bytes(r))
		for _, q := range x.results {
			h = mix(mix(h, q.epoch<<8|uint64(q.set)), q.sum)
		}
	}
	for i := range o.n {
		h = mix(h, uint64(o.views[i].members)|o.views[i].cut<<8|uint64(o.views[i].version)<<16)
	}
	return mix(mix(h, uint64(o.dead)), binary.LittleEndian.Uint64(w.words[wordIndex:]))
}

// bytes hashes the area of a rank.
func (w *stWorld) bytes(r int) uint64 {
	le, b := binary.LittleEndian, w.ranks[r].mem
	h := mix(le.Uint64(b[firstArea:]), le.Uint64(b[firstArea+128:]))
	for i := range w.cfg.depth {
		s := b[firstArea+areaHeader+i*w.shape.slotStride():]
		h = mix(h, le.Uint64(s))
		for k := range callBytes / 8 {
			h = mix(h, le.Uint64(s[slotCall+8*k:]))
		}
		h = mix(h, le.Uint64(s[w.shape.dataOffset():]))
	}
	return h
}

// state says where everybody stands.
func (w *stWorld) state() string {
	var b strings.Builder
	for _, t := range w.threads {
		if t.busy {
			fmt.Fprintf(&b, "\n  %v: asleep %v, before %s of %v", t, t.asleep, t.op, t.access)
		}
	}
	fmt.Fprintf(&b, "\n  oracle: %+v\n  decision word %x", w.oracle, binary.LittleEndian.Uint64(w.words[wordIndex:]))
	return b.String()
}

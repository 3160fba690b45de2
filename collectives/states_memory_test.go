package collectives

import (
	"fmt"
	"iter"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/device/host"
)

// The memory on which every reachable state of the protocol on shared words is visited (states_test.go says how). Each
// thread is a coroutine that stops before an access to a word that another thread may touch.
//
// These are no scheduling points, because they commute with all that others do:
//   - what a rank's caller loads from its own area: nobody else ever stores there, which is checked;
//   - stores to ack words: nobody loads one while contributions lie whole in slots, which is checked;
//   - the directory: the areas are bound before the exploration begins;
//   - what a rank is about to complete, when no change is under way and none can come: nobody loads that any more.
//
// The plain stores of a call's header come with the access before them, the opening of the seal: who reads the header in
// between sees the seal open afterwards, either way. The bytes of a contribution are stored in two halves.
// What a caller reads plainly after it has decided is apart from the decision: it stops after that too. In a fine
// exploration it stops after each load of a seal as well.

// stKind is what a word is for.
type stKind uint8

const (
	stOther stKind = iota // directory, index, use: touched only while the world is made
	stDone
	stCompleting
	stPub
	stAck
	stHold
	stDec
	stGen
	stSleep
)

func (k stKind) String() string {
	return [...]string{"other", "done", "completing", "pub", "ack", "hold", "dec", "gen", "sleep"}[k]
}

// stMemory is the Memory of all ranks of the world.
type stMemory struct {
	w     *stWorld
	words map[stPlace]any
	cur   *stThread // who runs; nil: the world is being made
}

type stPlace struct{ region, off int }

type stWord struct {
	m     *stMemory
	p     *atomic.Uint64
	kind  stKind
	owner int // -1: the host's
	slot  int
}

type stWord32 struct {
	m    *stMemory
	p    *atomic.Uint32
	kind stKind
}

func (m *stMemory) Word64(b []byte, off int) Word {
	at := stPlace{m.w.region(b), off}
	if x, ok := m.words[at]; ok {
		return x.(*stWord)
	}
	x := &stWord{m: m, p: host.Word64(b, off), owner: at.region}
	switch rel := off - firstArea; {
	case at.region < 0 && off >= wordIndex:
		x.kind = map[int]stKind{0: stDec}[off-wordIndex]
	case at.region < 0 || rel < 0:
	case rel < areaHeader:
		x.kind = map[int]stKind{0: stDone, 128: stCompleting}[rel]
	default:
		x.slot = (rel - areaHeader) / m.w.shape.slotStride()
		x.kind = map[int]stKind{slotPub: stPub, slotAck: stAck, slotHold: stHold}[(rel-areaHeader)%m.w.shape.slotStride()]
	}
	m.words[at] = x
	return x
}

func (m *stMemory) Word32(b []byte, off int) Word32 {
	at := stPlace{m.w.region(b), off}
	if x, ok := m.words[at]; ok {
		return x.(*stWord32)
	}
	x := &stWord32{m: m, p: host.Word32(b, off), kind: map[int]stKind{128: stGen, 256: stSleep}[off-wordIndex]}
	m.words[at] = x
	return x
}

// Copy is done in two halves.
func (m *stMemory) Copy(dst, src []byte) {
	t := m.cur
	if t == nil {
		copy(dst, src)
		return
	}
	t.access = stOther
	t.pause("copy", 0)
	n := copy(dst, src[:len(src)/2])
	t.pause("copy", 1)
	copy(dst[n:], src[n:])
}

func (m *stMemory) Yield()             {}
func (m *stMemory) Now() time.Duration { return 0 }
func (m *stMemory) Rand() uint32       { return 0 }

// Wait stops until somebody wakes the word: nobody is woken by the clock here.
func (m *stMemory) Wait(w Word32, is uint32, _ time.Duration) {
	t := m.cur
	t.access = stOther
	t.pause("wait", 0)
	if w.(*stWord32).p.Load() != is {
		return
	}
	t.asleep = true
	t.pause("asleep", 0)
}

func (m *stMemory) Wake(Word32) {
	m.cur.access = stGen
	m.cur.pause("wake", 0)
	for _, t := range m.w.threads {
		t.asleep = false
	}
}

// before stops at an access, unless it commutes with all that others do.
func (x *stWord) before(store bool) {
	t := x.m.cur
	if t == nil {
		return
	}
	w := x.m.w
	mine := x.owner == t.rank
	switch {
	case store && x.owner >= 0 && (!mine || t.loop):
		w.fail("%v stores in the %v of rank %d", t, x.kind, x.owner)
	case x.kind == stOther && x.owner >= 0 || x.kind == stHold:
		w.fail("%v uses a word (%v) that has no place in this exploration", t, x.kind)
	case x.kind == stAck:
		if !store {
			w.fail("%v loads an ack word: it is no scheduling point in this exploration", t)
		}
		return
	case mine && !t.loop && !store, x.kind == stCompleting && store && w.settled():
		return
	}
	op := "load"
	if store {
		op = "store"
	}
	t.access, t.slot, t.of = x.kind, x.slot, x.owner
	t.pause(op, 0)
}

func (x *stWord) Load() uint64 {
	x.before(false)
	v := x.p.Load()
	t := x.m.cur
	if t == nil {
		return v
	}
	if x.kind == stDec && !t.loop && decision(v).seq() >= t.seq() {
		t.decided(decision(v))
	} else {
		t.saw(v)
		if x.kind == stPub && x.owner != t.rank {
			if x.m.w.ranks[t.rank].look(); x.m.w.cfg.fine {
				t.pause("after", 0)
			}
		}
	}
	return v
}

func (x *stWord) Store(v uint64) {
	x.before(true)
	x.p.Store(v)
}

func (x *stWord) CompareAndSwap(old, new uint64) bool {
	x.before(true)
	ok := x.p.CompareAndSwap(old, new)
	if t := x.m.cur; t != nil {
		t.saw(uint64(b2i(ok)))
		if ok && !t.loop && x.kind == stDec {
			t.decided(decision(new))
		}
	}
	return ok
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (x *stWord32) before(op string) {
	if t := x.m.cur; t != nil {
		t.access, t.of = x.kind, -1
		t.pause(op, 0)
	}
}

// Load of the generation is seen only in whether it is still the same later: that is in the key of a state.
func (x *stWord32) Load() uint32 {
	x.before("load")
	v := x.p.Load()
	if t := x.m.cur; t != nil {
		if x.kind == stGen {
			t.gen, t.hasGen = v, true
		} else {
			t.saw(uint64(v))
		}
	}
	return v
}

func (x *stWord32) Store(v uint32) {
	x.before("store")
	x.p.Store(v)
}

func (x *stWord32) CompareAndSwap(old, new uint32) bool {
	x.before("swap")
	ok := x.p.CompareAndSwap(old, new)
	if t := x.m.cur; t != nil {
		t.saw(uint64(b2i(ok)))
	}
	return ok
}

func (x *stWord32) Add(d uint32) uint32 {
	x.before("add")
	return x.p.Add(d)
}

// stThread is a rank's caller or its loop. Its local state is hist: a hash of all that was explicit when its last call
// began, and of all that it has seen since; the production code between two accesses depends on nothing else.
type stThread struct {
	w    *stWorld
	rank int
	loop bool

	next   func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
	job    func(*stThread)
	busy   bool // it has something to do
	killed bool
	over   bool // a caller that has returned from all its operations

	hist   uint64
	mark   uint64 // hist at its last stop before it began to look at the decision
	quiet  uint64 // hist before it began to wake others: that gives no result
	waking bool
	asleep bool
	gen    uint32
	hasGen bool

	op     string // what it is about to do
	access stKind
	slot   int
	of     int
}

func (t *stThread) String() string {
	if t.loop {
		return fmt.Sprintf("loop of rank %d", t.rank)
	}
	return fmt.Sprintf("caller of rank %d", t.rank)
}

func (t *stThread) saw(v uint64) { t.hist = mix(t.hist, v) }

// decided is a caller that has found or made the decision that it needs: what it saw on the way to it is of no use any more.
func (t *stThread) decided(d decision) {
	if t.w.cfg.exact {
		t.saw(uint64(d))
	} else {
		t.hist = mix(t.mark, uint64(d&^(1<<30-1<<16)))
	}
	t.pause("after", 0)
}

// seq is the operation that the caller is in.
func (t *stThread) seq() uint64 { return t.w.ranks[t.rank].head() }

type stKilled struct{}

// pause lets others run.
func (t *stThread) pause(op string, n int) {
	wakes := op == "wake" || t.access == stSleep && op != "store" || t.access == stGen && op == "add"
	switch {
	case wakes && !t.waking:
		t.quiet = t.hist
	case !wakes && t.waking && !t.w.cfg.exact:
		t.hist = mix(t.quiet, 0x77)
	}
	t.op, t.waking = op, wakes
	t.hist = mix(t.hist, uint64(n)+0x51)
	if t.access != stDec || t.w.cfg.exact {
		t.mark = t.hist
	}
	t.yield(struct{}{})
	if t.killed {
		panic(stKilled{})
	}
	t.hist = mix(t.hist, t.w.process(t))
}

// start gives the thread something to do. The coroutine is used again for the next thing.
func (t *stThread) start(f func(t *stThread)) {
	t.busy, t.killed, t.job = true, false, f
	if t.next == nil {
		t.next, t.stop = iter.Pull(func(yield func(struct{}) bool) {
			t.yield = yield
			for t.run() && yield(struct{}{}) {
			}
		})
	}
}

// run does what the thread was given, and says whether there may be more.
func (t *stThread) run() (more bool) {
	defer func() {
		t.busy = false
		switch r := recover(); r {
		case nil, any(stKilled{}):
			more = true
		default:
			t.w.fail("%v: panic: %v", t, r)
		}
	}()
	t.job(t)
	return true
}

// step runs the thread to its next stop.
func (t *stThread) step() {
	t.w.mem.cur = t
	t.next()
	t.w.mem.cur = nil
}

// kill ends what it does where it stands.
func (t *stThread) kill() {
	if t.busy && t.op != "" {
		t.killed = true
		t.next()
	}
	t.busy = false
}

// mix folds a value into a hash. At 64 bits, two of ten million states are taken for one with a chance of 3 in a million.
func mix(h, x uint64) uint64 {
	const k = 0xd6e8feb86659fd93
	h = bits.RotateLeft64(h, 23) ^ x*0x9e3779b97f4a7c15
	h = (h ^ h>>32) * k
	h = (h ^ h>>32) * k
	return h ^ h>>32
}

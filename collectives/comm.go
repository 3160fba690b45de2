package collectives

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/internal/wire"
)

// Member is a connected process that a version of the group has.
type Member struct {
	Rank  int // in the group
	Slot  int
	Inc   uint32
	Arena []byte                    // its arena, if we share memory; nil: its data comes in frames
	Send  func(*device.Frame) error // nil for ourselves
}

type peer struct {
	Member
	area atomic.Pointer[area]
	done atomic.Uint64 // remote: completed-through, as it last said
}

// Version is the connected members of one version of the group.
type Version struct {
	Epoch  uint64    // of the change that made it
	From   uint64    // operations after this sequence belong to it
	Active slots.Set // slots
	Ranks  slots.Set // the same as ranks of the group
	N      int       // members
	Fail   string    // not empty: the group is failed for good from here on
	Lost   []int     // ranks that the version before had and this one has not

	peers   []*peer // by rank; nil: not active
	remotes []*peer
	locals  []*peer
	digest  uint64
	next    atomic.Pointer[Version]
}

// Next is the version after this one, nil if this is the last: operations after its From have moved there.
func (v *Version) Next() *Version { return v.next.Load() }

// cut is the last operation of v that is decided, if v is over. A later version may take back what an earlier cut gave:
// nobody had returned from it, and those who could have supplied it are dead.
func (v *Version) cut() (seq uint64, over bool) {
	for n := v.next.Load(); n != nil; n = n.next.Load() {
		if !over || n.From < seq {
			seq, over = n.From, true
		}
	}
	return seq, over
}

// Retracts says that v, or a version after it, cuts the operation off.
func (v *Version) Retracts(seq uint64) bool {
	if v == nil {
		return false
	}
	cut, over := v.cut()
	return seq > v.From || over && seq > cut
}

// Config makes a Comm.
type Config struct {
	Group  uint64
	Rank   int
	Slots  []int // of all ranks, ascending
	Arena  *Arena
	Words  []byte // the host's shared words, or private memory of WordsBytes where no peer shares memory
	Shape  Shape
	Retain int // bytes up to which class (a) skips the completion hop; at most a slot
}

// Comm runs the operations of one group. Step and Restart are for one goroutine at a time; Frame, Install, Close and the
// other methods may run beside it.
type Comm struct {
	cfg   Config
	mem   Memory
	size  int
	own   *area
	word  int // offset of the group's entry
	use   uint64
	dec   Word
	gen   Word32
	sleep Word32

	cur   atomic.Pointer[Version]
	first atomic.Pointer[Version] // the oldest that an operation may still be in

	failed  atomic.Bool
	entered atomic.Uint64 // stamp of the last operation that waits for its slot

	srcs [][]byte    // scratch
	buf  []byte      // scratch of one frame
	full atomic.Bool // a link had no room

	mu    sync.Mutex // guards what follows
	inbox map[inKey]*part
	holds map[inKey]struct{}
	told  uint64 // done that remotes have been told
}

// New makes the Comm of a group whose first version is v. done is the sequence at which this rank starts.
func New(cfg Config, epoch, done uint64, members []Member) (*Comm, error) {
	// What is retained must be whole: in the slot for those of the host, in one frame for whom it is forwarded to.
	cfg.Retain = min(cfg.Retain, cfg.Shape.SlotBytes, wire.MaxPayload-callBytes)
	m := cfg.Arena.Memory
	if m == nil {
		m = machine{}
	}
	own, err := cfg.Arena.alloc(m, cfg.Group, cfg.Shape, done)
	if err != nil {
		return nil, err
	}
	x := index{m, cfg.Words}
	off, use, err := x.claim(cfg.Group)
	if errors.Is(err, errNoWord) && cfg.Arena.Locals != nil {
		x.sweep(append(cfg.Arena.Locals(), cfg.Arena.mem[:dirBytes]))
		off, use, err = x.claim(cfg.Group)
	}
	if err != nil {
		cfg.Arena.free(m, cfg.Group)
		return nil, err
	}
	c := &Comm{
		cfg: cfg, mem: m, size: cfg.Shape.Size, own: own, word: off, use: use,
		dec: m.Word64(cfg.Words, off), gen: m.Word32(cfg.Words, off+128), sleep: m.Word32(cfg.Words, off+256),
		srcs: make([][]byte, cfg.Shape.Size), inbox: map[inKey]*part{}, holds: map[inKey]struct{}{}, told: done,
	}
	v := c.version(nil, epoch, done, members)
	c.first.Store(v)
	c.cur.Store(v)
	c.rearm(v)
	return c, nil
}

// version makes a Version; peers that the version before has too keep their state.
func (c *Comm) version(before *Version, epoch, from uint64, members []Member) *Version {
	v := &Version{Epoch: epoch, From: from, peers: make([]*peer, c.size)}
	for _, m := range members {
		var p *peer
		if before != nil {
			if q := before.peers[m.Rank]; q != nil && q.Inc == m.Inc {
				p = q
			}
		}
		if p == nil {
			p = &peer{Member: m}
			p.done.Store(from)
		}
		v.peers[m.Rank] = p
		v.Ranks.Add(m.Rank)
		v.Active.Add(m.Slot)
		v.N++
		switch {
		case m.Rank == c.cfg.Rank:
		case m.Arena != nil:
			v.locals = append(v.locals, p)
		default:
			v.remotes = append(v.remotes, p)
		}
	}
	if before != nil {
		for r, p := range before.peers {
			if p != nil && (v.peers[r] == nil || v.peers[r].Inc != p.Inc) {
				v.Lost = append(v.Lost, r)
			}
		}
	}
	v.digest = v.Active.Digest()
	return v
}

// Failed says that the group is failed for good, and that the versions lead to the one that says why.
func (c *Comm) Failed() bool { return c.failed.Load() }

// Current is the last version installed.
func (c *Comm) Current() *Version { return c.cur.Load() }

// Remote says that some member's data comes in frames.
func (c *Comm) Remote() bool { return len(c.cur.Load().remotes) > 0 }

// Untold says that remote members do not know yet how far we are.
func (c *Comm) Untold() bool {
	done := c.own.done.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	return done > c.told && len(c.cur.Load().remotes) > 0
}

// Tidy forgets versions that every member has left behind, and says whether others are left.
func (c *Comm) Tidy() bool {
	c.trim()
	return c.first.Load() != c.cur.Load()
}

// Done is the sequence up to which this rank has returned.
func (c *Comm) Done() uint64 { return c.own.done.Load() }

// Install ends the current version at the cut and starts the next one. fail: the group is failed for good.
func (c *Comm) Install(epoch, cut uint64, members []Member, fail string) *Version {
	before := c.cur.Load()
	v := c.version(before, epoch, cut, members)
	v.Fail = fail
	c.cur.Store(v)
	before.next.Store(v)
	if fail != "" {
		c.failed.Store(true)
	}
	c.rearm(v)
	c.prune(v)
	c.Wake()
	return v
}

// trim forgets versions that every member has left behind. With the last of them goes the memory of the dead.
func (c *Comm) trim() {
	for {
		v := c.first.Load()
		n := v.next.Load()
		if n == nil || c.own.done.Load() < n.From {
			return
		}
		for r, p := range n.peers {
			if p == nil || r == c.cfg.Rank {
				continue
			}
			done := p.done.Load()
			if p.Arena != nil {
				if a, _ := c.bind(p); a != nil {
					done = a.done.Load()
				}
			}
			if done < n.From {
				return
			}
		}
		c.first.CompareAndSwap(v, n)
	}
}

// rearm makes the host's word "nothing decided after the cut" of version v, unless it is there already or further, or is
// another group's by now.
func (c *Comm) rearm(v *Version) {
	for {
		w := c.dec.Load()
		d := decision(w)
		if d.use() == c.use && !behind(d.version(), v.Epoch, versionBits) || d.use() != c.use && !behind(d.use(), c.use, useBits) {
			return
		}
		if c.dec.CompareAndSwap(w, uint64(decided(c.use, v.Epoch, v.From))) {
			return
		}
	}
}

// ours says that the word is this group's still, and of this version.
func (c *Comm) ours(d decision, v *Version) bool {
	return d.use() == c.use && d.version() == v.Epoch&(1<<versionBits-1)
}

// CloseWord stops decisions until the view of epoch is installed, and returns for each living member of this host that
// alive names (by rank) the sequence up to which it may have returned.
func (c *Comm) CloseWord(epoch uint64, alive func(rank int) bool) (done map[int]uint64) {
	v := c.cur.Load()
	var w uint64
	for {
		w = c.dec.Load()
		if !c.ours(decision(w), v) {
			break
		}
		// A host-mate may be ahead of us and have promised a later view: what it vouched for must stay.
		if cl := decision(w).closed(); cl != 0 && !behind(cl, closedFor(epoch), 15) {
			break
		}
		if n := w&^0xffff | closedFor(epoch); c.dec.CompareAndSwap(w, n) {
			w = n
			break
		}
	}
	done = map[int]uint64{}
	put := func(r int, a *area) {
		if a == nil {
			return // it has no memory for the group yet, so it has returned from nothing
		}
		full := a.completing.Load()
		if d := decision(w); c.ours(d, v) && behind(d.seq(), full, decSeqBits) {
			full -= (full - d.seq()) & (1<<decSeqBits - 1)
		}
		if d := a.done.Load(); d > full { // a newcomer's, or one that has long returned
			full = d
		}
		done[r] = full
	}
	put(c.cfg.Rank, c.own)
	for _, p := range v.locals {
		if alive(p.Rank) {
			if _, err := c.bind(p); err == nil {
				put(p.Rank, p.area.Load())
			}
			if _, ok := done[p.Rank]; !ok {
				done[p.Rank] = v.From
			}
		}
	}
	return done
}

// Reopen takes a close for a view that is installed back.
func (c *Comm) Reopen(installed uint64) {
	for {
		w := c.dec.Load()
		cl := decision(w).closed()
		if decision(w).use() != c.use || cl == 0 || behind(closedFor(installed), cl, 15) {
			return
		}
		if c.dec.CompareAndSwap(w, w&^0xffff) {
			c.Wake()
			return
		}
	}
}

// Wake wakes everybody of this host who sleeps in the group.
func (c *Comm) Wake() {
	c.sleep.Store(0)
	c.gen.Add(1)
	c.mem.Wake(c.gen)
}

// nudge wakes them only if somebody may be asleep.
func (c *Comm) nudge() {
	if c.sleep.Load() != 0 && c.sleep.CompareAndSwap(1, 0) {
		c.gen.Add(1)
		c.mem.Wake(c.gen)
	}
}

// bind finds a local peer's area, nil if it has not made it yet.
func (c *Comm) bind(p *peer) (*area, error) {
	if a := p.area.Load(); a != nil {
		return a, nil
	}
	a, err := find(c.mem, p.Arena, c.cfg.Group, c.cfg.Shape)
	if err != nil {
		return nil, fmt.Errorf("rank %d (slot %d) and this one do not agree about the group's memory: %w", p.Rank, p.Slot, err)
	}
	if a != nil {
		p.area.Store(a)
	}
	return a, nil
}

// Finished says that every member has returned from all that this rank has returned from, and has been told so of us: it
// needs nothing any more of this rank.
func (c *Comm) Finished() bool {
	v, done := c.cur.Load(), c.own.done.Load()
	for _, p := range v.remotes {
		if p.done.Load() < done {
			return false
		}
	}
	for _, p := range v.locals {
		// Looked up again: it may have given its area back, which tells the same.
		if a, err := find(c.mem, p.Arena, c.cfg.Group, c.cfg.Shape); err == nil && a != nil && a.done.Load() < done {
			return false
		}
	}
	return !c.Untold()
}

// Release gives the group's memory back. No operation may be under way, here or at a peer. over: every member has made the
// group and closed it, or it has failed, so that nothing is ever decided in it again; then the last of this host gives the
// host's word back too. Where one of them dies in between, it stays taken until no other is free (sweep).
func (c *Comm) Release(over bool) {
	c.cfg.Arena.free(c.mem, c.cfg.Group)
	if !over {
		return
	}
	for _, p := range c.cur.Load().locals {
		if a, err := find(c.mem, p.Arena, c.cfg.Group, c.cfg.Shape); a != nil || err != nil {
			return
		}
	}
	index{c.mem, c.cfg.Words}.giveBack(c.word, c.cfg.Group)
}

func (c *Comm) slot(a *area, o *Op) *slotMem {
	return &a.slots[int(o.Seq%uint64(c.cfg.Shape.Depth))*c.cfg.Shape.Lanes+min(int(o.Phase), c.cfg.Shape.Lanes-1)]
}

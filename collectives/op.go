package collectives

import (
	"errors"
	"fmt"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
)

// Status is what a Step came to.
type Status uint8

// The statuses. After Moved the caller restarts the operation in the next version or fails it; Mismatch and Failed are
// explained by Op.Err.
const (
	Blocked  Status = iota // nothing to do until something changes
	Progress               // moved, and may move again at once
	Done                   // completed: the result is in place
	Moved                  // its version has ended before it
	Mismatch               // a peer does not run the same program: the group must be failed, alike on all
	Failed                 // this operation fails, alike on all (its only source is gone)
)

// ErrSourceLost is an operation whose only source died before it had given its data to all.
type ErrSourceLost struct {
	Kind Kind
	Rank int
}

func (e *ErrSourceLost) Error() string {
	return fmt.Sprintf("serry: %v: its root, rank %d, is lost and nobody has the data", e.Kind, e.Rank)
}

// Op is one operation under way. The zero value is ready for Start; it may be reused after it ended.
type Op struct {
	Call
	Seq         uint64
	Phase       uint8
	Provisional bool // first half of a pair: it is not decided by itself
	Keep        bool // a redo may come: the input must survive (in place, it is staged)
	Ver         *Version
	Err         error

	h         header
	in        []byte
	staged    []byte
	offs      []int // of the parts for each rank in the input
	parts     []*part
	single    bool
	chunks    int // of ours
	published int
	consumed  int // rounds
	rounds    int // known when all have arrived with their lengths
	arrived   int
	sentTo    int
	sentOff   int
	held      int           // remote members that have been told that we hold all, and one: the local ones
	asked     time.Duration // when we last asked for what a lost member owed us
	balanced  bool          // all parts of an AllToAll fit
	decided   bool
	pulled    bool
}

// Start begins operation seq of version v, the last that the caller has taken notice of: if it is over, the operation
// moves on before anything of it is published.
func (c *Comm) Start(o *Op, seq uint64, v *Version) error {
	if err := o.check(c.size, c.cfg.Rank); err != nil {
		return err
	}
	if o.Kind == Exchange {
		n := 0
		for r, x := range o.InParts {
			if v.Ranks.Has(r) {
				n += x
			}
		}
		if n > c.cfg.Shape.SlotBytes {
			return &ErrBadCall{o.Kind, fmt.Sprintf("%d bytes to give, the group's slots hold %d: open it with larger ones", n, c.cfg.Shape.SlotBytes)}
		}
	}
	if n := c.chunksOf(o.length(c.cfg.Rank)); o.Kind != Exchange && n > maxChunks {
		return &ErrBadCall{o.Kind, fmt.Sprintf("%d bytes are %d chunks of the group's slots of %d bytes, at most %d are possible: open it with larger ones",
			o.length(c.cfg.Rank), n, c.cfg.Shape.SlotBytes, maxChunks)}
	}
	o.Seq = seq
	o.enter(c, v)
	return nil
}

// Restart moves an operation to the version after its own, from the beginning.
func (c *Comm) Restart(o *Op) {
	o.enter(c, o.Ver.next.Load())
}

func (o *Op) enter(c *Comm, v *Version) {
	// What we were about to complete in a version that ended before it, we shall not.
	if n := max(v.From, c.own.done.Load()); o.Ver != v && c.own.completing.Load() > n && o.Seq > n {
		c.own.completing.Store(n)
	}
	o.Ver, o.Err = v, nil
	o.h = o.header(c.cfg.Rank, o.Phase)
	o.offs = o.offs[:0]
	if o.InParts != nil {
		at := 0
		for r, x := range o.InParts {
			o.offs = append(o.offs, at)
			if o.Kind != Exchange || v.Ranks.Has(r) {
				at += x
			}
		}
		if o.Kind == Exchange {
			o.h.length = uint64(at) // without the ranks that are not active
		}
	}
	if o.Kind == AllToAll {
		o.h.balance = o.balanceOf(c.cfg.Rank, &v.Ranks)
	}
	o.published, o.consumed, o.rounds, o.arrived, o.sentTo, o.sentOff = 0, 0, 0, 0, 0, 0
	o.held, o.asked, o.balanced, o.decided, o.pulled = 0, 0, false, false, false
	n := int(o.h.length)
	o.single = n <= c.cfg.Shape.SlotBytes
	o.chunks = c.chunksOf(n)
	if o.staged != nil {
		o.in = o.staged
	} else {
		o.in = o.In
	}
	if !o.single && (o.Keep || len(v.remotes) > 0) {
		o.stage()
	}
	if len(v.remotes) > 0 {
		if len(o.parts) != c.size {
			o.parts = make([]*part, c.size)
		}
		clear(o.parts)
	}
}

// stage copies an input that lies in the output, before the output changes.
func (o *Op) stage() {
	if o.staged == nil && overlap(o.In, o.Out) {
		o.staged = append([]byte(nil), o.In...)
		o.in = o.staged
	}
}

func (c *Comm) chunksOf(n int) int {
	if n <= c.cfg.Shape.SlotBytes {
		return 1
	}
	half := c.cfg.Shape.SlotBytes / 2
	return (n + half - 1) / half
}

// End forgets the buffers of an operation that is over.
func (o *Op) End() {
	o.Call = Call{}
	o.in, o.staged = nil, nil
	clear(o.parts)
}

// Published says that this rank has arrived at the operation.
func (o *Op) Published() bool { return o.published > 0 }

// Sent says that all that peers need from this rank has left it.
func (o *Op) Sent() bool { return o.published == o.chunks && o.sentTo == len(o.Ver.remotes) }

// Step takes an operation as far as it goes without waiting. Operations complete in order: only the head, whose
// predecessors are all complete, goes beyond its publication.
func (c *Comm) Step(o *Op, head bool) Status {
	v := o.Ver
	cut, agreed := v.cut()
	if v.Fail != "" || agreed && o.Seq > cut {
		return Moved
	}
	moved := false
	if o.published < o.chunks || o.sentTo < len(v.remotes) {
		if o.published == 0 && !c.reusable(o) {
			c.entered.Store(stampOf(v.Epoch, o.Seq))
			return Blocked
		}
		if c.publish(o) {
			moved = true
		}
	}
	if !head {
		return blockedOr(moved)
	}
	st := c.arrive(o)
	if st == Mismatch {
		return st
	}
	if !c.allSingle(o) {
		m, err := c.consume(o)
		if err != nil {
			return c.misfit(o, err)
		}
		moved = moved || m
	}
	if o.arrived < c.size || o.published < o.chunks || o.sentTo < len(v.remotes) {
		if agreed {
			c.ask(o)
		}
		return blockedOr(moved)
	}
	if !o.balanced && o.Kind == AllToAll {
		ok, err := c.balance(o)
		if err != nil {
			return c.misfit(o, err)
		}
		if !ok {
			return blockedOr(moved) // those whose parts do not fit say so
		}
		o.balanced = true
	}
	if !o.decided && !o.Provisional {
		if !agreed && !c.heldByAll(o) || !c.decide(o) {
			return blockedOr(moved)
		}
		o.decided = true
	}
	if o.Kind == Broadcast && v.peers[o.Root] == nil {
		// Decided like any other: of two ranks neither fails with this while the other learns of a loss.
		o.Err = &ErrSourceLost{o.Kind, o.Root}
		c.finish(o)
		return Failed
	}
	if !o.pulled {
		if !c.allSingle(o) {
			if o.consumed < o.rounds {
				return blockedOr(moved)
			}
		} else if err := c.pull(o); err != nil {
			return c.misfit(o, err)
		}
		faultpoint.Hit(faultpoint.PullAfter)
		if !c.still(o) {
			return Blocked // evicted, or about to learn of a new version
		}
		o.pulled = true
	}
	if !o.Provisional {
		c.finish(o)
	}
	return Done
}

// misfit is a call that does not fit those of others, unless they have gone on without us meanwhile: then we have read
// anything.
func (c *Comm) misfit(o *Op, err error) Status {
	if !c.still(o) {
		return Blocked
	}
	o.Err = err
	return Mismatch
}

func blockedOr(moved bool) Status {
	if moved {
		return Progress
	}
	return Blocked
}

// reusable says that every member has completed what the operation's slot held before.
func (c *Comm) reusable(o *Op) bool {
	d := uint64(c.cfg.Shape.Depth)
	if o.Seq <= d || o.Phase > 0 {
		return true
	}
	before := o.Seq - d
	for _, p := range o.Ver.locals {
		if a, _ := c.bind(p); a == nil || a.done.Load() < before {
			return false
		}
	}
	for _, p := range o.Ver.remotes {
		if p.done.Load() < before {
			return false
		}
	}
	return true
}

// publish puts chunks into the slot, and frames on the links, as far as there is room.
func (c *Comm) publish(o *Op) (moved bool) {
	v, s := o.Ver, c.slot(c.own, o)
	stamp := stampOf(v.Epoch, o.Seq) << stampShift
	for o.published < o.chunks {
		k := o.published
		if !o.single {
			if k >= 2 && !c.acked(o, k-1) {
				break
			}
			if len(v.locals) == 0 { // nobody reads the slot: it only says that we have arrived
				reopen(s.pub)
				o.h.put(s.call)
				s.pub.Store(stamp | 1<<1 | sealedBit)
				o.published = o.chunks
				break
			}
		}
		if k == 0 {
			faultpoint.Hit(faultpoint.PublishBefore)
			reopen(s.pub) // what it held before is over; a reader that is late must not take the new bytes for it
			o.h.put(s.call)
			for r, off := range o.offs {
				n := o.InParts[r]
				if o.Kind == Exchange && v.peers[r] == nil {
					n = 0
				}
				le.PutUint64(s.counts[16*r:], uint64(off))
				le.PutUint64(s.counts[16*r+8:], uint64(n))
			}
			s.ack.Store(stamp)
		}
		c.fillChunk(o, s, k)
		o.published++
		w := stamp | uint64(o.published)<<1
		if o.published == o.chunks {
			faultpoint.Hit(faultpoint.SealBefore)
			w |= sealedBit
		}
		s.pub.Store(w)
		if o.published == o.chunks {
			faultpoint.Hit(faultpoint.SealAfter)
		}
		moved = true
		faultpoint.Hit(faultpoint.WakeBefore)
		c.nudge()
	}
	if len(v.remotes) > 0 && (o.published > 0 || !o.single) && c.sendParts(o, s) {
		moved = true
	}
	return moved
}

func (c *Comm) fillChunk(o *Op, s *slotMem, k int) {
	if o.Kind == Exchange {
		for r, p := range o.Ver.peers {
			if p != nil {
				if r == c.size/2 {
					faultpoint.Hit(faultpoint.PublishMid)
				}
				o.Fill(r, s.data[o.offs[r]:o.offs[r]+o.InParts[r]:o.offs[r]+o.InParts[r]])
			}
		}
		return
	}
	n := int(o.h.length)
	dst, src := s.data, o.in
	if !o.single {
		half := c.cfg.Shape.SlotBytes / 2
		src = o.in[k*half : min(n, (k+1)*half)]
		dst = s.data[k%2*half:]
	}
	if faultpoint.Enabled {
		copy(dst, src[:len(src)/2])
		faultpoint.Hit(faultpoint.PublishMid)
	}
	src = src[:min(len(src), n)]
	c.mem.Copy(dst[:len(src)], src)
}

// acked says that every local member has consumed n rounds.
func (c *Comm) acked(o *Op, n int) bool {
	stamp := stampOf(o.Ver.Epoch, o.Seq)
	for _, p := range o.Ver.locals {
		a, _ := c.bind(p)
		if a == nil {
			return false
		}
		w := c.slot(a, o).ack.Load()
		if w>>stampShift != stamp || int(w>>1&maxChunks) < n {
			return false
		}
	}
	return o.consumed >= n
}

// sendParts sends each remote member its part, as far as the links take it.
func (c *Comm) sendParts(o *Op, s *slotMem) (moved bool) {
	for o.sentTo < len(o.Ver.remotes) {
		p := o.Ver.remotes[o.sentTo]
		src := o.in
		if o.Kind == Exchange {
			src = s.data
		} else if o.single {
			src = s.data[:o.h.length]
		}
		if o.InParts != nil {
			src = src[o.offs[p.Rank] : o.offs[p.Rank]+o.InParts[p.Rank]]
		} else {
			src = src[:o.h.length]
		}
		total := callBytes + len(src)
		for {
			var f device.Frame
			f.Kind, f.Op, f.Phase = wire.KindData, uint8(o.Kind), o.Phase
			f.Version, f.Seq, f.SetDigest, f.CallDigest = o.Ver.Epoch, o.Seq, o.Ver.digest, o.h.digest
			f.Offset, f.Total = uint64(o.sentOff), uint64(total)
			if o.sentOff == 0 {
				if n := min(total, wire.MaxPayload); len(c.buf) < n {
					c.buf = make([]byte, n)
				}
				n := copy(c.buf[callBytes:], src)
				o.h.put(c.buf)
				f.Payload = c.buf[:callBytes+n]
			} else {
				at := o.sentOff - callBytes
				f.Payload = src[at:min(len(src), at+wire.MaxPayload)]
			}
			if err := c.send(p, &f); errors.Is(err, device.ErrFull) {
				c.full.Store(true)
				return moved
			}
			moved = true // a lost link is evidence that the mesh has: its peer will be dropped or come back
			if o.sentOff += len(f.Payload); o.sentOff >= total {
				break
			}
		}
		o.sentTo++
		o.sentOff = 0
	}
	return moved
}

// arrive looks which members have arrived with all that we need, in rank order, and compares their calls with ours.
func (c *Comm) arrive(o *Op) Status {
	v, stamp := o.Ver, stampOf(o.Ver.Epoch, o.Seq)
	for o.arrived < c.size {
		p := v.peers[o.arrived]
		if p == nil || p.Rank == c.cfg.Rank {
			o.arrived++
			continue
		}
		var h header
		if p.Arena == nil {
			q := c.lookup(p.Rank, v.Epoch, o.Seq, o.Phase)
			if q == nil {
				return Blocked
			}
			o.parts[p.Rank] = q
			if q.set != v.digest {
				o.Err = fmt.Errorf("operation %d: set: rank %d has another set of members for version %d than rank %d", o.Seq, p.Rank, v.Epoch, c.cfg.Rank)
				return Mismatch
			}
			h = q.h
		} else {
			a, err := c.bind(p)
			if err != nil {
				o.Err = err
				return Mismatch
			}
			if a == nil {
				return Blocked
			}
			s := c.slot(a, o)
			w := s.pub.Load()
			if w>>stampShift != stamp {
				return Blocked
			}
			if le.Uint64(s.call[8:]) == o.h.digest && w&sealedBit != 0 {
				o.arrived++
				continue
			}
			h.get(s.call)
			if host.Recheck(s.pub)>>stampShift != stamp {
				return Blocked
			}
			if h.digest == o.h.digest && w&sealedBit == 0 {
				return Blocked
			}
		}
		if h.digest != o.h.digest {
			o.Err = fmt.Errorf("operation %d: %s", o.Seq, o.h.differs(&h, c.cfg.Rank, p.Rank))
			return Mismatch
		}
		o.arrived++
	}
	return Blocked
}

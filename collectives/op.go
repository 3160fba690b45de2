package collectives

import (
	"errors"
	"fmt"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/internal/wire"
)

// Status is what a Step came to.
type Status uint8

// The statuses. After Moved the caller restarts the operation in the next version or fails it; Mismatch, Torn and Failed
// are explained by Op.Err.
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
	held      bool
	decided   bool
	pulled    bool
	torn      int
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
	o.Seq = seq
	o.enter(c, v)
	return nil
}

// Restart moves an operation to the version after its own, from the beginning.
func (c *Comm) Restart(o *Op) {
	v := o.Ver.next.Load()
	if c.own.completing.Load() > v.From {
		c.own.completing.Store(max(v.From, c.own.done.Load()))
	}
	o.enter(c, v)
}

func (o *Op) enter(c *Comm, v *Version) {
	o.Ver, o.Err = v, nil
	o.h = o.header(c.cfg.Rank, o.Phase)
	o.published, o.consumed, o.rounds, o.arrived, o.sentTo, o.sentOff, o.torn = 0, 0, 0, 0, 0, 0, 0
	o.held, o.decided, o.pulled = false, false, false
	n := int(o.h.length)
	o.single = n <= c.cfg.Shape.SlotBytes
	o.chunks = c.chunksOf(n)
	if o.staged != nil {
		o.in = o.staged
	} else {
		o.in = o.In
	}
	if !o.single && o.staged == nil && (o.Keep || o.Kind == AllToAll || len(v.remotes) > 0) && overlap(o.In, o.Out) {
		o.staged = append([]byte(nil), o.In...)
		o.in = o.staged
	}
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
			o.h.length = uint64(at)
		}
	}
	if len(v.remotes) > 0 {
		if len(o.parts) != c.size {
			o.parts = make([]*part, c.size)
		}
		clear(o.parts)
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

// Missing is the slots that have not arrived at operation seq of the version of that epoch.
func (c *Comm) Missing(epoch, seq uint64, phase uint8) (s slots.Set) {
	o := &Op{Seq: seq, Phase: phase}
	for v := c.first.Load(); v != nil; v = v.next.Load() {
		if v.Epoch == epoch {
			o.Ver = v
		}
	}
	if o.Ver == nil {
		return s
	}
	for r, p := range o.Ver.peers {
		if p == nil || r == c.cfg.Rank {
			continue
		}
		if p.Arena == nil {
			if c.lookup(r, o.Ver.Epoch, o.Seq, o.Phase) == nil {
				s.Add(p.Slot)
			}
		} else if a, _ := c.bind(p); a == nil {
			s.Add(p.Slot)
		} else if w := c.slot(a, o).pub.Load(); w>>stampShift != stampOf(o.Ver.Epoch, o.Seq) {
			s.Add(p.Slot)
		}
	}
	return s
}

// Arrived is the highest sequence at which this rank has arrived in the current version.
func (c *Comm) Arrived() (seq uint64) {
	v, done := c.cur.Load(), c.own.done.Load()
	seq = done
	for i := range c.own.slots {
		st := c.own.slots[i].pub.Load() >> stampShift
		for k := uint64(1); k <= uint64(c.cfg.Shape.Depth); k++ {
			if st == stampOf(v.Epoch, done+k) {
				seq = max(seq, done+k)
			}
		}
	}
	return seq
}

// Members lists the members of a version.
func (c *Comm) Members(v *Version) (ms []Member) {
	for _, p := range v.peers {
		if p != nil {
			ms = append(ms, p.Member)
		}
	}
	return ms
}

// Sleep waits until something changes in the group, for at most d. The caller has seen a Step that was Blocked; check
// steps once more after we have said that somebody sleeps, and returns true if there is something to do after all.
func (c *Comm) Sleep(d time.Duration, check func() bool) {
	g := c.gen.Load()
	c.sleep.Store(1)
	if check() {
		return
	}
	_, _ = host.FutexWait(c.gen, g, d)
}

// Published says that this rank has arrived at the operation.
func (o *Op) Published() bool { return o.published > 0 }

// Sent says that all that peers need from this rank has left it.
func (o *Op) Sent() bool { return o.published == o.chunks && o.sentTo == len(o.Ver.remotes) }

// Step takes an operation as far as it goes without waiting. Operations complete in order: only the head, whose
// predecessors are all complete, goes beyond its publication.
func (c *Comm) Step(o *Op, head bool) Status {
	v := o.Ver
	agreed := false
	if n := v.next.Load(); n != nil {
		if o.Seq > n.From {
			return Moved
		}
		agreed = true
	}
	if v.Fail != "" {
		return Moved
	}
	if o.Kind == Broadcast && v.peers[o.Root] == nil {
		if !head {
			return Blocked
		}
		o.Err = &ErrSourceLost{o.Kind, o.Root}
		c.finish(o)
		return Failed
	}
	moved := false
	if o.published < o.chunks || o.sentTo < len(v.remotes) {
		if o.published == 0 && !c.reusable(o) {
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
		if c.consume(o) {
			moved = true
		}
	}
	if o.arrived < c.size || o.published < o.chunks || o.sentTo < len(v.remotes) {
		if agreed {
			c.ask(o)
		}
		return blockedOr(moved)
	}
	if !o.decided && !o.Provisional {
		if !agreed && !(c.heldByAll(o) && c.decide(o)) {
			return blockedOr(moved)
		}
		o.decided = true
	}
	if !o.pulled {
		if !c.allSingle(o) {
			if o.consumed < o.rounds {
				return blockedOr(moved)
			}
		} else if err := c.pull(o); err != nil {
			o.Err = err
			return Mismatch
		}
		faultpoint.Hit(faultpoint.PullAfter)
		if !c.still(o) {
			o.torn++
			return Blocked // evicted, or about to learn of a new version
		}
		o.pulled = true
	}
	if !o.Provisional {
		c.finish(o)
	}
	return Done
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
			if len(v.locals) == 0 {
				o.published = o.chunks // nobody reads the slot
				break
			}
		}
		if k == 0 {
			faultpoint.Hit(faultpoint.PublishBefore)
			s.pub.Store(0) // what it held before is over; a reader that is late must not take the new bytes for it
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
	copy(dst, src[:min(len(src), n)])
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
				if c.buf == nil {
					c.buf = make([]byte, wire.MaxPayload)
				}
				n := copy(c.buf[callBytes:], src)
				o.h.put(c.buf)
				f.Payload = c.buf[:callBytes+n]
			} else {
				at := o.sentOff - callBytes
				f.Payload = src[at:min(len(src), at+wire.MaxPayload)]
			}
			if err := c.send(p, &f); errors.Is(err, device.ErrFull) {
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
			if s.pub.Load()>>stampShift != stamp {
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

// heldByAll is the completion hop: in a group over several hosts a rank of class (b), or with much to hold, returns only
// when every member has said that it holds all.
func (c *Comm) heldByAll(o *Op) bool {
	v := o.Ver
	if len(v.remotes) == 0 || (o.Kind.allHoldTheSame() && int(o.h.bytes) <= c.cfg.Retain) {
		return true
	}
	if !c.allSingle(o) && o.consumed < o.rounds {
		return false
	}
	if !o.held {
		o.held = true
		c.slot(c.own, o).hold.Store(stampOf(v.Epoch, o.Seq)<<stampShift | 1)
		c.nudge()
		for _, p := range v.remotes {
			var f device.Frame
			f.Kind, f.Op, f.Phase = wire.KindHold, uint8(o.Kind), o.Phase
			f.Version, f.Seq = v.Epoch, o.Seq
			c.send(p, &f)
		}
	}
	for _, p := range v.locals {
		a := p.area.Load()
		if a == nil || c.slot(a, o).hold.Load() != stampOf(v.Epoch, o.Seq)<<stampShift|1 {
			return false
		}
	}
	for _, p := range v.remotes {
		if !c.holdFrom(p.Rank, v.Epoch, o.Seq, o.Phase) {
			return false
		}
	}
	return true
}

// decide makes the host's word say that the operation is decided, with all members of its version, unless a promise has
// closed it or a new version has begun. We say first what we are about to complete: who closes the word reads that after.
func (c *Comm) decide(o *Op) bool {
	faultpoint.Hit(faultpoint.DecideBefore)
	c.own.completing.Store(o.Seq)
	ver, seq := o.Ver.Epoch&(1<<18-1), o.Seq&(1<<30-1)
	for {
		w := c.dec.Load()
		d := decision(w)
		if d.version() != ver {
			return false
		}
		if cl := d.closed(); cl != 0 {
			if cl == closedFor(o.Ver.Epoch) { // left over by one who was stopped: its view is ours
				c.dec.CompareAndSwap(w, w&^0xffff)
				continue
			}
			return false
		}
		if !behind(d.seq(), seq, 30) || c.dec.CompareAndSwap(w, uint64(decided(ver, seq))) {
			faultpoint.Hit(faultpoint.DecideAfter)
			return true
		}
	}
}

// still re-checks, after the bytes were read, that every peer's word says what it said: otherwise we were excluded and
// the slots may have been used for something else.
func (c *Comm) still(o *Op) bool {
	stamp := stampOf(o.Ver.Epoch, o.Seq)
	for _, p := range o.Ver.locals {
		if a := p.area.Load(); a == nil || c.slot(a, o).pub.Load()>>stampShift != stamp {
			return false
		}
	}
	return true
}

func (c *Comm) finish(o *Op) {
	faultpoint.Hit(faultpoint.ReturnBefore)
	c.own.done.Store(o.Seq)
	c.nudge()
	c.collect(o.Ver)
}

// ask asks the living for what a lost member still owed us: the operation lies before the cut, so somebody has it.
func (c *Comm) ask(o *Op) {
	now := o.Ver.next.Load()
	for r := o.arrived; r < c.size; r++ {
		p := o.Ver.peers[r]
		if p == nil || p.Arena != nil || (now.peers[r] != nil && now.peers[r].Inc == p.Inc) || c.lookup(r, o.Ver.Epoch, o.Seq, o.Phase) != nil {
			continue
		}
		for _, q := range now.peers {
			if q == nil || q.Rank == c.cfg.Rank || q.Send == nil {
				continue
			}
			var f device.Frame
			f.Kind, f.Tag, f.Phase = wire.KindNeed, uint32(r), o.Phase
			f.Version, f.Seq = o.Ver.Epoch, o.Seq
			c.send(q, &f)
		}
	}
}

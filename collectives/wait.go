package collectives

import (
	"time"

	"github.com/serry-project/serry/internal/slots"
)

// Missing is the slots of whom operation seq of the version of that epoch still needs something: those that have not
// arrived, that have not published all, that have not read what this rank must overwrite, or have not said that they hold
// all where this rank has said so. Of an operation that a cut has decided it is those who may hold what a lost member
// owed; an operation that a cut has undone, here or soon, misses nobody.
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
	if cut, over := o.Ver.cut(); over {
		if seq <= cut {
			s = c.cur.Load().Active
			s.Del(c.cfg.Slots[c.cfg.Rank])
		}
		return s
	}
	stamp := stampOf(o.Ver.Epoch, o.Seq)
	own := c.slot(c.own, o)
	mine, held := own.pub.Load(), own.hold.Load() == stamp<<stampShift|1
	chunks := 0 // of ours that everybody must have read before we can publish more
	if mine>>stampShift == stamp && mine&sealedBit == 0 {
		chunks = int(mine>>1&maxChunks) - 1
	}
	for r, p := range o.Ver.peers {
		if p == nil || r == c.cfg.Rank {
			continue
		}
		if p.Arena == nil {
			if c.lookup(r, o.Ver.Epoch, o.Seq, o.Phase) == nil || held && !c.holdFrom(r, o.Ver.Epoch, o.Seq, o.Phase) {
				s.Add(p.Slot)
			}
		} else if a, _ := c.bind(p); a == nil {
			s.Add(p.Slot)
		} else {
			q := c.slot(a, o)
			pub, ack := q.pub.Load(), q.ack.Load()
			if pub>>stampShift != stamp || pub&sealedBit == 0 || ack>>stampShift == stamp && int(ack>>1&maxChunks) < chunks ||
				held && q.hold.Load() != stamp<<stampShift|1 {
				s.Add(p.Slot)
			}
		}
	}
	return s
}

// Arrived is the highest sequence at which this rank has arrived, in the version that the operation is in. One that waits
// for a slot, until the others have told that they are done with what it held, has arrived: nobody waits for its program.
func (c *Comm) Arrived() (seq uint64) {
	done := c.own.done.Load()
	seq = done
	for i := range len(c.own.slots) + 1 {
		st := c.entered.Load()
		if i < len(c.own.slots) {
			st = c.own.slots[i].pub.Load() >> stampShift
		}
		for v := c.first.Load(); v != nil; v = v.next.Load() {
			cut, over := v.cut()
			for k := done + 1; k <= done+uint64(c.cfg.Shape.Depth); k++ {
				if st == stampOf(v.Epoch, k) && (!over || k <= cut) {
					seq = max(seq, k)
				}
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
	c.full.Store(false)
	if check() {
		return
	}
	if c.full.Load() {
		d = min(d, fullWait) // nobody tells us when a link has room again
	}
	c.mem.Wait(c.gen, g, d)
}

const fullWait = time.Millisecond

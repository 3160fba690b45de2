package collectives

import (
	"errors"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/wire"
)

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
	if o.held == 0 {
		o.held = 1
		c.slot(c.own, o).hold.Store(stampOf(v.Epoch, o.Seq)<<stampShift | 1)
		c.nudge()
	}
	for ; o.held <= len(v.remotes); o.held++ {
		var f device.Frame
		f.Kind, f.Op, f.Phase = wire.KindHold, uint8(o.Kind), o.Phase
		f.Version, f.Seq = v.Epoch, o.Seq
		if err := c.send(v.remotes[o.held-1], &f); errors.Is(err, device.ErrFull) {
			c.full.Store(true)
			return false
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
//
// An operation that a cut has decided needs no swap, but the same care: the word must be that of the last version, and
// open, or somebody who promises now would not know that we are about to return from it, and a lower cut could follow.
func (c *Comm) decide(o *Op) bool {
	faultpoint.Hit(faultpoint.DecideBefore)
	c.own.completing.Store(o.Seq)
	v := c.cur.Load()
	if cut, over := o.Ver.cut(); over && o.Seq > cut {
		return false
	}
	for {
		w := c.dec.Load()
		d := decision(w)
		if !c.ours(d, v) {
			return false
		}
		if cl := d.closed(); cl != 0 {
			if cl == closedFor(v.Epoch) { // left over by one who was stopped: its view is ours
				c.dec.CompareAndSwap(w, w&^0xffff)
				continue
			}
			return false
		}
		if !behind(d.seq(), o.Seq, decSeqBits) || v == o.Ver && c.dec.CompareAndSwap(w, uint64(decided(c.use, v.Epoch, o.Seq))) {
			faultpoint.Hit(faultpoint.DecideAfter)
			return true
		}
		if v != o.Ver {
			return false // a lower cut, which we are about to learn of
		}
	}
}

// still re-checks, after the bytes were read, that every peer's word says what it said: otherwise we were excluded and
// the slots may have been used for something else.
func (c *Comm) still(o *Op) bool {
	stamp := stampOf(o.Ver.Epoch, o.Seq)
	for _, p := range o.Ver.locals {
		if a := p.area.Load(); a == nil || host.Recheck(c.slot(a, o).pub)>>stampShift != stamp {
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

// askEvery is how often we ask again: whom we ask may not know of the cut yet, and his answer may find no room.
const askEvery = 2 * time.Millisecond

// ask asks the living for what a lost member still owed us: the operation lies before the cut, so somebody has it.
func (c *Comm) ask(o *Op) {
	if t := c.mem.Now(); o.asked == 0 || t-o.asked >= askEvery {
		o.asked = t
	} else {
		return
	}
	now := c.cur.Load()
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

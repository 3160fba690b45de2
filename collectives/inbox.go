package collectives

import (
	"errors"
	"math"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/wire"
)

// inKey names a part: from which rank, of which operation, in which version.
type inKey struct {
	rank    int
	version uint64
	seq     uint64
	phase   uint8
}

// part is what one remote rank contributes to one operation for us: the call and the bytes. It is retained until every
// member of its version has completed the operation, so that it can be forwarded to one that lacks it.
type part struct {
	h     header
	set   uint64 // digest of the set that its sender has for the version
	data  []byte
	total int // of data; -1: not known yet
}

func (p *part) complete() bool { return p != nil && p.total >= 0 && len(p.data) == p.total }

// maxPart bounds what one rank may contribute to one operation.
const maxPart = 1 << 40

// Frame takes a frame of this group from the member with this rank. It runs on the mesh's loop.
func (c *Comm) Frame(rank int, f *device.Frame) {
	v := c.cur.Load()
	if p := v.peers[rank]; p != nil && p.Inc == f.Inc {
		for d := p.done.Load(); f.Completed > d && !p.done.CompareAndSwap(d, f.Completed); d = p.done.Load() {
		}
	}
	switch f.Kind {
	case wire.KindData:
		c.deposit(rank, f)
	case wire.KindForward:
		if int(f.Tag) < c.size {
			c.deposit(int(f.Tag), f)
		}
	case wire.KindHold:
		c.mu.Lock()
		if !c.stale(f.Version, f.Seq) {
			c.holds[inKey{rank, f.Version, f.Seq, f.Phase}] = struct{}{}
		}
		c.mu.Unlock()
	case wire.KindNeed:
		c.answer(rank, f)
		return
	}
	c.Wake()
}

// stale says that nobody here needs the operation any more: it lies behind a cut of its version.
func (c *Comm) stale(version, seq uint64) bool {
	for v := c.first.Load(); v != nil; v = v.next.Load() {
		if v.Epoch == version {
			n := v.next.Load()
			return n != nil && seq > n.From
		}
	}
	return version < c.first.Load().Epoch
}

func (c *Comm) deposit(rank int, f *device.Frame) {
	done := c.own.done.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stale(f.Version, f.Seq) || f.Total < callBytes || f.Total > maxPart {
		return
	}
	if f.Seq > done+uint64(c.cfg.Shape.Depth) {
		return // nobody publishes that before we have completed more: it is no peer of ours that runs this protocol
	}
	k := inKey{rank, f.Version, f.Seq, f.Phase}
	p := c.inbox[k]
	if p.complete() {
		return // forwarded twice
	}
	b := f.Payload
	if f.Offset == 0 {
		if len(b) < callBytes {
			return
		}
		p = &part{total: int(f.Total) - callBytes, set: f.SetDigest}
		p.h.get(b)
		p.data = make([]byte, 0, min(p.total, 4<<20))
		c.inbox[k] = p
		b = b[callBytes:]
	} else if p == nil || f.Offset != uint64(callBytes+len(p.data)) {
		return // of a forwarding that began before another completed
	}
	p.data = append(p.data, b...)
}

func (c *Comm) lookup(rank int, v, seq uint64, phase uint8) *part {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.inbox[inKey{rank, v, seq, phase}]; p.complete() {
		return p
	}
	return nil
}

func (c *Comm) holdFrom(rank int, v, seq uint64, phase uint8) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.holds[inKey{rank, v, seq, phase}]
	return ok
}

// prune drops what lies behind the cut that v begins with, and what belongs to versions that no operation is left in.
func (c *Comm) prune(v *Version) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.inbox {
		if c.stale(k.version, k.seq) {
			delete(c.inbox, k)
		}
	}
	for k := range c.holds {
		if c.stale(k.version, k.seq) {
			delete(c.holds, k)
		}
	}
}

// collect drops what every member has completed. It runs after this rank has completed an operation of v.
func (c *Comm) collect(v *Version) {
	if len(v.remotes) == 0 {
		return
	}
	low := c.own.done.Load()
	for _, p := range v.remotes {
		low = min(low, p.done.Load())
	}
	for _, p := range v.locals {
		if a := p.area.Load(); a != nil {
			low = min(low, a.done.Load())
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.inbox {
		if k.seq <= low && k.version <= v.Epoch {
			delete(c.inbox, k)
		}
	}
	for k := range c.holds {
		if k.seq <= low && k.version <= v.Epoch {
			delete(c.holds, k)
		}
	}
}

// answer forwards the contribution of the rank in f.Tag, if we hold it, to one that lacks it. Only class (a) contributions
// are asked for: they are the same for every receiver.
func (c *Comm) answer(to int, f *device.Frame) {
	r := int(f.Tag)
	if r >= c.size {
		return
	}
	var h header
	var data []byte
	if p := c.lookup(r, f.Version, f.Seq, f.Phase); p != nil {
		h, data = p.h, p.data
	} else if h, data = c.fromSlot(r, f); data == nil {
		return
	}
	v := c.cur.Load()
	dst := v.peers[to]
	if dst == nil || dst.Send == nil || !Kind(h.kind).allHoldTheSame() || len(data) > wire.MaxPayload-callBytes {
		return
	}
	b := make([]byte, callBytes+len(data))
	h.put(b)
	copy(b[callBytes:], data)
	out := device.Frame{Payload: b}
	out.Kind, out.Tag, out.Phase = wire.KindForward, uint32(r), f.Phase
	out.Version, out.Seq, out.Total = f.Version, f.Seq, uint64(len(b))
	out.CallDigest = h.digest
	for w := c.first.Load(); w != nil; w = w.next.Load() {
		if w.Epoch == f.Version {
			out.SetDigest = w.digest
		}
	}
	c.send(dst, &out)
}

// fromSlot reads the contribution of a rank of this host, dead or alive, from its slot.
func (c *Comm) fromSlot(r int, f *device.Frame) (h header, data []byte) {
	for v := c.first.Load(); v != nil; v = v.next.Load() {
		if v.Epoch != f.Version {
			continue
		}
		p := v.peers[r]
		a := c.own
		if r != c.cfg.Rank {
			if p == nil || p.Arena == nil {
				return h, nil
			}
			if a, _ = c.bind(p); a == nil {
				return h, nil
			}
		}
		s := c.slot(a, &Op{Seq: f.Seq, Phase: f.Phase})
		w := s.pub.Load()
		if w>>stampShift != stampOf(f.Version, f.Seq) || w&sealedBit == 0 {
			return h, nil
		}
		h.get(s.call)
		if h.length > uint64(len(s.data)) {
			return h, nil
		}
		data = make([]byte, h.length, h.length+1)
		c.mem.Copy(data, s.data[:h.length])
		if host.Recheck(s.pub) != w {
			return h, nil
		}
		return h, data
	}
	return h, nil
}

// Tell lets the remote members know how far we are, if they do not know and nothing else has told them: they retain what
// we have completed until then. It reports whether there was something to tell.
func (c *Comm) Tell() bool {
	v, done := c.cur.Load(), c.own.done.Load()
	c.mu.Lock()
	due := done > c.told && len(v.remotes) > 0
	c.mu.Unlock()
	if !due {
		return false
	}
	for _, p := range v.remotes {
		f := device.Frame{}
		f.Kind, f.Version, f.Seq = wire.KindDone, v.Epoch, done
		if err := c.send(p, &f); errors.Is(err, device.ErrFull) {
			return true // later, to all of them
		}
	}
	c.mu.Lock()
	c.told = max(c.told, done)
	c.mu.Unlock()
	return true
}

// Quit tells the remote members that this rank needs nothing more of a group that has failed, however far it has come. It
// reports whether all could be told; else it is called again.
func (c *Comm) Quit() bool {
	for _, p := range c.cur.Load().remotes {
		f := device.Frame{}
		f.Kind, f.Version = wire.KindDone, c.cur.Load().Epoch
		if err := c.sendDone(p, &f, math.MaxUint64); errors.Is(err, device.ErrFull) {
			return false
		}
	}
	return true
}

// send fills in who we are and sends. An error other than ErrFull is evidence, which the mesh keeps: it is not ours.
func (c *Comm) send(p *peer, f *device.Frame) error { return c.sendDone(p, f, c.own.done.Load()) }

func (c *Comm) sendDone(p *peer, f *device.Frame, done uint64) error {
	f.Group, f.Completed = c.cfg.Group, done
	f.Slot, f.To, f.ToInc = uint16(c.cfg.Slots[c.cfg.Rank]), uint16(p.Slot), p.Inc
	if me := c.cur.Load().peers[c.cfg.Rank]; me != nil {
		f.Inc = me.Inc
	}
	f.Length = uint32(len(f.Payload))
	return p.Send(f)
}

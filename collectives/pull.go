package collectives

import (
	"fmt"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/vec"
)

// allSingle says that every contribution of the operation lies whole in a slot or has come whole in frames, so that it is
// pulled at once, after the decision. Otherwise it is consumed in rounds of one chunk of each member, before it.
func (c *Comm) allSingle(o *Op) bool {
	if len(o.Ver.locals) == 0 || o.Kind == Exchange || o.Kind == Barrier {
		return true
	}
	switch o.Kind {
	case AllReduce, Broadcast:
		return int(o.h.bytes) <= c.cfg.Shape.SlotBytes
	case AllGather:
		for _, n := range o.OutParts {
			if n > c.cfg.Shape.SlotBytes {
				return false
			}
		}
		return true
	}
	if !o.single { // AllToAll: only the sender knows its whole length
		return false
	}
	for _, p := range o.Ver.locals {
		if h, ok := c.headOf(o, p); ok && int(h.length) > c.cfg.Shape.SlotBytes {
			return false
		}
	}
	return true
}

// headOf is the call of a local member that has arrived.
func (c *Comm) headOf(o *Op, p *peer) (h header, ok bool) {
	a, _ := c.bind(p)
	if a == nil {
		return h, false
	}
	s := c.slot(a, o)
	if s.pub.Load()>>stampShift != stampOf(o.Ver.Epoch, o.Seq) {
		return h, false
	}
	h.get(s.call)
	return h, true
}

// source returns the bytes of rank r's contribution that lie in [from, to) of it, nil if r is not active. For AllToAll
// and Exchange it is the part for us.
func (c *Comm) whole(o *Op, r int) ([]byte, error) {
	p := o.Ver.peers[r]
	if p == nil {
		return nil, nil
	}
	parted := o.InParts != nil
	var s *slotMem
	switch {
	case r == c.cfg.Rank:
		if !o.single {
			if parted {
				return o.in[o.offs[r] : o.offs[r]+o.InParts[r]], nil
			}
			return o.in, nil
		}
		s = c.slot(c.own, o)
	case p.Arena == nil:
		return o.parts[r].data, nil
	default:
		s = c.slot(p.area.Load(), o)
	}
	off, n := uint64(0), le.Uint64(s.call[48:])
	if parted {
		off, n = le.Uint64(s.counts[16*c.cfg.Rank:]), le.Uint64(s.counts[16*c.cfg.Rank+8:])
	}
	if n > uint64(len(s.data)) || off > uint64(len(s.data))-n {
		return nil, fmt.Errorf("operation %d: rank %d says its part lies at %d+%d of a slot of %d bytes", o.Seq, r, off, n, len(s.data))
	}
	return s.data[off : off+n : off+n], nil
}

// pull makes the result of an operation whose contributions all lie whole. Nothing of Out has been touched before.
func (c *Comm) pull(o *Op) error {
	v := o.Ver
	switch o.Kind {
	case Barrier:
		return nil
	case AllReduce:
		for r := range c.srcs {
			b, err := c.whole(o, r)
			if err == nil && v.peers[r] != nil && len(b) != len(o.Out) {
				err = c.wrongLength(o, r, len(b), len(o.Out))
			}
			if err != nil {
				return err
			}
			c.srcs[r] = b
		}
		faultpoint.Hit(faultpoint.PullMid)
		vec.Reduce(o.Out, c.srcs, o.DType, o.Reduce, v.N)
		return nil
	case Broadcast:
		b, err := c.whole(o, o.Root)
		if err == nil && len(b) != len(o.Out) {
			err = c.wrongLength(o, o.Root, len(b), len(o.Out))
		}
		if err != nil {
			return err
		}
		faultpoint.Hit(faultpoint.PullMid)
		c.mem.Copy(o.Out, b)
		return nil
	}
	at := 0
	for r := range c.size {
		b, err := c.whole(o, r)
		if err != nil {
			return err
		}
		if r == c.size/2 {
			faultpoint.Hit(faultpoint.PullMid)
		}
		if o.Kind == Exchange {
			c.srcs[r] = b
			continue
		}
		dst := o.Out[at : at+o.OutParts[r]]
		at += o.OutParts[r]
		if v.peers[r] == nil {
			clear(dst)
			continue
		}
		if len(b) != len(dst) {
			return c.wrongLength(o, r, len(b), len(dst))
		}
		c.mem.Copy(dst, b)
	}
	if o.Kind == Exchange {
		if err := o.Take(c.srcs); err != nil && c.still(o) {
			return fmt.Errorf("operation %d: %w", o.Seq, err)
		}
	}
	return nil
}

func (c *Comm) wrongLength(o *Op, r, has, want int) error {
	return fmt.Errorf("operation %d: %v: length: rank %d gives %d bytes, rank %d expects %d", o.Seq, o.Kind, r, has, c.cfg.Rank, want)
}

// balance says whether in an AllToAll at which all have arrived each takes what the other gives; the error is about a
// part for us or of us.
func (c *Comm) balance(o *Op) (bool, error) {
	total := uint64(0)
	for r, p := range o.Ver.peers {
		switch {
		case p == nil:
			continue
		case r == c.cfg.Rank:
			total += o.h.balance
		case p.Arena == nil:
			total += o.parts[r].h.balance
		default:
			total += le.Uint64(c.slot(p.area.Load(), o).call[56:])
		}
		if n := c.given(o, r); n != o.OutParts[r] {
			return false, c.wrongLength(o, r, n, o.OutParts[r])
		}
	}
	return total == 0, nil
}

// given is the bytes of the part of rank r for us.
func (c *Comm) given(o *Op, r int) int {
	switch p := o.Ver.peers[r]; {
	case r == c.cfg.Rank:
		return o.InParts[r]
	case p.Arena == nil:
		return len(o.parts[r].data)
	default:
		return int(le.Uint64(c.slot(p.area.Load(), o).counts[16*c.cfg.Rank+8:]))
	}
}

// consume takes rounds: chunk k of every member that has one, as soon as all of them have published it.
func (c *Comm) consume(o *Op) (moved bool, err error) {
	v := o.Ver
	if o.rounds == 0 { // every member's length must be known first
		n := o.chunks
		for _, p := range v.locals {
			h, ok := c.headOf(o, p)
			if !ok {
				return false, nil
			}
			if h.length > maxPart || c.chunksOf(int(h.length)) > maxChunks {
				return false, fmt.Errorf("operation %d: %v: rank %d says that it gives %d bytes", o.Seq, o.Kind, p.Rank, h.length)
			}
			n = max(n, c.chunksOf(int(h.length)))
		}
		for _, p := range v.remotes {
			if o.parts[p.Rank] == nil {
				if o.parts[p.Rank] = c.lookup(p.Rank, v.Epoch, o.Seq, o.Phase); o.parts[p.Rank] == nil {
					return false, nil
				}
			}
			if o.InParts == nil { // of AllToAll only our part came: it is taken whole
				n = max(n, c.chunksOf(len(o.parts[p.Rank].data)))
			}
		}
		o.rounds = n
		if o.Kind == AllToAll {
			o.stage() // also where only another rank's contribution comes in chunks
		}
	}
	own := c.slot(c.own, o)
	for o.consumed < o.rounds && o.published > min(o.consumed, o.chunks-1) && c.roundReady(o) {
		if err := c.round(o, o.consumed); err != nil {
			return moved, err
		}
		o.consumed++
		own.ack.Store(stampOf(v.Epoch, o.Seq)<<stampShift | uint64(o.consumed)<<1)
		c.nudge()
		moved = true
	}
	return moved, nil
}

// roundReady says that each local member that has a chunk of this round has published it.
func (c *Comm) roundReady(o *Op) bool {
	for _, p := range o.Ver.locals {
		s := c.slot(p.area.Load(), o)
		w := s.pub.Load()
		if w>>stampShift != stampOf(o.Ver.Epoch, o.Seq) {
			return false
		}
		if w&sealedBit == 0 && int(w>>1&maxChunks) <= o.consumed {
			return false
		}
	}
	return true
}

// chunk is the bytes that rank r contributes in round k, and where in its contribution they begin.
func (c *Comm) chunk(o *Op, r, k int) (b []byte, at int) {
	p := o.Ver.peers[r]
	if p == nil {
		return nil, 0
	}
	half := c.cfg.Shape.SlotBytes / 2
	cut := func(b []byte) ([]byte, int) { // a whole contribution, taken chunk by chunk
		if len(b) <= c.cfg.Shape.SlotBytes {
			if k == 0 {
				return b, 0
			}
			return nil, 0
		}
		return b[min(len(b), k*half):min(len(b), (k+1)*half)], k * half
	}
	if r == c.cfg.Rank {
		return cut(o.in[:o.h.length])
	}
	if p.Arena == nil {
		if o.InParts != nil { // only our part came, whole
			if k == 0 {
				return o.parts[r].data, 0
			}
			return nil, 0
		}
		return cut(o.parts[r].data)
	}
	s := c.slot(p.area.Load(), o)
	n := int(min(le.Uint64(s.call[48:]), maxPart)) // its writer may be overwriting it: we look again at the end
	if n <= len(s.data) {
		if k == 0 {
			return s.data[:n], 0
		}
		return nil, 0
	}
	if k*half >= n {
		return nil, 0
	}
	return s.data[k%2*half:][:min(half, n-k*half)], k * half
}

// round puts chunk k of every member where it belongs.
func (c *Comm) round(o *Op, k int) error {
	v := o.Ver
	if o.Kind == AllReduce {
		at, n := 0, 0
		for r := range c.srcs {
			b, off := c.chunk(o, r, k)
			c.srcs[r] = b
			if v.peers[r] != nil {
				at, n = off, len(b)
			}
		}
		for r, b := range c.srcs {
			if v.peers[r] != nil && len(b) != n {
				return c.wrongLength(o, r, len(b), n)
			}
		}
		if k == o.rounds/2 {
			faultpoint.Hit(faultpoint.PullMid)
		}
		if at > len(o.Out) || n > len(o.Out)-at || n%o.DType.Size() != 0 {
			return c.wrongLength(o, c.cfg.Rank, at+n, len(o.Out))
		}
		vec.Reduce(o.Out[at:at+n], c.srcs, o.DType, o.Reduce, v.N)
		return nil
	}
	base := 0
	for r := range c.size {
		if o.Kind == Broadcast {
			if r != o.Root {
				continue
			}
			b, at := c.chunk(o, r, k)
			dst := o.Out[min(at, len(o.Out)):]
			b = b[:min(len(b), len(dst))]
			c.mem.Copy(dst[:len(b)], b)
			continue
		}
		want := o.OutParts[r]
		dst := o.Out[base : base+want]
		base += want
		if v.peers[r] == nil {
			if k == 0 {
				clear(dst)
			}
			continue
		}
		b, at := c.chunk(o, r, k)
		if o.Kind == AllToAll {
			off, n := 0, want // remote and own parts: whole
			switch p := v.peers[r]; {
			case r == c.cfg.Rank:
				off, n = o.offs[r], o.InParts[r]
			case p.Arena != nil:
				s := c.slot(p.area.Load(), o)
				off, n = int(le.Uint64(s.counts[16*c.cfg.Rank:])), int(le.Uint64(s.counts[16*c.cfg.Rank+8:]))
			}
			if n != want {
				return c.wrongLength(o, r, n, want)
			}
			lo, hi := max(at, off), min(at+len(b), off+n)
			if lo < hi {
				c.mem.Copy(dst[lo-off:hi-off], b[lo-at:hi-at])
			}
			continue
		}
		dst = dst[min(at, len(dst)):]
		b = b[:min(len(b), len(dst))]
		c.mem.Copy(dst[:len(b)], b)
	}
	return nil
}

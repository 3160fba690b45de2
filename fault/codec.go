package fault

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The wire form of a message:
//
//	+---------+------+-------------------------------------------+
//	| version | type | fields in the order of the code methods   |
//	+---------+------+-------------------------------------------+
//	  1 byte   1 byte
//
//	integer   unsigned varint (encoding/binary)
//	bool      one byte, 0 or 1
//	slot      varint of slot+1 (0: none)
//	text      varint length, bytes; at most maxText
//	bytes     varint length, bytes; at most a limit of the field
//	set       varint n <= 16, then n words of 8 bytes, little endian; the last one is not zero
//	list      varint n, then n items; n is at most a limit of the field, and at most the bytes that are left
//
// A record's Value on the Board is a Value in the same form, without version and type. What a witness holds is a version
// (registerVersion) and the fields of register.
const (
	wireVersion = 1

	maxText   = 4096
	maxAddr   = 4096
	maxAttach = 1 << 24
	maxGroups = 1 << 16
)

var (
	errShort   = errors.New("fault: message is cut short")
	errTrailer = errors.New("fault: bytes follow the message")
)

// codec encodes or decodes: one description of a message serves both.
type codec struct {
	b   []byte // encoding: what is written; decoding: what is left
	dec bool
	err error
}

func (c *codec) fail(err error) {
	if c.err == nil {
		c.err, c.b = err, nil
	}
}

func (c *codec) u64(p *uint64) {
	if !c.dec {
		c.b = binary.AppendUvarint(c.b, *p)
		return
	}
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail(errShort)
		return
	}
	*p, c.b = v, c.b[n:]
}

// limited codes an integer that may not exceed max.
func (c *codec) limited(v, max uint64, what string) uint64 {
	c.u64(&v)
	if c.dec && v > max {
		c.fail(fmt.Errorf("fault: %s %d is more than %d", what, v, max))
		return 0
	}
	return v
}

func (c *codec) u32(p *uint32) { *p = uint32(c.limited(uint64(*p), 1<<32-1, "number")) }

func (c *codec) bool(p *bool) {
	v := uint64(0)
	if *p {
		v = 1
	}
	*p = c.limited(v, 1, "bool") == 1
}

// slot codes a slot, or -1.
func (c *codec) slot(p *int) { *p = int(c.limited(uint64(*p+1), MaxSlots, "slot")) - 1 }

func (c *codec) bytes(p *[]byte, max int) {
	n := c.limited(uint64(len(*p)), uint64(max), "length")
	if !c.dec {
		c.b = append(c.b, *p...)
		return
	}
	if n > uint64(len(c.b)) {
		c.fail(errShort)
		return
	}
	if n > 0 {
		*p = append([]byte(nil), c.b[:n]...)
		c.b = c.b[n:]
	}
}

func (c *codec) text(p *string) {
	if !c.dec {
		b := []byte(clip(*p))
		c.bytes(&b, maxText)
		return
	}
	var b []byte
	c.bytes(&b, maxText)
	*p = string(b)
}

// clip keeps a sentence within what a message may carry.
func clip(s string) string {
	if len(s) > maxText {
		s = s[:maxText-3] + "..."
	}
	return s
}

func (c *codec) set(p *Set) {
	n := len(p)
	for n > 0 && p[n-1] == 0 {
		n--
	}
	n = int(c.limited(uint64(n), uint64(len(p)), "words of a set"))
	for i := range n {
		if !c.dec {
			c.b = binary.LittleEndian.AppendUint64(c.b, p[i])
			continue
		}
		if len(c.b) < 8 {
			c.fail(errShort)
			return
		}
		p[i], c.b = binary.LittleEndian.Uint64(c.b), c.b[8:]
	}
	if c.dec && n > 0 && p[n-1] == 0 {
		c.fail(errors.New("fault: a set with zero words at its end"))
	}
}

// list codes a list with code for each item.
func list[T any](c *codec, p *[]T, max int, code func(*codec, *T)) {
	n := int(c.limited(uint64(len(*p)), uint64(max), "items of a list"))
	if c.dec {
		if n > len(c.b) {
			c.fail(errShort)
			return
		}
		if n > 0 {
			*p = make([]T, 0, min(n, 256))
		}
	}
	for i := range n {
		if c.dec {
			var zero T
			*p = append(*p, zero)
		}
		code(c, &(*p)[i])
		if c.err != nil {
			return
		}
	}
}

func codeU64(c *codec, p *uint64) { c.u64(p) }
func codeID(c *codec, p *ID)      { c.id(p) }

func (c *codec) id(p *ID) {
	c.slot(&p.Slot)
	if c.dec && p.Slot < 0 {
		c.fail(errors.New("fault: an identity without a slot"))
	}
	c.u32(&p.Inc)
}

func (c *codec) ballot(p *Ballot) {
	c.u32(&p.Num)
	p.Slot = uint16(c.limited(uint64(p.Slot), MaxSlots-1, "ballot slot"))
}

func codeMember(c *codec, p *Member) {
	c.slot(&p.Slot) // a joiner may have none
	c.u32(&p.Inc)
	if !c.dec {
		c.b = append(c.b, p.Nonce[:]...)
	} else if len(c.b) < len(p.Nonce) {
		c.fail(errShort)
		return
	} else {
		c.b = c.b[copy(p.Nonce[:], c.b):]
	}
	c.u64(&p.Host)
	c.bytes(&p.Addr, maxAddr)
}

// members codes the members of a view: by slot, ascending, below capacity.
func (c *codec) members(p *[]Member) {
	list(c, p, MaxSlots, codeMember)
	for i := range *p {
		if c.dec && ((*p)[i].Slot < 0 || i > 0 && (*p)[i].Slot <= (*p)[i-1].Slot) {
			c.fail(errors.New("fault: members out of order"))
			return
		}
	}
}

func (c *codec) view(p *View) {
	c.u64(&p.Epoch)
	p.Size = int(c.limited(uint64(p.Size), MaxSlots, "size"))
	p.Capacity = int(c.limited(uint64(p.Capacity), MaxSlots, "capacity"))
	c.members(&p.Members)
	list(c, &p.Incs, MaxSlots, (*codec).u32)
}

func codeGroup(c *codec, p *Group) {
	c.u64(&p.ID)
	c.set(&p.Slots)
	c.set(&p.Active)
	c.u64(&p.Version)
	c.u64(&p.Cut)
	c.text(&p.Failed)
}

func codeCut(c *codec, p *Cut) {
	c.u64(&p.Group)
	c.u64(&p.Seq)
	c.text(&p.Fail)
	c.set(&p.Slots)
}

func (c *codec) value(p *Value) {
	c.u64(&p.Epoch)
	c.members(&p.Members)
	p.Size = int(c.limited(uint64(p.Size), MaxSlots, "size"))
	list(c, &p.Cuts, maxGroups, codeCut)
	c.u64(&p.At)
	c.text(&p.Why)
}

func codeSuspicion(c *codec, p *suspicion) {
	c.id(&p.ID)
	p.Kind = kind(c.limited(uint64(p.Kind), uint64(kEnd)-1, "kind"))
	c.u64(&p.Group)
	c.u64(&p.Seq)
	c.text(&p.Why)
}

func codeFailing(c *codec, p *failing) {
	c.u64(&p.Group)
	c.text(&p.Why)
}

func codeReport(c *codec, p *report) {
	c.id(&p.From)
	c.u32(&p.N)
	c.set(&p.Silent)
	list(c, &p.Suspects, MaxSlots, codeSuspicion)
	list(c, &p.Fails, maxGroups, codeFailing)
}

func codeDone(c *codec, p *Done) {
	c.slot(&p.Slot)
	if c.dec && p.Slot < 0 {
		c.fail(errors.New("fault: a state without a slot"))
	}
	c.u64(&p.Seq)
}

func codeHeld(c *codec, p *held) {
	c.u64(&p.Group)
	list(c, &p.Done, MaxSlots, codeDone)
	c.u64(&p.Issued)
	c.set(&p.Slots)
	c.u32(&p.Order)
}

func (p *hello) code(c *codec) { c.u64(&p.Epoch) }

func (p *behind) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.At)
	c.text(&p.Why)
}

func (p *prepare) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
	list(c, &p.Suspects, MaxSlots, codeSuspicion)
	list(c, &p.Groups, maxGroups, codeU64)
	c.u64(&p.Token)
	c.u64(&p.At)
	c.members(&p.Joiners)
}

func (p *promise) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
	c.ballot(&p.Accepted)
	if p.Accepted != (Ballot{}) {
		c.value(&p.Value)
	}
	list(c, &p.Groups, maxGroups, codeHeld)
	list(c, &p.Dead, MaxSlots, codeID)
	list(c, &p.Gone, MaxSlots, codeID)
	list(c, &p.Reports, MaxSlots, codeReport)
}

func (p *nack) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
	c.ballot(&p.Promised)
}

func (p *accept) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
	c.value(&p.Value)
}

func (p *accepted) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
	list(c, &p.Dead, MaxSlots, codeID)
}

func (p *patience) code(c *codec) {
	c.u64(&p.Epoch)
	c.ballot(&p.Ballot)
}

func (p *commit) code(c *codec) { c.value(&p.Value) }

func (p *suspect) code(c *codec) {
	c.u64(&p.Epoch)
	list(c, &p.Reports, MaxSlots, codeReport)
}

func (p *ask) code(c *codec) {
	c.u64(&p.Epoch)
	c.id(&p.ID)
}

func (p *vouch) code(c *codec) {
	c.u64(&p.Epoch)
	c.id(&p.ID)
	c.bool(&p.Dead)
}

func (p *askStatus) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
	c.u64(&p.Group)
	c.u64(&p.Seq)
}

func (p *status) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
	c.u64(&p.Group)
	c.u64(&p.Seq)
	c.u64(&p.Arrived)
	c.u64(&p.WaitGroup)
	c.u64(&p.WaitSeq)
	c.set(&p.Missing)
	c.bool(&p.Over)
	c.bool(&p.Held)
}

func (p *joinFwd) code(c *codec) {
	c.u64(&p.Epoch)
	codeMember(c, &p.Member)
}

func (p *growAsk) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
}

func (p *growCount) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
	c.u64(&p.Count)
}

func (p *growAt) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
	c.u64(&p.At)
}

func (p *growReady) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
	c.u64(&p.At)
}

func (p *growNo) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
}

func (p *growOff) code(c *codec) {
	c.u64(&p.Epoch)
	c.u64(&p.Token)
}

func (p *noQuorum) code(c *codec) {
	c.u64(&p.Epoch)
	c.text(&p.Why)
}

// Join is coded member first, so that a later version can still read who asks.
func (p *Join) code(c *codec) {
	codeMember(c, &p.Member)
	c.u64(&p.Epoch)
}

func (p *Welcome) code(c *codec) {
	c.id(&p.Self)
	c.view(&p.View)
	list(c, &p.Groups, maxGroups, codeGroup)
	c.u64(&p.At)
	c.bytes(&p.Attach, maxAttach)
	c.set(&p.Gained)
	c.value(&p.Change)
}

func (p *Refused) code(c *codec) { c.text(&p.Reason) }
func (p *Stale) code(c *codec)   { c.view(&p.View) }

type coder[T any] interface {
	*T
	code(*codec)
}

// shape is one type of message.
type shape struct {
	is     func(Msg) bool
	encode func(*codec, Msg)
	decode func(*codec) Msg
}

func shapeOf[T Msg, P coder[T]]() shape {
	return shape{
		is:     func(m Msg) bool { _, ok := m.(T); return ok },
		encode: func(c *codec, m Msg) { v := m.(T); P(&v).code(c) },
		decode: func(c *codec) Msg { var v T; P(&v).code(c); return v },
	}
}

// shapes is in the order of the type byte, from 1. New types go to the end.
var shapes = []shape{
	shapeOf[hello](), shapeOf[behind](), shapeOf[prepare](), shapeOf[promise](), shapeOf[nack](),
	shapeOf[accept](), shapeOf[accepted](), shapeOf[patience](), shapeOf[commit](), shapeOf[suspect](),
	shapeOf[ask](), shapeOf[vouch](), shapeOf[askStatus](), shapeOf[status](), shapeOf[joinFwd](),
	shapeOf[growAsk](), shapeOf[growCount](), shapeOf[growAt](), shapeOf[growReady](), shapeOf[growNo](),
	shapeOf[growOff](), shapeOf[Join](), shapeOf[Welcome](), shapeOf[Refused](), shapeOf[Stale](),
	shapeOf[noQuorum](),
}

// AppendMsg appends the wire form of m to b.
func AppendMsg(b []byte, m Msg) []byte {
	for i, s := range shapes {
		if s.is(m) {
			c := codec{b: append(b, wireVersion, byte(i+1))}
			s.encode(&c, m)
			return c.b
		}
	}
	panic(fmt.Sprintf("fault: no wire form of %T", m))
}

// ParseMsg reads what AppendMsg wrote. The result shares no memory with b.
func ParseMsg(b []byte) (Msg, error) {
	if len(b) < 2 {
		return nil, errShort
	}
	if b[0] != wireVersion {
		return nil, fmt.Errorf("fault: message of version %d, this is version %d", b[0], wireVersion)
	}
	if b[1] == 0 || int(b[1]) > len(shapes) {
		return nil, fmt.Errorf("fault: message of unknown type %d", b[1])
	}
	c := codec{b: b[2:], dec: true}
	m := shapes[b[1]-1].decode(&c)
	if c.err == nil && len(c.b) > 0 {
		c.fail(errTrailer)
	}
	if c.err != nil {
		return nil, c.err
	}
	return m, nil
}

func appendValue(b []byte, v Value) []byte {
	c := codec{b: b}
	c.value(&v)
	return c.b
}

func parseValue(b []byte) (v Value, err error) {
	c := codec{b: b, dec: true}
	c.value(&v)
	if c.err == nil && len(c.b) > 0 {
		c.fail(errTrailer)
	}
	return v, c.err
}

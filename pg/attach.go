package pg

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// What members attach for a newcomer, before the caller's own bytes:
//
//	count (4), then for each group {id (8), born (8), options (23), losses (1), then for each {epoch (8), slots (2), slot (2) each,
//	length of the reason (2), reason}}
//
// The losses are those that no member has returned to its caller yet: they stand at the same place of the program, which
// lies after the Boundary, and the newcomer returns them there too.
type groupOptions struct {
	born   uint64 // the place in the order of creation
	opts   Options
	losses []*RankLost
}

// unreported lists the losses that the next calls will return. The caller drives the group, and its queue is empty.
func (g *Group) unreported() []*RankLost {
	if g.opts.Mode != Raise {
		return nil
	}
	es := slices.Clone(g.pending)
	for _, t := range g.news {
		if t.fail != "" {
			return es
		}
		if t.loss != nil {
			es = append(es, t.loss)
		}
	}
	for v := g.last.Next(); v != nil && v.Fail == ""; v = v.Next() {
		if len(v.Lost) > 0 {
			es = append(es, g.rankLost(v))
		}
	}
	return es
}

func (w *World) encodeAttach(losses map[uint64][]*RankLost, user []byte) []byte {
	le := binary.LittleEndian
	gs := w.Groups()
	b := le.AppendUint32(nil, uint32(len(gs)))
	for _, g := range gs {
		b = g.opts.encode(le.AppendUint64(le.AppendUint64(b, g.id), w.bornAt(g.id)))
		es := losses[g.id]
		es = es[max(0, len(es)-255):]
		b = append(b, byte(len(es)))
		for _, e := range es {
			b = le.AppendUint64(b, e.Epoch)
			b = le.AppendUint16(b, uint16(len(e.Slots)))
			for _, s := range e.Slots {
				b = le.AppendUint16(b, uint16(s))
			}
			b = le.AppendUint16(b, uint16(len(e.Why)))
			b = append(b, e.Why...)
		}
	}
	return append(b, user...)
}

func decodeAttach(b []byte) (map[uint64]groupOptions, []byte, error) {
	all := len(b)
	short := false
	take := func(n int) []byte {
		if short = short || n > len(b); short {
			return make([]byte, max(n, 8))
		}
		x := b[:n]
		b = b[n:]
		return x
	}
	u16 := func() int { return int(binary.LittleEndian.Uint16(take(2))) }
	u32 := func() int { return int(binary.LittleEndian.Uint32(take(4))) }
	u64 := func() uint64 { return binary.LittleEndian.Uint64(take(8)) }
	m := map[uint64]groupOptions{}
	for n := u32(); n > 0 && !short; n-- {
		id := u64()
		x := groupOptions{born: u64()}
		x.opts.decode(take(optionsBytes))
		for k := take(1)[0]; k > 0 && !short; k-- {
			e := &RankLost{Epoch: u64()}
			for i := u16(); i > 0 && !short; i-- {
				e.Slots = append(e.Slots, u16())
			}
			e.Why = string(take(u16()))
			x.losses = append(x.losses, e)
		}
		m[id] = x
	}
	if short {
		return nil, nil, fmt.Errorf("serry: what the members attached (%d bytes) cannot be read", all)
	}
	return m, b, nil
}

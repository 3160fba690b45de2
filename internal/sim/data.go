package sim

import (
	"encoding/binary"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

var le = binary.LittleEndian

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// element is what a process contributes to a call: nobody else's, and never 0.
func element(slot int, inc uint32, call uint64, salt, j int) uint64 {
	return mix(mix(uint64(slot)<<32|uint64(inc))^mix(call*0x9e3779b97f4a7c15+uint64(salt))+uint64(j)*0x632be59bd9b4e019) | 1
}

func fill(b []byte, slot int, inc uint32, call uint64, salt int) {
	for j := 0; 8*j+8 <= len(b); j++ {
		le.PutUint64(b[8*j:], element(slot, inc, call, salt, j))
	}
}

// sum is of what came out: the sum of a mix of each element and its place; zeros count nothing.
func sum(b []byte) uint64 { return sumAt(b, 0) }

func sumAt(b []byte, at int) (s uint64) {
	for j := 0; 8*j+8 <= len(b); j++ {
		s += place(le.Uint64(b[8*j:]), at+j)
	}
	return s
}

func place(x uint64, j int) uint64 {
	if x == 0 {
		return 0
	}
	return mix(x + uint64(j)*0xd1342543de82ef95)
}

// buffers makes the call of a step.
func (p *proc) buffers(st *step, g *pg.Group, call uint64) (in, out []byte, c *collectives.Call) {
	size, n := g.Size(), 8*st.n
	c = &collectives.Call{DType: dtype.I64}
	parts := func() []int {
		x := make([]int, max(len(g.Slots()), p.w.capacityOf(st.group)))
		for r := range size {
			x[r] = n
		}
		return x
	}
	switch st.op {
	case history.Barrier:
		c.Kind = collectives.Barrier
	case history.AllReduce:
		c.Kind, c.Reduce = collectives.AllReduce, dtype.Sum
		in = make([]byte, n)
		fill(in, p.slot, p.inc, call, 0)
		if out = in; !st.within {
			out = make([]byte, n)
		}
	case history.AllGather:
		c.Kind, c.OutParts = collectives.AllGather, parts()
		in, out = make([]byte, n), make([]byte, n*size)
		fill(in, p.slot, p.inc, call, 0)
	case history.AllToAll:
		c.Kind, c.InParts, c.OutParts = collectives.AllToAll, parts(), parts()
		in, out = make([]byte, n*size), make([]byte, n*size)
		for r, s := range g.Slots() {
			fill(in[r*n:(r+1)*n], p.slot, p.inc, call, 1+s)
		}
	case history.Broadcast:
		c.Kind, c.Root = collectives.Broadcast, st.root%p.w.baseOf(st.group, g)
		in = make([]byte, n)
		if g.Rank() == c.Root {
			fill(in, p.slot, p.inc, call, 0)
		}
		out = in
	}
	c.In, c.Out = in, out
	return in, out, c
}

// want computes from the contributors what a process must have got, without the code that is tested.
func (w *World) want(slot int, e *history.Event) (uint64, bool) {
	at := int(e.Call>>20) - 1
	if at >= len(w.steps) || e.Op == history.Boundary {
		return 0, false
	}
	st := &w.steps[at]
	all := w.slots[e.Group]
	rank := 0
	var s uint64
	switch e.Op {
	case history.AllReduce:
		for j := range st.n {
			x := uint64(0)
			for c := e.Set.Next(0); c >= 0; c = e.Set.Next(c + 1) {
				x += element(c, w.incAt(c, e.Epoch), e.Call, 0, j)
			}
			s += place(x, j)
		}
	case history.AllGather, history.AllToAll, history.Pair:
		for _, c := range all {
			if e.Set.Has(c) {
				for j := range st.n {
					switch inc := w.incAt(c, e.Epoch); e.Op {
					case history.AllGather:
						s += place(element(c, inc, e.Call, 0, j), rank*st.n+j)
					case history.AllToAll:
						s += place(element(c, inc, e.Call, 1+slot, j), rank*st.n+j)
					default:
						for k := range 2 {
							s += place(element(c, inc, e.Call, pairSalt(k, slot), j), k<<20+rank<<10+j)
						}
					}
				}
			}
			rank++
		}
	case history.Broadcast:
		root := all[st.root%w.base(e.Group)]
		if !e.Set.Has(root) {
			return 1, true // it succeeds without a source
		}
		for j := range st.n {
			s += place(element(root, w.incAt(root, e.Epoch), e.Call, 0, j), j)
		}
	case history.Barrier:
	default:
		return 0, false
	}
	return s, true
}

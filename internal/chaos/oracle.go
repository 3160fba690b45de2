package chaos

import (
	"encoding/binary"
	"hash/crc64"
	"math"
	"math/bits"
	"slices"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/history"
)

// The oracle computes results in the simplest way, from the contributors alone.

var crcTable = crc64.MakeTable(crc64.ECMA)

func sum(b []byte) uint64 { return crc64.Checksum(b, crcTable) }

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// input is what rank from gives to rank to (0 where all get the same).
func (o *op) input(from, to, n int) []byte {
	b := make([]byte, n*o.DType.Size())
	h := mix(uint64(o.Step)<<32 | uint64(o.At)<<16 | uint64(from)<<8 | uint64(to))
	for i := range n {
		h = mix(h)
		switch o.DType {
		case dtype.F32:
			binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(float32(int32(h))/(1<<29)))
		case dtype.BF16:
			binary.LittleEndian.PutUint16(b[2*i:], uint16(math.Float32bits(float32(int32(h))/(1<<29))>>16))
		case dtype.I32:
			binary.LittleEndian.PutUint32(b[4*i:], uint32(h))
		case dtype.I64:
			binary.LittleEndian.PutUint64(b[8*i:], h)
		default:
			b[i] = byte(h)
		}
	}
	return b
}

// pairInput is what one rank gives another in a half of a pair.
func (o *op) pairInput(from, to int, combine bool) []byte {
	p := *o
	if combine {
		p.At += 1000
	}
	return p.input(from, to, o.pairCount(from, to, combine))
}

// want is the result of the operation at a rank of its group, if the ranks in active contribute.
func (o *op) want(rank, size int, active []int) []byte {
	es := o.DType.Size()
	var out []byte
	switch o.Kind {
	case "all_reduce":
		out = make([]byte, o.N*es)
		in := map[int][]byte{}
		for _, r := range active {
			in[r] = o.input(r, 0, o.N)
		}
		for i := range o.N {
			o.reduce(out[i*es:(i+1)*es], func(r int) ([]byte, bool) {
				b, ok := in[r]
				if !ok {
					return nil, false
				}
				return b[i*es : (i+1)*es], true
			}, len(active))
		}
	case "broadcast":
		out = o.input(o.Root, 0, o.N)
	case "all_gather":
		for r := range size {
			b := make([]byte, o.count(r, 0)*es)
			if slices.Contains(active, r) {
				b = o.input(r, 0, o.count(r, 0))
			}
			out = append(out, b...)
		}
	case "all_to_all":
		for r := range size {
			b := make([]byte, o.count(r, rank)*es)
			if slices.Contains(active, r) {
				b = o.input(r, rank, o.count(r, rank))
			}
			out = append(out, b...)
		}
	case "pair":
		for _, combine := range []bool{false, true} {
			for _, r := range active {
				out = append(out, o.pairInput(r, rank, combine)...)
			}
		}
	}
	return out
}

// reduce is the fixed binary tree over rank numbers; a rank that is absent is skipped. Integers are summed in 64 bits: what
// does not fit in their own type falls away at the end, which is the same as wrapping at each step.
func (o *op) reduce(dst []byte, at func(int) ([]byte, bool), n int) {
	le := binary.LittleEndian
	switch o.DType {
	case dtype.I64:
		le.PutUint64(dst, uint64(o.whole(at, n, func(b []byte) int64 { return int64(le.Uint64(b)) })))
	case dtype.I32:
		le.PutUint32(dst, uint32(o.whole(at, n, func(b []byte) int64 { return int64(int32(le.Uint32(b))) })))
	case dtype.U8:
		dst[0] = byte(o.whole(at, n, func(b []byte) int64 { return int64(b[0]) }))
	case dtype.F32:
		x := o.float(at, n, func(b []byte) float32 { return math.Float32frombits(le.Uint32(b)) })
		le.PutUint32(dst, math.Float32bits(x))
	case dtype.BF16:
		x := o.float(at, n, func(b []byte) float32 { return math.Float32frombits(uint32(le.Uint16(b)) << 16) })
		u := math.Float32bits(x)
		le.PutUint16(dst, uint16((u+0x7fff+u>>16&1)>>16))
	default:
		panic(o.DType.String() + " is unknown here")
	}
}

func (o *op) whole(at func(int) ([]byte, bool), n int, get func([]byte) int64) int64 {
	x, _ := tree(0, o.leaves(), at, get, func(a, b int64) int64 {
		if o.Reduce == dtype.Max {
			return max(a, b)
		}
		return a + b
	})
	if o.Reduce == dtype.Avg {
		x /= int64(n)
	}
	return x
}

func (o *op) float(at func(int) ([]byte, bool), n int, get func([]byte) float32) float32 {
	x, _ := tree(0, o.leaves(), at, get, func(a, b float32) float32 {
		if o.Reduce == dtype.Max {
			return max(a, b)
		}
		return a + b
	})
	if o.Reduce == dtype.Avg {
		x /= float32(n)
	}
	return x
}

func tree[T any](lo, hi int, at func(int) ([]byte, bool), get func([]byte) T, join func(a, b T) T) (x T, ok bool) {
	if hi-lo == 1 {
		b, ok := at(lo)
		if !ok {
			return x, false
		}
		return get(b), true
	}
	a, okA := tree(lo, (lo+hi)/2, at, get, join)
	b, okB := tree((lo+hi)/2, hi, at, get, join)
	switch {
	case !okA:
		return b, okB
	case !okB:
		return a, okA
	}
	return join(a, b), true
}

// leaves is the width of the tree: the capacity, or the next power of two.
func (o *op) leaves() int { return 1 << bits.Len(uint(o.capacity()-1)) }

// oracle knows the sum of what an operation of the program must have given the rank in a slot, for history.Run.
type oracle struct {
	*Program
	world uint64
	steps map[int]map[uint64]*op // by place
	known map[known]uint64
}

// known is an operation whose result is alike on all, and its set.
type known struct {
	call uint64
	set  history.Set
}

func newOracle(p *Program, world uint64) *oracle {
	return &oracle{Program: p, world: world, steps: map[int]map[uint64]*op{}, known: map[known]uint64{}}
}

// find is the operation at a place of the program, nil if there is none.
func (w *oracle) find(call uint64) *op {
	at := stepOf(call)
	ops, ok := w.steps[at]
	if !ok {
		ops = map[uint64]*op{}
		for _, m := range w.step(at) {
			ops[m.op.place()] = m.op
		}
		w.steps[at] = ops
	}
	return ops[call]
}

func (w *oracle) sum(slot int, e *history.Event) (uint64, bool) {
	o := w.find(e.Call)
	if o == nil {
		return 0, false
	}
	members := o.members(o.Group)
	rank := slices.Index(members, slot)
	switch e.Op {
	case history.Step:
		return sum(o.stepped(slot)), true
	case history.Recv:
		var want []byte
		for i := range int(e.N) {
			want = append(want, o.message(i)...)
		}
		return sum(want), true
	case history.Barrier, history.Send, history.Sub, history.Close, history.Boundary:
		return 0, false
	}
	k := known{e.Call, e.Set}
	if s, ok := w.known[k]; ok && e.Op.Alike() {
		return s, true
	}
	var active []int
	for i, s := range members {
		if e.Set.Has(s) {
			active = append(active, i)
		}
	}
	s := sum(o.want(rank, len(members), active))
	w.known[k] = s
	return s, true
}

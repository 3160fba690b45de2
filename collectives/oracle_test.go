package collectives

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/serry-project/serry/internal/dtype"
)

// task is an operation of a test: what each rank gives, and a dumb oracle for what it gets.
type task struct {
	kind    Kind
	dt      dtype.DType
	op      dtype.ReduceOp
	n       int // bytes
	root    int
	size    int
	inPlace bool
	uneven  bool
	seed    uint64
}

func (k *task) data(from, to, n int) []byte {
	r := rand.New(rand.NewPCG(k.seed, uint64(from)<<32|uint64(to)))
	b := make([]byte, n)
	switch k.dt {
	case dtype.F32:
		for i := 0; i < n; i += 4 {
			binary.LittleEndian.PutUint32(b[i:], math.Float32bits(float32(r.NormFloat64())))
		}
	case dtype.BF16:
		for i := 0; i < n; i += 2 {
			binary.LittleEndian.PutUint16(b[i:], uint16(math.Float32bits(float32(r.NormFloat64()))>>16))
		}
	default:
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	return b
}

// part is the bytes that a rank gives to another (AllToAll), or to all (AllGather).
func (k *task) part(from, to int) int {
	if !k.uneven {
		return k.n
	}
	es := k.dt.Size()
	if k.kind == AllGather {
		to = 0
	}
	if k.inPlace { // what a rank gives is as much as it takes, and not as much as others do
		return k.n / es * ((from*to + from + to) % 4) / 2 * es
	}
	return k.n / es * ((from*2 + to*3) % 4) / 2 * es
}

func (k *task) call(rank int) *Call {
	c := &Call{Kind: k.kind, DType: k.dt, Root: k.root}
	out := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = 0x5a
		}
		return b
	}
	switch k.kind {
	case AllReduce:
		c.Reduce, c.In = k.op, k.data(rank, 0, k.n)
		if c.Out = c.In; !k.inPlace {
			c.Out = out(k.n)
		}
	case Broadcast:
		c.Out = out(k.n)
		if rank == k.root {
			copy(c.Out, k.data(rank, 0, k.n))
		}
		c.In = c.Out
	case AllGather:
		at, total := 0, 0
		for r := range k.size {
			if r == rank {
				at = total
			}
			c.OutParts = append(c.OutParts, k.part(r, 0))
			total += k.part(r, 0)
		}
		c.Out = out(total)
		c.In = k.data(rank, 0, k.part(rank, 0))
		if k.inPlace {
			copy(c.Out[at:], c.In)
			c.In = c.Out[at : at+len(c.In)]
		}
	case AllToAll:
		total := 0
		for r := range k.size {
			c.InParts, c.OutParts = append(c.InParts, k.part(rank, r)), append(c.OutParts, k.part(r, rank))
			c.In = append(c.In, k.data(rank, r, k.part(rank, r))...)
			total += k.part(r, rank)
		}
		if k.inPlace && total == len(c.In) {
			c.Out = c.In
		} else {
			c.Out = out(total)
		}
	}
	return c
}

// want is what a rank gets if these contribute; ok false: the operation fails.
func (k *task) want(rank int, active []int) (b []byte, ok bool) {
	zero := func(r, n, to int) []byte {
		if slices.Contains(active, r) {
			return k.data(r, to, n)
		}
		return make([]byte, n)
	}
	switch k.kind {
	case Broadcast:
		return k.data(k.root, 0, k.n), slices.Contains(active, k.root)
	case AllGather:
		for r := range k.size {
			b = append(b, zero(r, k.part(r, 0), 0)...)
		}
	case AllToAll:
		for r := range k.size {
			b = append(b, zero(r, k.part(r, rank), rank)...)
		}
	case AllReduce:
		in := map[int][]byte{}
		for _, r := range active {
			in[r] = k.data(r, 0, k.n)
		}
		es := k.dt.Size()
		for i := 0; i < k.n; i += es {
			b = k.append(b, func(r int) []byte {
				if in[r] == nil {
					return nil
				}
				return in[r][i : i+es]
			}, len(active))
		}
	}
	return b, true
}

// append adds one element of the reduction: the fixed tree over 8 ranks.
func (k *task) append(b []byte, at func(int) []byte, n int) []byte {
	le := binary.LittleEndian
	if k.dt.Float() {
		x, _ := tree(0, 8, func(r int) (float32, bool) {
			switch v := at(r); {
			case v == nil:
				return 0, false
			case k.dt == dtype.BF16:
				return math.Float32frombits(uint32(le.Uint16(v)) << 16), true
			default:
				return math.Float32frombits(le.Uint32(v)), true
			}
		}, k.op == dtype.Max)
		if k.op == dtype.Avg {
			x /= float32(n)
		}
		u := math.Float32bits(x)
		if k.dt == dtype.BF16 {
			return le.AppendUint16(b, uint16((u+0x7fff+u>>16&1)>>16))
		}
		return le.AppendUint32(b, u)
	}
	x, _ := tree(0, 8, func(r int) (int64, bool) {
		v := at(r)
		switch {
		case v == nil:
			return 0, false
		case k.dt == dtype.I64:
			return int64(le.Uint64(v)), true
		case k.dt == dtype.I32:
			return int64(int32(le.Uint32(v))), true
		}
		return int64(v[0]), true
	}, k.op == dtype.Max)
	if k.op == dtype.Avg {
		x /= int64(n)
	}
	switch k.dt {
	case dtype.I64:
		return le.AppendUint64(b, uint64(x))
	case dtype.I32:
		return le.AppendUint32(b, uint32(x))
	}
	return append(b, byte(x))
}

func tree[T int64 | float32](lo, hi int, at func(int) (T, bool), most bool) (T, bool) {
	if hi-lo == 1 {
		return at(lo)
	}
	a, okA := tree(lo, (lo+hi)/2, at, most)
	b, okB := tree((lo+hi)/2, hi, at, most)
	switch {
	case !okA:
		return b, okB
	case !okB:
		return a, okA
	case most:
		return max(a, b), true
	}
	return a + b, true
}

package vec

import (
	"math/bits"

	"github.com/serry-project/serry/internal/dtype"
)

const (
	// levels is the most values that wait for their other half: one for each
	// height of the tree, and the one that is being added.
	levels = 11 // log2(MaxRanks) + 1

	// blockBytes of scratch for each of them keep a block of the sum in the
	// first-level cache, and the scratch on the stack.
	blockBytes = 2048
	smallBytes = 128
)

// reduction is one call.
type reduction struct {
	dst  []byte
	srcs [][]byte
	dt   dtype.DType
	op   dtype.ReduceOp
	n    int // contributors
}

// run chooses the type that the tree is summed in.
func (r *reduction) run() {
	switch accType(r.dt, r.op) {
	case dtype.F32:
		scratch[float32](r)
	case dtype.I32:
		scratch[int32](r)
	case dtype.I64:
		scratch[int64](r)
	case dtype.U8:
		scratch[uint8](r)
	}
}

// scratch chooses how much memory is cleared for it: for a few elements the
// clearing would take longer than the sum.
func scratch[T number](r *reduction) {
	if r.elems()*sizeOf[T]() <= smallBytes {
		smallScratch[T](r)
		return
	}
	var tmp [levels * blockBytes / 8]uint64
	blocks(r, words[T](tmp[:]))
}

func smallScratch[T number](r *reduction) {
	var tmp [levels * smallBytes / 8]uint64
	blocks(r, words[T](tmp[:]))
}

func (r *reduction) elems() int { return len(r.dst) / r.dt.Size() }

// blocks sums one block after the other and stores each only when all its
// sources are read, so that dst may be one of them.
func blocks[T number](r *reduction, tmp []T) {
	block := len(tmp) / levels
	total := r.elems()
	for off := 0; off < total; off += block {
		n := min(block, total-off)
		sum := tree(r, tmp, off, n)
		store(r, tmp, sum, off)
	}
}

// tree returns the sum of n elements from off on: in tmp, or in a source if
// there is only one.
//
// Ranks are pushed in order on a stack of values. Between two neighbours stands
// the height at which their paths to the root meet; the heights on the stack
// fall, and whoever comes with a greater one first makes everything below it
// one value. That is the tree with absent ranks skipped.
func tree[T number](r *reduction, tmp []T, off, n int) []T {
	var stack [levels][]T
	var meet [levels]int // meet[i]: height between stack[i-1] and stack[i]
	block := len(tmp) / levels
	src, size := r.dt, r.dt.Size()
	lo, hi := off*size, (off+n)*size
	depth, last := 0, 0
	for rank := 0; rank < len(r.srcs); rank++ {
		if r.srcs[rank] == nil {
			continue
		}
		if depth > 0 {
			h := bits.Len(uint(last ^ rank))
			for ; depth > 1 && meet[depth-1] < h; depth-- {
				d := tmp[(depth-2)*block : (depth-2)*block+n]
				merge(r.op, d, stack[depth-2], stack[depth-1])
				stack[depth-2] = d
			}
			meet[depth] = h
		}
		own := tmp[depth*block : depth*block+n]
		switch k := r.fused(rank); {
		case k > 1 && fuse(own, r.srcs[rank:rank+k], src, lo, hi):
			stack[depth] = own
			rank += k - 1
		default:
			stack[depth] = leaf(own, r.srcs[rank][lo:hi], src)
		}
		last = rank
		depth++
	}
	for ; depth > 1; depth-- {
		d := tmp[(depth-2)*block : (depth-2)*block+n]
		merge(r.op, d, stack[depth-2], stack[depth-1])
		stack[depth-2] = d
	}
	return stack[0]
}

// merge is d = a + b, or their maximum.
func merge[T number](op dtype.ReduceOp, d, a, b []T) {
	if op == dtype.Max {
		max2(d, a, b)
	} else {
		add2(d, a, b)
	}
}

// fused is how many ranks from this one on are a full subtree that one kernel
// sums: 4, 2 or 1.
func (r *reduction) fused(rank int) int {
	if r.op == dtype.Max || rank&1 != 0 || rank+1 >= len(r.srcs) || r.srcs[rank+1] == nil {
		return 1
	}
	if rank&3 == 0 && rank+3 < len(r.srcs) && r.srcs[rank+2] != nil && r.srcs[rank+3] != nil {
		return 4
	}
	return 2
}

// fuse sums 2 or 4 sources at once, if they lie so that it can.
func fuse[T number](d []T, s [][]byte, src dtype.DType, lo, hi int) bool {
	size := src.Size()
	for _, b := range s {
		if src != dtype.BF16 && !aligned(b, size) {
			return false
		}
	}
	switch {
	case src == dtype.BF16:
		a, b := s[0][lo:hi], s[1][lo:hi]
		if len(s) == 2 {
			add2BF16(d, a, b)
		} else {
			add4BF16(d, a, b, s[2][lo:hi], s[3][lo:hi])
		}
	case size == sizeOf[T]():
		a, b := view[T](s[0][lo:hi]), view[T](s[1][lo:hi])
		if len(s) == 2 {
			add2(d, a, b)
		} else {
			add4(d, a, b, view[T](s[2][lo:hi]), view[T](s[3][lo:hi]))
		}
	default:
		return false
	}
	return true
}

// leaf is one source as elements of T: where it lies, if it can be used there,
// else in own.
func leaf[T number](own []T, b []byte, src dtype.DType) []T {
	ok := aligned(b, src.Size())
	switch {
	case src == dtype.BF16:
		widenBF16(own, b)
	case src.Size() == sizeOf[T]() && ok:
		return view[T](b)
	case src.Size() == sizeOf[T]():
		copy(bytesOf(own), b)
	case src == dtype.U8:
		widen(own, b)
	case src == dtype.I32 && ok:
		widen(own, view[int32](b))
	case src == dtype.I32:
		for i := range own {
			own[i] = T(int32(le.Uint32(b[4*i:])))
		}
	}
	return own
}

// store ends a block: division, rounding, and the way to dst.
func store[T number](r *reduction, tmp, sum []T, off int) {
	size := r.dt.Size()
	d := r.dst[off*size : (off+len(sum))*size]
	if r.op == dtype.Max && r.dt != dtype.BF16 || r.op == dtype.Sum && !r.dt.Float() {
		copy(d, bytesOf(sum))
		return
	}
	if r.dt == dtype.BF16 || aligned(d, size) {
		end(d, bytesOf(sum), r.dt, r.op, r.n)
		return
	}
	// No element of tmp but the sum's is in use any more, and the result is not
	// longer than the sum.
	own := bytesOf(tmp[:len(sum)])[:len(d)]
	if &own[0] != &bytesOf(sum)[0] {
		copy(bytesOf(tmp[:len(sum)]), bytesOf(sum))
	}
	end(own, bytesOf(tmp[:len(sum)]), r.dt, r.op, r.n)
	copy(d, own)
}

// end is store for a d that is aligned or bf16. acc may begin where d begins: each element is
// read before anything at its place or behind it is written.
func end(d, acc []byte, dt dtype.DType, op dtype.ReduceOp, n int) {
	switch dt {
	case dtype.F32:
		if op == dtype.Avg {
			divF32(view[float32](d), view[float32](acc), float32(n))
		} else {
			canonF32(view[float32](d), view[float32](acc))
		}
	case dtype.BF16:
		switch op {
		case dtype.Sum:
			roundBF16(d, view[float32](acc))
		case dtype.Avg:
			divBF16(d, view[float32](acc), float32(n))
		case dtype.Max:
			cutBF16(d, view[float32](acc))
		}
	case dtype.I32:
		narrow(view[int32](d), view[int64](acc), int64(n))
	case dtype.I64:
		narrow(view[int64](d), view[int64](acc), int64(n))
	case dtype.U8:
		narrow(d, view[int64](acc), int64(n))
	}
}

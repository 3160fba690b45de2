package vec

import (
	"math/bits"

	"github.com/serry-project/serry/internal/dtype"
)

// fewBlock is how many elements are summed before they are finished, so that
// the second pass finds them in the first-level cache.
const fewBlock = 512

// reduceFew does the common cases without scratch memory for a tree: 1 or 2
// ranks, or 4 that are a balanced tree, all aligned. It says whether it was one
// of them.
func reduceFew(dst []byte, srcs [][]byte, dt dtype.DType, op dtype.ReduceOp, contributors int) bool {
	if op == dtype.Avg && !dt.Float() {
		return false
	}
	var s [4][]byte
	var rank [4]int
	k := 0
	for r, b := range srcs {
		if b == nil {
			continue
		}
		if k == len(s) || !aligned(b, dt.Size()) {
			return false
		}
		s[k], rank[k] = b, r
		k++
	}
	if !aligned(dst, dt.Size()) {
		return false
	}
	switch k {
	case 2:
	case 4:
		left, mid, right := bits.Len(uint(rank[0]^rank[1])), bits.Len(uint(rank[1]^rank[2])), bits.Len(uint(rank[2]^rank[3]))
		if op == dtype.Max || mid < left || mid < right {
			return false
		}
	case 1:
		if op == dtype.Max || !dt.Float() {
			copy(dst, s[0])
			return true
		}
		if dt == dtype.F32 {
			end(dst, s[0], dt, op, contributors)
			return true
		}
	default:
		return false
	}
	switch dt {
	case dtype.F32:
		few[float32](dst, &s, k, dt, op, contributors)
	case dtype.BF16:
		fewBF16(dst, &s, k, op, contributors)
	case dtype.I32:
		few[int32](dst, &s, k, dt, op, contributors)
	case dtype.I64:
		few[int64](dst, &s, k, dt, op, contributors)
	case dtype.U8:
		few[uint8](dst, &s, k, dt, op, contributors)
	}
	return true
}

// few adds straight into dst: a block is stored when its sources are read.
func few[T number](dst []byte, s *[4][]byte, k int, dt dtype.DType, op dtype.ReduceOp, n int) {
	d, a, b := view[T](dst), view[T](s[0]), view[T](s[1])
	c, e := view[T](s[2]), view[T](s[3])
	for lo := 0; lo < len(d); lo += fewBlock {
		hi := min(lo+fewBlock, len(d))
		switch {
		case op == dtype.Max:
			max2(d[lo:hi], a[lo:hi], b[lo:hi])
		case k == 2:
			add2(d[lo:hi], a[lo:hi], b[lo:hi])
		default:
			add4(d[lo:hi], a[lo:hi], b[lo:hi], c[lo:hi], e[lo:hi])
		}
		if op != dtype.Max && dt.Float() {
			out := bytesOf(d[lo:hi])
			end(out, out, dt, op, n)
		}
	}
}

func fewBF16(dst []byte, s *[4][]byte, k int, op dtype.ReduceOp, n int) {
	var tmp [fewBlock]float32
	d, a := view[uint16](dst), view[uint16](s[0])
	b, c, e := view[uint16](s[1]), view[uint16](s[2]), view[uint16](s[3])
	for lo := 0; lo < len(d); lo += fewBlock {
		hi := min(lo+fewBlock, len(d))
		sum := tmp[:hi-lo]
		switch {
		case k == 1:
			widenBF16(sum, a[lo:hi])
		case op == dtype.Max:
			maxBF16(d[lo:hi], a[lo:hi], b[lo:hi])
			continue
		case k == 2:
			add2BF16(sum, a[lo:hi], b[lo:hi])
		default:
			add4BF16(sum, a[lo:hi], b[lo:hi], c[lo:hi], e[lo:hi])
		}
		end(bytesOf(d[lo:hi]), bytesOf(sum), dtype.BF16, op, n)
	}
}

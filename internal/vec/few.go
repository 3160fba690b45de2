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
		if k == len(s) || dt != dtype.BF16 && !aligned(b, dt.Size()) {
			return false
		}
		s[k], rank[k] = b, r
		k++
	}
	if dt != dtype.BF16 && !aligned(dst, dt.Size()) {
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
	switch {
	case dt == dtype.F32 && op == dtype.Sum && k == 2:
		sum2F32(view[float32](dst), view[float32](s[0]), view[float32](s[1]))
	case dt == dtype.F32:
		few[float32](dst, &s, k, dt, op, contributors)
	case dt == dtype.BF16:
		fewBF16(dst, &s, k, op, contributors)
	case dt == dtype.I32:
		few[int32](dst, &s, k, dt, op, contributors)
	case dt == dtype.I64:
		few[int64](dst, &s, k, dt, op, contributors)
	case dt == dtype.U8:
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

func fewBF16(d []byte, s *[4][]byte, k int, op dtype.ReduceOp, n int) {
	switch {
	case op == dtype.Max:
		max2BF16(d, s[0], s[1])
		return
	case op == dtype.Sum && k == 2:
		sum2BF16(d, s[0], s[1])
		return
	}
	var tmp [fewBlock]float32
	for lo := 0; lo < len(d); lo += 2 * fewBlock {
		hi := min(lo+2*fewBlock, len(d))
		sum := tmp[:(hi-lo)/2]
		switch k {
		case 1:
			widenBF16(sum, s[0][lo:hi])
		case 2:
			add2BF16(sum, s[0][lo:hi], s[1][lo:hi])
		default:
			add4BF16(sum, s[0][lo:hi], s[1][lo:hi], s[2][lo:hi], s[3][lo:hi])
		}
		end(d[lo:hi], bytesOf(sum), dtype.BF16, op, n)
	}
}

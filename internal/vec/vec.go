// Package vec reduces buffers of several ranks to one, in the one order of
// summation that makes every algorithm, transport and number of hosts give the
// same bits.
//
// A reduction is the fixed binary tree over rank numbers: ranks 0 and 1, 2 and
// 3, and so on, then pairs of pairs. A rank that is absent is skipped: an inner
// node with one present child takes that child's value. So the tree over an
// aligned block of a power of two ranks is a subtree of the tree over all.
//
//   - f32 and bf16 are summed in f32, and bf16 is rounded once, at the end, to
//     nearest even. A sum that is NaN is the canonical quiet NaN (0x7fc00000,
//     0x7fc0), because the payload that hardware makes differs.
//   - Integers wrap in their own type.
//   - Avg of floating point is the sum divided by the number of contributors,
//     in f32. Avg of integers sums in 64 bits (i64 wraps) and truncates toward
//     zero.
//   - Max of floating point is NaN if any element is, the first in rank order
//     with its payload; +0 is greater than -0.
//
// Nothing here allocates. Elements are little-endian, and buffers need not be
// aligned, but are faster if they are.
package vec

import (
	"fmt"

	"github.com/serry-project/serry/internal/dtype"
)

// MaxRanks is the largest number of sources.
const MaxRanks = 1024

// Reduce sets dst to the reduction of srcs. The index in srcs is the rank, nil
// is an absent rank. contributors is what Avg divides by: the number of ranks
// whose data is in srcs.
//
// Every source has the length of dst, a whole number of elements. dst may be
// one of the sources, exactly, and overlaps none otherwise. Anything else is a
// bug of the caller and panics.
func Reduce(dst []byte, srcs [][]byte, dt dtype.DType, op dtype.ReduceOp, contributors int) {
	check(dst, srcs, dt, op, contributors)
	if len(dst) == 0 {
		return
	}
	if reduceFew(dst, srcs, dt, op, contributors) {
		return
	}
	r := reduction{dst: dst, srcs: srcs, dt: dt, op: op, n: contributors}
	r.run()
}

// accType is the type that elements are summed in.
func accType(dt dtype.DType, op dtype.ReduceOp) dtype.DType {
	switch {
	case dt == dtype.BF16:
		return dtype.F32
	case op == dtype.Avg && !dt.Float():
		return dtype.I64
	}
	return dt
}

// copyPiece is the most that one memmove copies: about 5 microseconds.
const copyPiece = 64 << 10

// Copy copies src to dst, which are equally long, in pieces.
func Copy(dst, src []byte) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("vec: copy %d bytes to %d", len(src), len(dst)))
	}
	// memmove cannot be preempted, and holds up every stop-the-world.
	for len(dst) > copyPiece {
		copy(dst[:copyPiece], src)
		dst, src = dst[copyPiece:], src[copyPiece:]
	}
	copy(dst, src)
}

func check(dst []byte, srcs [][]byte, dt dtype.DType, op dtype.ReduceOp, contributors int) {
	if !dt.Valid() || !op.Valid() {
		panic(fmt.Sprintf("vec: no such reduction: %s %s", dt, op))
	}
	if len(dst)%dt.Size() != 0 || len(srcs) > MaxRanks || contributors < 1 {
		panic(fmt.Sprintf("vec: %s %s of %d bytes from %d ranks, %d contributors", dt, op, len(dst), len(srcs), contributors))
	}
	present := false
	for r, s := range srcs {
		if s == nil {
			continue
		}
		present = true
		if len(s) != len(dst) {
			panic(fmt.Sprintf("vec: %s %s: rank %d has %d bytes, want %d", dt, op, r, len(s), len(dst)))
		}
	}
	if !present {
		panic(fmt.Sprintf("vec: %s %s of no rank", dt, op))
	}
}

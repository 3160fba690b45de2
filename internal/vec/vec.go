// Package vec reduces buffers of several ranks to one, in the one order of
// summation that makes every algorithm, transport and number of hosts give the
// same bits.
//
// A reduction is the fixed binary tree over rank numbers: ranks 0 and 1, 2 and
// 3, and so on, then pairs of pairs. A rank that is absent is skipped: an inner
// node with one present child takes that child's value. So the tree over an
// aligned block of a power of two ranks is a subtree of the tree over all, and
// [Partial] results of such blocks can be reduced further to the same bits.
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
	check(dst, srcs, dt, op, dt.Size(), contributors)
	if len(dst) == 0 {
		return
	}
	if reduceFew(dst, srcs, dt, op, contributors) {
		return
	}
	r := reduction{dst: dst, srcs: srcs, dt: dt, op: op, n: contributors, finish: true}
	r.run()
}

// AccType is the type of the elements of a Partial result: f32 for f32 and
// bf16, i64 for an Avg of integers, else dt itself. It is its own AccType.
func AccType(dt dtype.DType, op dtype.ReduceOp) dtype.DType {
	switch {
	case dt == dtype.BF16:
		return dtype.F32
	case op == dtype.Avg && !dt.Float():
		return dtype.I64
	}
	return dt
}

// Partial is Reduce without its end: no division and no rounding. The elements
// of dst are of AccType(dt, op). Partial results of aligned blocks of ranks are
// sources of a further Partial, of that type and the same op. dst is none of the
// sources unless its type is theirs.
func Partial(dst []byte, srcs [][]byte, dt dtype.DType, op dtype.ReduceOp) {
	check(dst, srcs, dt, op, AccType(dt, op).Size(), 1)
	if len(dst) == 0 {
		return
	}
	r := reduction{dst: dst, srcs: srcs, dt: dt, op: op, n: 1}
	r.run()
}

// Finish makes the result of a Reduce from a Partial over all contributors. dst
// may begin where acc begins.
func Finish(dst, acc []byte, dt dtype.DType, op dtype.ReduceOp, contributors int) {
	size := AccType(dt, op).Size()
	if len(dst)%dt.Size() != 0 || len(acc)/size != len(dst)/dt.Size() || len(acc)%size != 0 || contributors < 1 {
		panic(fmt.Sprintf("vec: finish %s %s of %d bytes from %d, %d contributors", dt, op, len(dst), len(acc), contributors))
	}
	if len(dst) == 0 {
		return
	}
	// The tree over one source of the accumulator's type, then the end.
	one := [1][]byte{acc}
	r := reduction{dst: dst, srcs: one[:], dt: dt, op: op, n: contributors, finish: true, fromAcc: true}
	r.run()
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

func check(dst []byte, srcs [][]byte, dt dtype.DType, op dtype.ReduceOp, dstSize, contributors int) {
	if !dt.Valid() || !op.Valid() {
		panic(fmt.Sprintf("vec: no such reduction: %s %s", dt, op))
	}
	n := len(dst) / dstSize
	if len(dst)%dstSize != 0 || len(srcs) > MaxRanks || contributors < 1 {
		panic(fmt.Sprintf("vec: %s %s of %d bytes from %d ranks, %d contributors", dt, op, len(dst), len(srcs), contributors))
	}
	present := false
	for r, s := range srcs {
		if s == nil {
			continue
		}
		present = true
		if len(s) != n*dt.Size() {
			panic(fmt.Sprintf("vec: %s %s: rank %d has %d bytes, want %d", dt, op, r, len(s), n*dt.Size()))
		}
	}
	if !present {
		panic(fmt.Sprintf("vec: %s %s of no rank", dt, op))
	}
}

package pg

import "github.com/serry-project/serry/internal/dtype"

// DType is the type of a buffer's elements: f32, bf16, i32, i64, u8. Size() is an element's bytes. Buffers get it from F32,
// BF16, I32, I64 and U8.
type DType = dtype.DType

// ReduceOp is how the elements of several ranks become one.
type ReduceOp = dtype.ReduceOp

// The reductions. Sums are made in the fixed tree order of the ranks, in f32 for bf16; integers wrap. Avg divides by the
// number of contributors. Max propagates NaN.
const (
	Sum = dtype.Sum
	Avg = dtype.Avg
	Max = dtype.Max
)

// Package dtype names the element types and the reductions that operations
// know. The numbers travel in frames and slot headers, so they never change.
package dtype

import "fmt"

// DType is the type of the elements of a buffer. The zero value is none.
type DType uint8

// The element types. Floating point has 1 to 15, integers have 16 and up; the
// gaps are for f16 (3), f64 (4), the two kinds of f8, i8 (19), i16 (20) and bool.
const (
	F32  DType = 1
	BF16 DType = 2
	I32  DType = 16
	I64  DType = 17
	U8   DType = 18
)

// ReduceOp is how the elements of several ranks become one. The zero value is
// none.
type ReduceOp uint8

// The reductions. Avg is Sum divided by the number of contributors.
const (
	Sum ReduceOp = 1
	Avg ReduceOp = 2
	Max ReduceOp = 3
)

var types = []struct {
	d    DType
	size int
	name string
}{
	{F32, 4, "f32"},
	{BF16, 2, "bf16"},
	{I32, 4, "i32"},
	{I64, 8, "i64"},
	{U8, 1, "u8"},
}

var ops = []struct {
	o    ReduceOp
	name string
}{{Sum, "sum"}, {Avg, "avg"}, {Max, "max"}}

// All lists the element types.
func All() []DType {
	all := make([]DType, len(types))
	for i, t := range types {
		all[i] = t.d
	}
	return all
}

// Ops lists the reductions.
func Ops() []ReduceOp {
	all := make([]ReduceOp, len(ops))
	for i, o := range ops {
		all[i] = o.o
	}
	return all
}

// Size is the number of bytes of one element, 0 for an unknown type.
func (d DType) Size() int {
	switch d {
	case F32, I32:
		return 4
	case BF16:
		return 2
	case I64:
		return 8
	case U8:
		return 1
	}
	return 0
}

// Valid says whether this build knows the type.
func (d DType) Valid() bool { return d.Size() != 0 }

// Float says whether it is a floating-point type.
func (d DType) Float() bool { return d == F32 || d == BF16 }

// String is the short name, such as "bf16".
func (d DType) String() string {
	for _, t := range types {
		if t.d == d {
			return t.name
		}
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

// Valid says whether this build knows the reduction.
func (o ReduceOp) Valid() bool { return o >= Sum && o <= Max }

// String is the name, such as "sum".
func (o ReduceOp) String() string {
	for _, v := range ops {
		if v.o == o {
			return v.name
		}
	}
	return fmt.Sprintf("reduceop(%d)", uint8(o))
}

package pg

import (
	"fmt"
	"unsafe"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
)

// Buffer is memory with the type of its elements. F32, BF16, I32, I64 and U8 make one of a slice, without a copy.
type Buffer struct {
	DType dtype.DType
	Data  []byte
}

func bytesOf[T any](x []T) []byte {
	if len(x) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), len(x)*int(unsafe.Sizeof(x[0])))
}

// F32 is a Buffer of x.
func F32(x []float32) Buffer { return Buffer{dtype.F32, bytesOf(x)} }

// BF16 is a Buffer of x, the upper halves of float32s.
func BF16(x []uint16) Buffer { return Buffer{dtype.BF16, bytesOf(x)} }

// I32 is a Buffer of x.
func I32(x []int32) Buffer { return Buffer{dtype.I32, bytesOf(x)} }

// I64 is a Buffer of x.
func I64(x []int64) Buffer { return Buffer{dtype.I64, bytesOf(x)} }

// U8 is a Buffer of x.
func U8(x []byte) Buffer { return Buffer{dtype.U8, x} }

func sameType(k collectives.Kind, out, in Buffer) error {
	if out.DType != in.DType {
		return &collectives.ErrBadCall{Kind: k, Why: fmt.Sprintf("input is %v, output %v", in.DType, out.DType)}
	}
	return nil
}

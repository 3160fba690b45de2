package vec

import "unsafe"

// number is every type that a tree is summed in.
type number interface {
	~float32 | ~int32 | ~int64 | ~uint8
}

func sizeOf[T any]() int {
	var v T
	return int(unsafe.Sizeof(v))
}

// aligned says whether b can be seen as a slice of elements of this size.
func aligned(b []byte, size int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))&uintptr(size-1) == 0
}

// view sees b, which is aligned, as elements.
func view[T any](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/sizeOf[T]())
}

// bytesOf sees elements as bytes.
func bytesOf[T any](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*sizeOf[T]())
}

// words sees 8-byte scratch memory as elements.
func words[T any](v []uint64) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*8/sizeOf[T]())
}

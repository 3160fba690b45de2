package ep

import "unsafe"

// The views below are of the machine's byte order; ranks of different byte orders are refused by the frame header.

// bytesOf is the memory of s.
func bytesOf[T float32 | uint16 | uint64](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// floats views b as float32, or says that it is not aligned for that. len(b) is a multiple of 4.
func floats(b []byte) ([]float32, bool) {
	if len(b) == 0 {
		return nil, true
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	if uintptr(p)%4 != 0 {
		return nil, false
	}
	return unsafe.Slice((*float32)(p), len(b)/4), true
}

// halves views b as uint16, or says that it is not aligned for that. len(b) is a multiple of 2.
func halves(b []byte) ([]uint16, bool) {
	if len(b) == 0 {
		return nil, true
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	if uintptr(p)%2 != 0 {
		return nil, false
	}
	return unsafe.Slice((*uint16)(p), len(b)/2), true
}

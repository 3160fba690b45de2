package dtype

import "math"

// NaNBF16 is the only NaN that ToBF16 gives: which one a sum of several comes to depends on the machine.
const NaNBF16 = 0x7fc0

// FromBF16 is exact.
func FromBF16(v uint16) float32 { return math.Float32frombits(uint32(v) << 16) }

// ToBF16 rounds to nearest, ties to even; beyond the largest is infinity, and NaN is NaNBF16.
func ToBF16(f float32) uint16 {
	if f != f {
		return NaNBF16
	}
	return uint16(RoundBF16(math.Float32bits(f)) >> 16)
}

// RoundBF16 rounds the bits of an f32 that is not NaN; the result is in the upper half.
func RoundBF16(u uint32) uint32 { return u + 0x7fff + u>>16&1 }

package vec

import "math"

// The kernels take slices of one length. dst may be exactly one of the others.
// They are written for the compiler: constant indexes into slices whose length
// was just compared need no bounds check.

// add2 is d[i] = a[i] + b[i].
func add2[T number](d, a, b []T) {
	for len(d) >= 8 && len(a) >= 8 && len(b) >= 8 {
		d[0] = a[0] + b[0]
		d[1] = a[1] + b[1]
		d[2] = a[2] + b[2]
		d[3] = a[3] + b[3]
		d[4] = a[4] + b[4]
		d[5] = a[5] + b[5]
		d[6] = a[6] + b[6]
		d[7] = a[7] + b[7]
		d, a, b = d[8:], a[8:], b[8:]
	}
	a, b = a[:len(d)], b[:len(d)]
	for i := range d {
		d[i] = a[i] + b[i]
	}
}

// add4 is d[i] = (a[i] + b[i]) + (c[i] + e[i]).
func add4[T number](d, a, b, c, e []T) {
	for len(d) >= 4 && len(a) >= 4 && len(b) >= 4 && len(c) >= 4 && len(e) >= 4 {
		d[0] = (a[0] + b[0]) + (c[0] + e[0])
		d[1] = (a[1] + b[1]) + (c[1] + e[1])
		d[2] = (a[2] + b[2]) + (c[2] + e[2])
		d[3] = (a[3] + b[3]) + (c[3] + e[3])
		d, a, b, c, e = d[4:], a[4:], b[4:], c[4:], e[4:]
	}
	a, b, c, e = a[:len(d)], b[:len(d)], c[:len(d)], e[:len(d)]
	for i := range d {
		d[i] = (a[i] + b[i]) + (c[i] + e[i])
	}
}

// later is the greater of a and b, a if they are equal, and the first that is
// NaN.
func later[T number](a, b T) T {
	if a >= b || a != a {
		return a
	}
	return b
}

// max2 is d[i] = later(a[i], b[i]).
func max2[T number](d, a, b []T) {
	for len(d) >= 4 && len(a) >= 4 && len(b) >= 4 {
		d[0] = later(a[0], b[0])
		d[1] = later(a[1], b[1])
		d[2] = later(a[2], b[2])
		d[3] = later(a[3], b[3])
		d, a, b = d[4:], a[4:], b[4:]
	}
	a, b = a[:len(d)], b[:len(d)]
	for i := range d {
		d[i] = later(a[i], b[i])
	}
}

// add2BF16 is d[i] = f32(a[i]) + f32(b[i]).
func add2BF16[T number](d []T, a, b []uint16) {
	for len(d) >= 4 && len(a) >= 4 && len(b) >= 4 {
		d[0] = T(fromBF16(a[0]) + fromBF16(b[0]))
		d[1] = T(fromBF16(a[1]) + fromBF16(b[1]))
		d[2] = T(fromBF16(a[2]) + fromBF16(b[2]))
		d[3] = T(fromBF16(a[3]) + fromBF16(b[3]))
		d, a, b = d[4:], a[4:], b[4:]
	}
	a, b = a[:len(d)], b[:len(d)]
	for i := range d {
		d[i] = T(fromBF16(a[i]) + fromBF16(b[i]))
	}
}

// add4BF16 is d[i] = (f32(a[i]) + f32(b[i])) + (f32(c[i]) + f32(e[i])).
func add4BF16[T number](d []T, a, b, c, e []uint16) {
	for len(d) >= 4 && len(a) >= 4 && len(b) >= 4 && len(c) >= 4 && len(e) >= 4 {
		d[0] = T((fromBF16(a[0]) + fromBF16(b[0])) + (fromBF16(c[0]) + fromBF16(e[0])))
		d[1] = T((fromBF16(a[1]) + fromBF16(b[1])) + (fromBF16(c[1]) + fromBF16(e[1])))
		d[2] = T((fromBF16(a[2]) + fromBF16(b[2])) + (fromBF16(c[2]) + fromBF16(e[2])))
		d[3] = T((fromBF16(a[3]) + fromBF16(b[3])) + (fromBF16(c[3]) + fromBF16(e[3])))
		d, a, b, c, e = d[4:], a[4:], b[4:], c[4:], e[4:]
	}
	a, b, c, e = a[:len(d)], b[:len(d)], c[:len(d)], e[:len(d)]
	for i := range d {
		d[i] = T((fromBF16(a[i]) + fromBF16(b[i])) + (fromBF16(c[i]) + fromBF16(e[i])))
	}
}

// maxBF16 is max2 of bf16.
func maxBF16(d, a, b []uint16) {
	a, b = a[:len(d)], b[:len(d)]
	for i := range d {
		if x := fromBF16(a[i]); x >= fromBF16(b[i]) || x != x {
			d[i] = a[i]
		} else {
			d[i] = b[i]
		}
	}
}

// widen is d[i] = a[i], exactly.
func widen[D, S number](d []D, a []S) {
	a = a[:len(d)]
	for i := range d {
		d[i] = D(a[i])
	}
}

func widenBF16[T number](d []T, a []uint16) {
	a = a[:len(d)]
	for i := range d {
		d[i] = T(fromBF16(a[i]))
	}
}

// narrow is d[i] = a[i] / n, truncated toward zero.
func narrow[D number](d []D, a []int64, n int64) {
	a = a[:len(d)]
	for i := range d {
		d[i] = D(a[i] / n)
	}
}

const (
	nanF32  = 0x7fc00000
	nanBF16 = 0x7fc0
)

func fromBF16(v uint16) float32 { return math.Float32frombits(uint32(v) << 16) }

// toBF16 rounds to nearest even. NaN becomes the canonical one.
func toBF16(f float32) uint16 {
	u := math.Float32bits(f)
	if f != f {
		return nanBF16
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// canonF32 is d[i] = a[i], a NaN made canonical.
func canonF32(d, a []float32) {
	nan := math.Float32frombits(nanF32)
	for len(d) >= 4 && len(a) >= 4 {
		v, w, x, y := a[0], a[1], a[2], a[3]
		if v != v || w != w || x != x || y != y {
			for i, v := range a[:4] {
				if v != v {
					v = nan
				}
				d[i] = v
			}
		} else {
			d[0], d[1], d[2], d[3] = v, w, x, y
		}
		d, a = d[4:], a[4:]
	}
	a = a[:len(d)]
	for i, v := range a {
		if v != v {
			v = nan
		}
		d[i] = v
	}
}

// divF32 is d[i] = a[i] / n, a NaN made canonical.
func divF32(d, a []float32, n float32) {
	nan := math.Float32frombits(nanF32)
	a = a[:len(d)]
	for i, v := range a {
		v /= n
		if v != v {
			v = nan
		}
		d[i] = v
	}
}

// roundBF16 is d[i] = a[i], rounded.
func roundBF16(d []uint16, a []float32) {
	for len(d) >= 4 && len(a) >= 4 {
		d[0] = toBF16(a[0])
		d[1] = toBF16(a[1])
		d[2] = toBF16(a[2])
		d[3] = toBF16(a[3])
		d, a = d[4:], a[4:]
	}
	a = a[:len(d)]
	for i := range d {
		d[i] = toBF16(a[i])
	}
}

// divBF16 is d[i] = a[i] / n, rounded.
func divBF16(d []uint16, a []float32, n float32) {
	a = a[:len(d)]
	for i := range d {
		d[i] = toBF16(a[i] / n)
	}
}

// cutBF16 is d[i] = a[i] for values that are bf16 already, NaN included.
func cutBF16(d []uint16, a []float32) {
	a = a[:len(d)]
	for i := range d {
		d[i] = uint16(math.Float32bits(a[i]) >> 16)
	}
}

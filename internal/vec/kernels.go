package vec

import "math"

// The kernels take slices of one length. d may be exactly one of the others.
// They are written for the compiler: constant indexes into pointers to arrays
// need no bounds check.

// add2 is d[i] = a[i] + b[i].
func add2[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i+8 <= len(d); i += 8 {
		o, a8, b8 := (*[8]T)(d[i:]), (*[8]T)(a[i:]), (*[8]T)(b[i:])
		o[0] = a8[0] + b8[0]
		o[1] = a8[1] + b8[1]
		o[2] = a8[2] + b8[2]
		o[3] = a8[3] + b8[3]
		o[4] = a8[4] + b8[4]
		o[5] = a8[5] + b8[5]
		o[6] = a8[6] + b8[6]
		o[7] = a8[7] + b8[7]
	}
	for ; i < len(d); i++ {
		d[i] = a[i] + b[i]
	}
}

// add4 is d[i] = (a[i] + b[i]) + (c[i] + e[i]).
func add4[T number](d, a, b, c, e []T) {
	a, b, c, e = a[:len(d)], b[:len(d)], c[:len(d)], e[:len(d)]
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o, a4, b4, c4, e4 := (*[4]T)(d[i:]), (*[4]T)(a[i:]), (*[4]T)(b[i:]), (*[4]T)(c[i:]), (*[4]T)(e[i:])
		o[0] = (a4[0] + b4[0]) + (c4[0] + e4[0])
		o[1] = (a4[1] + b4[1]) + (c4[1] + e4[1])
		o[2] = (a4[2] + b4[2]) + (c4[2] + e4[2])
		o[3] = (a4[3] + b4[3]) + (c4[3] + e4[3])
	}
	for ; i < len(d); i++ {
		d[i] = (a[i] + b[i]) + (c[i] + e[i])
	}
}

// later is the greater of a and b, or the first that is NaN. The branches are
// never taken in ordinary data; that of a comparison would be every other time.
func later[T number](a, b T) T {
	if a != a {
		return a
	}
	if b != b {
		return b
	}
	return max(a, b)
}

// max2 is d[i] = later(a[i], b[i]).
func max2[T number](d, a, b []T) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o, a4, b4 := (*[4]T)(d[i:]), (*[4]T)(a[i:]), (*[4]T)(b[i:])
		o[0] = later(a4[0], b4[0])
		o[1] = later(a4[1], b4[1])
		o[2] = later(a4[2], b4[2])
		o[3] = later(a4[3], b4[3])
	}
	for ; i < len(d); i++ {
		d[i] = later(a[i], b[i])
	}
}

// widen is d[i] = a[i], exactly.
func widen[D, S number](d []D, a []S) {
	a = a[:len(d)]
	for i := range d {
		d[i] = D(a[i])
	}
}

// narrow is d[i] = a[i] / n, truncated toward zero.
func narrow[D number](d []D, a []int64, n int64) {
	a = a[:len(d)]
	for i := range d {
		d[i] = D(a[i] / n)
	}
}

// canonF32 is d[i] = a[i], a NaN made canonical.
func canonF32(d, a []float32) {
	a = a[:len(d)]
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o, a4 := (*[4]float32)(d[i:]), (*[4]float32)(a[i:])
		v, w, x, y := a4[0], a4[1], a4[2], a4[3]
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		o[0], o[1], o[2], o[3] = v, w, x, y
	}
	for ; i < len(d); i++ {
		d[i] = canon(a[i])
	}
}

// sum2F32 is d[i] = a[i] + b[i], a NaN made canonical.
func sum2F32(d, a, b []float32) {
	a, b = a[:len(d)], b[:len(d)]
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o, a4, b4 := (*[4]float32)(d[i:]), (*[4]float32)(a[i:]), (*[4]float32)(b[i:])
		v, w, x, y := a4[0]+b4[0], a4[1]+b4[1], a4[2]+b4[2], a4[3]+b4[3]
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		o[0], o[1], o[2], o[3] = v, w, x, y
	}
	for ; i < len(d); i++ {
		d[i] = canon(a[i] + b[i])
	}
}

// divF32 is d[i] = a[i] / n, a NaN made canonical.
func divF32(d, a []float32, n float32) {
	a = a[:len(d)]
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o, a4 := (*[4]float32)(d[i:]), (*[4]float32)(a[i:])
		v, w, x, y := a4[0]/n, a4[1]/n, a4[2]/n, a4[3]/n
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		o[0], o[1], o[2], o[3] = v, w, x, y
	}
	for ; i < len(d); i++ {
		d[i] = canon(a[i] / n)
	}
}

const nanF32 = 0x7fc00000

func canon(v float32) float32 {
	if v != v {
		return math.Float32frombits(nanF32)
	}
	return v
}

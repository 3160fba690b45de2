package vec

import (
	"encoding/binary"
	"math"

	"github.com/serry-project/serry/internal/dtype"
)

// The bf16 kernels load and store four elements as one word, which needs no
// alignment. A slice of bytes has two for each element of the others.

var le = binary.LittleEndian

// quad is the four elements of a word.
func quad(x uint64) (a, b, c, d float32) {
	lo, hi := uint32(x), uint32(x>>32)
	return math.Float32frombits(lo << 16), math.Float32frombits(lo & 0xffff0000),
		math.Float32frombits(hi << 16), math.Float32frombits(hi & 0xffff0000)
}

func at(b []byte, i int) float32 { return dtype.FromBF16(le.Uint16(b[2*i:])) }

// widenBF16 is d[i] = a[i], exactly.
func widenBF16[T number](d []T, a []byte) {
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o := (*[4]T)(d[i:])
		v, w, x, y := quad(le.Uint64(a[2*i:]))
		o[0], o[1], o[2], o[3] = T(v), T(w), T(x), T(y)
	}
	for ; i < len(d); i++ {
		d[i] = T(at(a, i))
	}
}

// add2BF16 is d[i] = f32(a[i]) + f32(b[i]).
func add2BF16[T number](d []T, a, b []byte) {
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o := (*[4]T)(d[i:])
		a0, a1, a2, a3 := quad(le.Uint64(a[2*i:]))
		b0, b1, b2, b3 := quad(le.Uint64(b[2*i:]))
		o[0], o[1], o[2], o[3] = T(a0+b0), T(a1+b1), T(a2+b2), T(a3+b3)
	}
	for ; i < len(d); i++ {
		d[i] = T(at(a, i) + at(b, i))
	}
}

// add4BF16 is d[i] = (f32(a[i]) + f32(b[i])) + (f32(c[i]) + f32(e[i])).
func add4BF16[T number](d []T, a, b, c, e []byte) {
	i := 0
	for ; i+4 <= len(d); i += 4 {
		o := (*[4]T)(d[i:])
		a0, a1, a2, a3 := quad(le.Uint64(a[2*i:]))
		b0, b1, b2, b3 := quad(le.Uint64(b[2*i:]))
		c0, c1, c2, c3 := quad(le.Uint64(c[2*i:]))
		e0, e1, e2, e3 := quad(le.Uint64(e[2*i:]))
		o[0], o[1] = T((a0+b0)+(c0+e0)), T((a1+b1)+(c1+e1))
		o[2], o[3] = T((a2+b2)+(c2+e2)), T((a3+b3)+(c3+e3))
	}
	for ; i < len(d); i++ {
		d[i] = T((at(a, i) + at(b, i)) + (at(c, i) + at(e, i)))
	}
}

// sum2BF16 is d[i] = a[i] + b[i], rounded.
func sum2BF16(d, a, b []byte) {
	n, i := len(d)/2, 0
	for ; i+4 <= n; i += 4 {
		a0, a1, a2, a3 := quad(le.Uint64(a[2*i:]))
		b0, b1, b2, b3 := quad(le.Uint64(b[2*i:]))
		v, w, x, y := a0+b0, a1+b1, a2+b2, a3+b3
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		lo := dtype.RoundBF16(math.Float32bits(v))>>16 | dtype.RoundBF16(math.Float32bits(w))&0xffff0000
		hi := dtype.RoundBF16(math.Float32bits(x))>>16 | dtype.RoundBF16(math.Float32bits(y))&0xffff0000
		le.PutUint64(d[2*i:], uint64(lo)|uint64(hi)<<32)
	}
	for ; i < n; i++ {
		le.PutUint16(d[2*i:], dtype.ToBF16(at(a, i)+at(b, i)))
	}
}

// max2BF16 is d[i] = later(a[i], b[i]).
func max2BF16(d, a, b []byte) {
	a, b = a[:len(d)], b[:len(d)]
	for i := 0; i+2 <= len(d); i += 2 {
		v := later(dtype.FromBF16(le.Uint16(a[i:])), dtype.FromBF16(le.Uint16(b[i:])))
		le.PutUint16(d[i:], uint16(math.Float32bits(v)>>16))
	}
}

// roundBF16 is d[i] = a[i], rounded. d may begin where a does.
func roundBF16(d []byte, a []float32) {
	i := 0
	for ; i+4 <= len(a); i += 4 {
		s := (*[4]float32)(a[i:])
		v, w, x, y := s[0], s[1], s[2], s[3]
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		lo := dtype.RoundBF16(math.Float32bits(v))>>16 | dtype.RoundBF16(math.Float32bits(w))&0xffff0000
		hi := dtype.RoundBF16(math.Float32bits(x))>>16 | dtype.RoundBF16(math.Float32bits(y))&0xffff0000
		le.PutUint64(d[2*i:], uint64(lo)|uint64(hi)<<32)
	}
	for ; i < len(a); i++ {
		le.PutUint16(d[2*i:], dtype.ToBF16(a[i]))
	}
}

// divBF16 is d[i] = a[i] / n, rounded. d may begin where a does.
func divBF16(d []byte, a []float32, n float32) {
	i := 0
	for ; i+4 <= len(a); i += 4 {
		s := (*[4]float32)(a[i:])
		v, w, x, y := s[0]/n, s[1]/n, s[2]/n, s[3]/n
		if v != v || w != w || x != x || y != y {
			v, w, x, y = canon(v), canon(w), canon(x), canon(y)
		}
		lo := dtype.RoundBF16(math.Float32bits(v))>>16 | dtype.RoundBF16(math.Float32bits(w))&0xffff0000
		hi := dtype.RoundBF16(math.Float32bits(x))>>16 | dtype.RoundBF16(math.Float32bits(y))&0xffff0000
		le.PutUint64(d[2*i:], uint64(lo)|uint64(hi)<<32)
	}
	for ; i < len(a); i++ {
		le.PutUint16(d[2*i:], dtype.ToBF16(a[i]/n))
	}
}

// cutBF16 is d[i] = a[i] for values that are bf16 already, NaN included. d may
// begin where a does.
func cutBF16(d []byte, a []float32) {
	for i, v := range a {
		le.PutUint16(d[2*i:], uint16(math.Float32bits(v)>>16))
	}
}

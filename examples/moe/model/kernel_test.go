package model

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestMulIsTheNaiveSum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.IntRange(1, 20).Draw(t, "in")
		out := lanes * rapid.IntRange(1, 3).Draw(t, "out")
		n := rapid.IntRange(0, 4).Draw(t, "n")
		value := rapid.Float32Range(-4, 4)
		w := rapid.SliceOfN(value, out*in, out*in).Draw(t, "w")
		x := rapid.SliceOfN(value, n*in, n*in).Draw(t, "x")
		m := pack(w, out, in)
		got := make([]float32, n*out)
		m.mul(got, x)
		want := make([]float32, n*out)
		for r := range n {
			for o := range out {
				for i := range in {
					p := x[r*in+i] * w[o*in+i]
					want[r*out+o] += float32(p)
				}
			}
		}
		sameBits(t, want, got, "mul")
	})
}

func TestSparseDotEqualsDense(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 40).Draw(t, "n")
		h := rapid.SliceOfN(rapid.Float32Range(-1, 1), n, n).Draw(t, "h")
		w := make([]quad, n)
		for i := range w {
			w[i] = quad(rapid.SliceOfN(rapid.Float32Range(-1, 1), lanes, lanes).Draw(t, "w"))
		}
		var want, got quad
		dense := make([]float32, n)
		for i, v := range h {
			v = max(v, 0)
			dense[i] = float32(v * v)
		}
		dot(&want, dense, w)
		dotSparse(&got, reluSquare(nil, h), w)
		sameBits(t, want[:], got[:], "sparse")
	})
}

func TestExp32(t *testing.T) {
	wrong := 0
	for i := range 200_000 {
		x := float32(i) * -0.0006
		want := float32(math.Exp(float64(x)))
		if got := exp32(x); got != want {
			wrong++
			require.InEpsilon(t, want, got, 1.3e-7, "exp(%v)", x)
		}
	}
	require.Less(t, wrong, 5, "nearly all should be rounded correctly")
	require.Equal(t, float32(1), exp32(0))
	require.Equal(t, float32(math.E), exp32(1))
	require.Equal(t, float32(math.Exp(88)), exp32(88))
	require.Equal(t, float32(0), exp32(float32(math.Inf(-1))))
	require.True(t, math.IsInf(float64(exp32(100)), 1))
	require.True(t, math.IsNaN(float64(exp32(float32(math.NaN())))))
}

func TestHalf(t *testing.T) {
	for h := range 1 << 16 {
		sign, exp, frac := 1-2*float64(h>>15), h>>10&31, float64(h&1023)
		want := sign * math.Ldexp(1+frac/1024, exp-15)
		switch {
		case exp == 0:
			want = sign * math.Ldexp(frac, -24)
		case exp == 31 && frac == 0:
			want = math.Inf(int(sign))
		case exp == 31:
			require.True(t, math.IsNaN(float64(half(uint16(h)))))
			continue
		}
		got := float64(half(uint16(h)))
		if got != want || math.Signbit(got) != (h>>15 == 1) {
			require.FailNowf(t, "half", "%#x: want %v, got %v", h, want, got)
		}
	}
}

func TestRMSAndRope(t *testing.T) {
	x := []float32{3, -4, 0, 0}
	y := make([]float32, 4)
	rms(y, x, []float32{1, 2, 1, 1}, 0)
	require.InDeltaSlice(t, []float32{1.2, -3.2, 0, 0}, y, 1e-6)

	rope(x, []float32{0, 1}, []float32{1, 0}) // a quarter turn of the first pair
	require.Equal(t, []float32{0, -4, 3, 0}, x)
}

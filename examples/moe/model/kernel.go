package model

import "math"

// Every kernel here is row-invariant: the bits of a row of output depend on
// that row of input and the weights alone. Each output is one accumulator that
// starts at +0 and takes its products in the order of the inputs. Products are
// written float32(a*b), which forbids the compiler to fuse them into the
// addition, so the bits are those of separate IEEE 754 operations wherever the
// package is compiled.

// lanes is how many outputs the innermost loop holds in registers: with more,
// the compiler spills.
const lanes = 4

// quad holds the weights from one input to four neighbouring outputs.
type quad = [lanes]float32

// matrix is a weight matrix of in x out, packed in panels of four outputs:
// w[o/4*in+i][o%4] belongs to input i and output o.
type matrix struct {
	in, out int
	w       []quad
}

// pack packs the stored rows [out][in]; out is a multiple of lanes.
func pack(stored []float32, out, in int) matrix {
	m := matrix{in: in, out: out, w: make([]quad, out*in/lanes)}
	for o := range out {
		for i := range in {
			m.w[o/lanes*in+i][o%lanes] = stored[o*in+i]
		}
	}
	return m
}

// panel returns the weights [in] of the outputs o to o+3.
func (m *matrix) panel(o int) []quad { return m.w[o/lanes*m.in : (o/lanes+1)*m.in] }

// mul sets y [n][out] to x [n][in] times m. A panel of weights is fetched once
// for all rows.
func (m *matrix) mul(y, x []float32) {
	n := len(x) / m.in
	for o := 0; o < m.out; o += lanes {
		panel := m.panel(o)
		for r := range n {
			dot((*quad)(y[r*m.out+o:]), x[r*m.in:(r+1)*m.in], panel)
		}
	}
}

// dot sets y[o] to the sum over i, in order, of x[i]*w[i][o].
func dot(y *quad, x []float32, w []quad) {
	var a0, a1, a2, a3 float32
	w = w[:len(x)]
	for i, v := range x {
		p := &w[i]
		a0 += float32(v * p[0])
		a1 += float32(v * p[1])
		a2 += float32(v * p[2])
		a3 += float32(v * p[3])
	}
	y[0], y[1], y[2], y[3] = a0, a1, a2, a3
}

// sparse is one input that is not zero and its index.
type sparse struct {
	v  float32
	at int32
}

// dotSparse is dot over the inputs that are not zero. Its bits are those of dot:
// an accumulator that starts at +0 is never -0, and adding a zero product (the
// weights are finite) to anything but -0 changes nothing.
func dotSparse(y *quad, x []sparse, w []quad) {
	var a0, a1, a2, a3 float32
	for _, s := range x {
		v := s.v
		p := &w[s.at]
		a0 += float32(v * p[0])
		a1 += float32(v * p[1])
		a2 += float32(v * p[2])
		a3 += float32(v * p[3])
	}
	y[0], y[1], y[2], y[3] = a0, a1, a2, a3
}

// reluSquare appends to out the squares of the positive values of h, with the
// indices.
func reluSquare(out []sparse, h []float32) []sparse {
	for i, v := range h {
		if v > 0 {
			if s := float32(v * v); s != 0 {
				out = append(out, sparse{v: s, at: int32(i)})
			}
		}
	}
	return out
}

// rms sets y to x scaled to a root mean square of one, times the gain. x and y
// may be the same slice.
func rms(y, x, gain []float32, eps float64) {
	var ss float64
	for _, v := range x {
		ss += float64(v) * float64(v) // exact in float64, so fusing changes nothing
	}
	scale := float32(1 / math.Sqrt(ss/float64(len(x))+eps))
	for i, v := range x {
		y[i] = float32(v*scale) * gain[i]
	}
}

// exp32 returns e**x, computed in float64 with separate operations (math.Exp
// picks instructions by processor) and rounded once. The relative error before
// rounding is below 1e-12.
func exp32(x float32) float32 {
	switch {
	case x != x:
		return x
	case x < -104:
		return 0
	case x > 89:
		return float32(math.Inf(1))
	}
	const (
		log2e = 1.44269504088896338700e+00
		ln2hi = 6.93147180369123816490e-01
		ln2lo = 1.90821492927058770002e-10
	)
	f := float64(x)
	k := int64(float64(f*log2e)+1024.5) - 1024 // rounds to nearest: the sum is positive
	r := f - float64(float64(k)*ln2hi)
	r -= float64(float64(k) * ln2lo)
	p := 1.0 / 3628800
	p = float64(p*r) + 1.0/362880
	p = float64(p*r) + 1.0/40320
	p = float64(p*r) + 1.0/5040
	p = float64(p*r) + 1.0/720
	p = float64(p*r) + 1.0/120
	p = float64(p*r) + 1.0/24
	p = float64(p*r) + 1.0/6
	p = float64(p*r) + 1.0/2
	p = float64(p*r) + 1
	p = float64(p*r) + 1
	return float32(p * math.Float64frombits(uint64(1023+k)<<52))
}

// rope rotates the pairs (x[i], x[i+d/2]) of one head of d values.
func rope(x, cos, sin []float32) {
	h := len(x) / 2
	a, b := x[:h], x[h:]
	for i := range a {
		u, v := a[i], b[i]
		a[i] = float32(u*cos[i]) - float32(v*sin[i])
		b[i] = float32(v*cos[i]) + float32(u*sin[i])
	}
}

// softmax turns s into exp(s-max(s)) in place and returns the sum of the
// results, taken in order.
func softmax(s []float32) float32 {
	top := s[0]
	for _, v := range s {
		top = max(top, v)
	}
	var sum float32
	for i, v := range s {
		e := exp32(v - top)
		s[i] = e
		sum += e
	}
	return sum
}

package vec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/serry-project/serry/internal/dtype"
)

// The dumb twin: one element at a time, by recursion over the tree, from the
// words of the package comment.

func dumbReduce(srcs [][]byte, n int, dt dtype.DType, op dtype.ReduceOp, contributors int) []byte {
	size := 1
	for size < len(srcs) {
		size *= 2
	}
	out := make([]byte, 0, n*dt.Size())
	for i := range n {
		if dt.Float() {
			v, _ := dumbTree(0, size, srcs, func(b []byte) float32 { return dumbFloat(b, i, dt) }, func(a, b float32) float32 {
				if op != dtype.Max {
					return a + b
				}
				switch {
				case a != a:
					return a
				case b != b || b > a:
					return b
				case a == b:
					return math.Float32frombits(math.Float32bits(a) & math.Float32bits(b)) // +0 of two zeros
				}
				return a
			})
			if op == dtype.Avg {
				v /= float32(contributors)
			}
			out = dumbAppendFloat(out, v, dt, op == dtype.Max)
			continue
		}
		v, _ := dumbTree(0, size, srcs, func(b []byte) int64 { return dumbInt(b, i, dt) }, func(a, b int64) int64 {
			if op == dtype.Max {
				return max(a, b)
			}
			return a + b
		})
		if op == dtype.Avg {
			v /= int64(contributors)
		}
		switch dt {
		case dtype.I32:
			out = binary.LittleEndian.AppendUint32(out, uint32(v))
		case dtype.I64:
			out = binary.LittleEndian.AppendUint64(out, uint64(v))
		case dtype.U8:
			out = append(out, byte(v))
		}
	}
	return out
}

func dumbTree[T any](lo, size int, srcs [][]byte, leaf func([]byte) T, add func(a, b T) T) (v T, ok bool) {
	if size == 1 {
		if lo >= len(srcs) || srcs[lo] == nil {
			return v, false
		}
		return leaf(srcs[lo]), true
	}
	a, okA := dumbTree(lo, size/2, srcs, leaf, add)
	b, okB := dumbTree(lo+size/2, size/2, srcs, leaf, add)
	switch {
	case okA && okB:
		return add(a, b), true
	case okA:
		return a, true
	}
	return b, okB
}

func dumbFloat(b []byte, i int, dt dtype.DType) float32 {
	if dt == dtype.F32 {
		return math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
}

func dumbInt(b []byte, i int, dt dtype.DType) int64 {
	switch dt {
	case dtype.I32:
		return int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
	case dtype.I64:
		return int64(binary.LittleEndian.Uint64(b[8*i:]))
	}
	return int64(b[i])
}

func dumbAppendFloat(out []byte, v float32, dt dtype.DType, keepNaN bool) []byte {
	u := math.Float32bits(v)
	if v != v && !keepNaN {
		u = 0x7fc00000
	}
	if dt == dtype.F32 {
		return binary.LittleEndian.AppendUint32(out, u)
	}
	return binary.LittleEndian.AppendUint16(out, dumbRound(u))
}

// dumbRound looks for the nearest bf16 among the two neighbours.
func dumbRound(u uint32) uint16 {
	v := math.Float32frombits(u)
	down, up := uint16(u>>16), uint16(u>>16)+1
	if v != v || math.IsInf(float64(v), 0) || u&0xffff == 0 {
		return down
	}
	bf := func(h uint16) float64 {
		f := float64(math.Float32frombits(uint32(h) << 16))
		if math.IsInf(f, 0) { // rounding acts as if the exponent had no end
			return math.Copysign(math.Ldexp(1, 128), f)
		}
		return f
	}
	toDown, toUp := math.Abs(float64(v)-bf(down)), math.Abs(bf(up)-float64(v))
	if toDown < toUp || toDown == toUp && down&1 == 0 {
		return down
	}
	return up
}

// fill makes elements, floats among them that are hard: NaN with payloads, both
// infinities and zeros, subnormals, near overflow.
func fill(rng *rand.Rand, b []byte, dt dtype.DType, hard bool) {
	odd := []uint32{0x7fc00000, 0x7f800001, 0xffc12345, 0x7f800000, 0xff800000, 0, 0x80000000, 1, 0x80000001, 0x007fffff,
		0x7f7fffff, 0xff7fffff, 0x3f800000, 0x3f808000, 0x3f818000, 0x7fffffff}
	for i := range len(b) / dt.Size() {
		switch dt {
		case dtype.F32, dtype.BF16:
			u := math.Float32bits(float32(rng.NormFloat64()))
			if hard && rng.IntN(4) == 0 {
				u = odd[rng.IntN(len(odd))]
			} else if hard {
				u = rng.Uint32()
			}
			if dt == dtype.F32 {
				binary.LittleEndian.PutUint32(b[4*i:], u)
			} else {
				binary.LittleEndian.PutUint16(b[2*i:], uint16(u>>16))
			}
		default:
			for j := range dt.Size() {
				b[i*dt.Size()+j] = byte(rng.Uint32())
			}
		}
	}
}

// buffer is memory of n bytes that begins off bytes behind an aligned address.
func buffer(n, off int) []byte {
	return bytesOf(make([]uint64, n/8+3))[off : off+n : off+n]
}

func TestReduceIsTheTree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dt := rapid.SampledFrom(dtype.All()).Draw(t, "dtype")
		op := rapid.SampledFrom(dtype.Ops()).Draw(t, "op")
		ranks := rapid.OneOf(rapid.IntRange(1, 9), rapid.IntRange(1, 70)).Draw(t, "ranks")
		n := rapid.OneOf(rapid.IntRange(0, 40), rapid.IntRange(500, 3000)).Draw(t, "elements")
		dead := rapid.SampledFrom([]int{0, 0, 10, 50, 90}).Draw(t, "percent absent")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		hard := rapid.Bool().Draw(t, "hard")
		skew := rapid.Bool().Draw(t, "unaligned")
		offset := func() int {
			if skew {
				return rng.IntN(8)
			}
			return 0
		}
		if ranks > 20 {
			n = min(n, 700)
		}

		srcs := make([][]byte, ranks)
		contributors := 0
		for r := range srcs {
			if rng.IntN(100) < dead && (contributors > 0 || r < ranks-1) {
				continue
			}
			srcs[r] = buffer(n*dt.Size(), offset())
			fill(rng, srcs[r], dt, hard)
			contributors++
		}
		want := dumbReduce(srcs, n, dt, op, contributors)

		dst := buffer(n*dt.Size(), offset())
		Reduce(dst, srcs, dt, op, contributors)
		mustEqual(t, want, dst, dt, "reduce")

		// Last, because it overwrites a source.
		alive := slices.IndexFunc(srcs, func(b []byte) bool { return b != nil })
		for range rng.IntN(ranks) {
			if next := slices.IndexFunc(srcs[alive+1:], func(b []byte) bool { return b != nil }); next >= 0 {
				alive += 1 + next
			}
		}
		Reduce(srcs[alive], srcs, dt, op, contributors)
		mustEqual(t, want, srcs[alive], dt, "in place of a source")
	})
}

func mustEqual(t require.TestingT, want, got []byte, dt dtype.DType, what string) {
	for i := 0; i < len(want); i += dt.Size() {
		if string(want[i:i+dt.Size()]) != string(got[i:i+dt.Size()]) {
			require.FailNow(t, fmt.Sprintf("%s: element %d is %x, want %x", what, i/dt.Size(), got[i:i+dt.Size()], want[i:i+dt.Size()]))
		}
	}
	require.Len(t, got, len(want), what)
}

func TestThousandRanks(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, dt := range dtype.All() {
		srcs := make([][]byte, MaxRanks)
		for r := range srcs {
			if r%97 != 3 {
				srcs[r] = buffer(300*dt.Size(), 0)
				fill(rng, srcs[r], dt, false)
			}
		}
		dst := buffer(300*dt.Size(), 0)
		for _, op := range dtype.Ops() {
			Reduce(dst, srcs, dt, op, 1013)
			mustEqual(t, dumbReduce(srcs, 300, dt, op, 1013), dst, dt, fmt.Sprint(dt, op))
		}
	}
}

// TestOrderMatters makes sure that the test above could fail: summed left to
// right these differ.
func TestOrderMatters(t *testing.T) {
	f := func(vs ...float32) (srcs [][]byte) {
		for _, v := range vs {
			if v != v {
				srcs = append(srcs, nil)
				continue
			}
			srcs = append(srcs, binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)))
		}
		return srcs
	}
	absent := float32(math.NaN())
	sum := func(vs ...float32) float32 {
		dst := make([]byte, 4)
		Reduce(dst, f(vs...), dtype.F32, dtype.Sum, 1)
		return dumbFloat(dst, 0, dtype.F32)
	}
	const big = 1 << 24
	require.Equal(t, float32(big+2), sum(big, 0, 1, 1))         // ((big+0)+(1+1))
	require.Equal(t, float32(big), sum(big, 1, 0, 1))           // ((big+1)+(0+1)), each 1 lost
	require.Equal(t, float32(big+2), sum(big, absent, 1, 1))    // (big+(1+1))
	require.Equal(t, float32(big), sum(big, 1, absent, 1))      // ((big+1)+1)
	require.Equal(t, float32(big), sum(big, 1, 1))              // 3 ranks: ((big+1)+1)
	require.Equal(t, float32(big+2), sum(1, absent, 1, 0, big)) // ((1+(1+0))+big)
}

func TestBF16RoundTrip(t *testing.T) {
	for i := range 1 << 16 {
		h := uint16(i)
		f := dtype.FromBF16(h)
		want := h
		if f != f {
			want = dtype.NaNBF16
		}
		if got := dtype.ToBF16(f); got != want {
			t.Fatalf("bf16 %#04x comes back as %#04x", h, got)
		}
	}
	require.Equal(t, uint16(0x3f80), dtype.ToBF16(math.Float32frombits(0x3f808000)), "a tie goes to even")
	require.Equal(t, uint16(0x3f82), dtype.ToBF16(math.Float32frombits(0x3f818000)), "a tie goes to even")
	require.Equal(t, uint16(0x3f81), dtype.ToBF16(math.Float32frombits(0x3f808001)))
	require.Equal(t, uint16(0x7f80), dtype.ToBF16(math.MaxFloat32), "overflow")
	require.Equal(t, uint16(0x0000), dtype.ToBF16(math.Float32frombits(1)))
	require.Equal(t, uint16(0x0001), dtype.ToBF16(math.Float32frombits(0x8001)), "subnormals stay")
}

func TestBF16RoundsLikeItsTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 1 << 18 {
		u := rng.Uint32()
		if i%4 == 0 {
			u = u&0xffff0000 | 0x8000 // a tie
		}
		f := math.Float32frombits(u)
		if f == f {
			require.Equal(t, dumbRound(u), dtype.ToBF16(f), "%#08x", u)
		}
	}
}

func TestMaxKeepsTheFirstNaN(t *testing.T) {
	put := func(u uint32) []byte { return binary.LittleEndian.AppendUint32(nil, u) }
	srcs := [][]byte{put(0x3f800000), nil, put(0xffc12345), put(0x7f800001), put(0x7f800000)}
	dst := make([]byte, 4)
	Reduce(dst, srcs, dtype.F32, dtype.Max, 4)
	require.Equal(t, uint32(0xffc12345), binary.LittleEndian.Uint32(dst))
	Reduce(dst, [][]byte{put(0x80000000), put(0)}, dtype.F32, dtype.Max, 2)
	require.Equal(t, uint32(0), binary.LittleEndian.Uint32(dst), "+0 is greater")
}

func TestIntegers(t *testing.T) {
	b := func(v byte) []byte { return []byte{v} }
	dst := make([]byte, 1)
	Reduce(dst, [][]byte{b(200), b(100)}, dtype.U8, dtype.Sum, 2)
	require.Equal(t, byte(44), dst[0], "wraps")
	Reduce(dst, [][]byte{b(200), b(101)}, dtype.U8, dtype.Avg, 2)
	require.Equal(t, byte(150), dst[0], "does not")
	put := func(v int32) []byte { return binary.LittleEndian.AppendUint32(nil, uint32(v)) }
	dst = make([]byte, 4)
	Reduce(dst, [][]byte{put(-7), put(0)}, dtype.I32, dtype.Avg, 2)
	require.Equal(t, int32(-3), int32(binary.LittleEndian.Uint32(dst)), "toward zero")
	Reduce(dst, [][]byte{put(math.MaxInt32), put(math.MaxInt32)}, dtype.I32, dtype.Avg, 2)
	require.Equal(t, int32(math.MaxInt32), int32(binary.LittleEndian.Uint32(dst)))
}

func TestBugsPanic(t *testing.T) {
	b := make([]byte, 8)
	for name, f := range map[string]func(){
		"no rank":      func() { Reduce(b, [][]byte{nil, nil}, dtype.F32, dtype.Sum, 1) },
		"length":       func() { Reduce(b, [][]byte{b, b[:4]}, dtype.F32, dtype.Sum, 2) },
		"half element": func() { Reduce(b[:6], [][]byte{b[:6]}, dtype.F32, dtype.Sum, 1) },
		"contributors": func() { Reduce(b, [][]byte{b}, dtype.F32, dtype.Avg, 0) },
		"type":         func() { Reduce(b, [][]byte{b}, 0, dtype.Avg, 1) },
		"op":           func() { Reduce(b, [][]byte{b}, dtype.F32, 0, 1) },
		"ranks":        func() { Reduce(b, make([][]byte, MaxRanks+1), dtype.F32, dtype.Sum, 1) },
		"copy":         func() { Copy(b, b[:4]) },
	} {
		require.Panics(t, f, name)
	}
}

func TestCopy(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, n := range []int{0, 1, 64 << 10, 64<<10 + 1, 200000} {
		src, dst := make([]byte, n), make([]byte, n)
		fill(rng, src, dtype.U8, false)
		Copy(dst, src)
		require.Equal(t, src, dst)
	}
}

func TestNothingAllocates(t *testing.T) {
	for _, n := range []int{2, 4096} {
		for _, ranks := range []int{1, 2, 3, 4, 8, 33} {
			for _, dt := range dtype.All() {
				for _, op := range dtype.Ops() {
					for _, off := range []int{0, 1} {
						srcs := make([][]byte, ranks)
						for r := range srcs {
							srcs[r] = buffer(n*dt.Size(), off)
						}
						dst := buffer(n*dt.Size(), 0)
						require.Zero(t, testing.AllocsPerRun(3, func() { Reduce(dst, srcs, dt, op, ranks) }), "%v %v %d ranks %d elements", dt, op, ranks, n)
					}
				}
			}
		}
	}
}

func BenchmarkReduce(b *testing.B) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, dt := range []dtype.DType{dtype.F32, dtype.BF16, dtype.I32} {
		for _, op := range []dtype.ReduceOp{dtype.Sum, dtype.Avg} {
			for _, ranks := range []int{1, 2, 3, 4, 8} {
				for _, bytes := range []int{8, 64 << 10, 16 << 20} {
					if op == dtype.Avg && (ranks != 2 || bytes == 8) {
						continue
					}
					srcs := make([][]byte, ranks)
					for r := range srcs {
						srcs[r] = buffer(bytes, 0)
						fill(rng, srcs[r], dt, false)
					}
					dst := buffer(bytes, 0)
					b.Run(fmt.Sprintf("%v/%v/%dranks/%dB", dt, op, ranks, bytes), func(b *testing.B) {
						b.SetBytes(int64(bytes * ranks))
						for b.Loop() {
							Reduce(dst, srcs, dt, op, ranks)
						}
					})
				}
			}
		}
	}
}

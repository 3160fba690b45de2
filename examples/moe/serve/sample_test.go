package serve

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestExp(t *testing.T) {
	for x := 0.0; x > -699; x -= 0.0137 {
		require.InEpsilon(t, math.Exp(x), exp(x), 1e-12, "%v", x)
	}
	require.Equal(t, 1.0, exp(0))
	require.Zero(t, exp(-1e9))
	require.Zero(t, exp(math.Inf(-1)))
	require.Zero(t, exp(math.NaN()))
}

// The same bits on every machine: a fused or reordered sum would show here.
func TestPickIsFixed(t *testing.T) {
	var logits [256]float32
	for i := range logits {
		logits[i] = float32(i*i*7919%1009) / 100
	}
	s := Sampling{Temperature: 0.7, TopK: 40, Seed: 1}
	var got []byte
	for pos := range 8 {
		got = append(got, s.pick(logits[:], 3, pos))
	}
	require.Equal(t, []byte{0x59, 0x8c, 0x49, 0x89, 0x70, 0x0f, 0x6b, 0xeb}, got)
	require.Equal(t, uint64(0x3fd25618372a584f), math.Float64bits(exp(-1.25)))
	require.Equal(t, uint64(0x3fea0e68ea1fbc6c), math.Float64bits(uniform(1, 2, 3)))
}

func TestPickFollowsTheDistribution(t *testing.T) {
	var logits [256]float32
	for i := range logits {
		logits[i] = -100
	}
	logits[10], logits[20], logits[30] = 2, 1, 0
	s := Sampling{Temperature: 2, TopK: 3, Seed: 9}
	n := map[byte]float64{}
	const draws = 20000
	for pos := range draws {
		n[s.pick(logits[:], 0, pos)]++
	}
	sum := 1 + math.Exp(-.5) + math.Exp(-1)
	require.Len(t, n, 3)
	for b, want := range map[byte]float64{10: 1 / sum, 20: math.Exp(-.5) / sum, 30: math.Exp(-1) / sum} {
		require.InDelta(t, want, n[b]/draws, 0.015)
	}
	s.TopK = 1
	require.Equal(t, byte(10), s.pick(logits[:], 0, 0))
	s = Sampling{}
	require.Equal(t, byte(10), s.pick(logits[:], 0, 0), "greedy")
}

// Requests and positions draw independently: no two columns of bits are alike.
func TestUniform(t *testing.T) {
	seen := map[float64]bool{}
	sum := 0.0
	for req := range 40 {
		for pos := range 40 {
			u := uniform(5, req, pos)
			require.True(t, u >= 0 && u < 1)
			seen[u] = true
			sum += u
		}
	}
	require.Len(t, seen, 1600)
	require.InDelta(t, 0.5, sum/1600, 0.03)
	require.NotEqual(t, uniform(5, 1, 0), uniform(5, 0, 1))
}

// Whatever the logits are, the choice is among the likeliest ones.
func TestPickIsAmongTheLikeliest(t *testing.T) {
	odd := []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0, 1, -1, math.MaxFloat32}
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var logits [256]float32
		for i := range logits {
			logits[i] = r.Float32()*20 - 10
			if rapid.IntRange(0, 20).Draw(t, "odd") == 0 {
				logits[i] = odd[r.IntN(len(odd))]
			}
		}
		s := Sampling{Temperature: r.Float64() + 0.01, TopK: 1 + r.IntN(300), Seed: r.Uint64()}
		got := s.pick(logits[:], 0, r.IntN(100))
		higher := 0
		for _, l := range logits {
			if l > logits[got] {
				higher++
			}
		}
		if higher >= s.TopK {
			t.Fatalf("%d bytes are likelier, top %d", higher, s.TopK)
		}
	})
}

package serve

import (
	"cmp"
	"math"
	"slices"

	"github.com/serry-project/serry/examples/moe/model"
)

// Sampling says how the next byte is chosen from its logits. The choice is a function of the logits, the request and the
// position alone: it comes to the same on whatever rank, in whatever step, and in a process of its own.
type Sampling struct {
	Temperature float64 // 0: always the likeliest byte
	TopK        int     // choose among so many of the likeliest; 0: among all
	Seed        uint64
}

// pick chooses the byte at a position of a request's answer. All sums are float64, in the order of the logits from the
// largest to the smallest, with every product rounded by itself.
func (s *Sampling) pick(logits []float32, req, pos int) byte {
	if !(s.Temperature > 0) {
		return model.Argmax(logits)
	}
	order := make([]byte, len(logits))
	for i := range order {
		order[i] = byte(i)
	}
	slices.SortFunc(order, func(a, b byte) int { // of equals the lower byte; what is no number comes last
		if c := cmp.Compare(logits[b], logits[a]); c != 0 {
			return c
		}
		return cmp.Compare(a, b)
	})
	if s.TopK > 0 && s.TopK < len(order) {
		order = order[:s.TopK]
	}
	top, sum := float64(logits[order[0]]), 0.0
	weights := make([]float64, len(order))
	for i, b := range order {
		weights[i] = exp((float64(logits[b]) - top) / s.Temperature)
		sum += weights[i]
	}
	left := float64(uniform(s.Seed, req, pos) * sum)
	for i, w := range weights {
		if left -= w; left < 0 {
			return order[i]
		}
	}
	return order[0] // u*sum was rounded up to sum, or the logits are no numbers
}

// uniform is a number in [0, 1) by three rounds of splitmix64.
func uniform(seed uint64, req, pos int) float64 {
	h := mix(mix(mix(seed)^uint64(req)) ^ uint64(pos))
	return float64(h>>11) / (1 << 53)
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// exp is e**x for x <= 0, to about 1e-12, with the same bits on every machine. (math.Exp chooses instructions by
// processor, and a compiler may fuse a product and a sum that are not parted by a conversion.)
func exp(x float64) float64 {
	switch {
	case x != x:
		return 0
	case x < -700:
		return 0
	}
	const (
		log2e = 1.44269504088896338700e+00
		ln2hi = 6.93147180369123816490e-01
		ln2lo = 1.90821492927058770002e-10
	)
	k := math.Floor(float64(x*log2e) + 0.5)
	r := x - float64(k*ln2hi)
	r -= float64(k * ln2lo)
	p := 1.0
	for n := 13.0; n > 0; n-- {
		p = float64(p*r)/n + 1
	}
	return p * math.Float64frombits(uint64(1023+int64(k))<<52)
}

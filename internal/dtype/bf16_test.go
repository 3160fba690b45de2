package dtype

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestToBF16(t *testing.T) {
	for i := range 1 << 16 { // what bf16 can hold stays
		f := FromBF16(uint16(i))
		if got := ToBF16(f); f == f && got != uint16(i) || f != f && got != NaNBF16 {
			t.Fatalf("%04x becomes %04x", i, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.Float32Range(-3e38, 3e38).Draw(t, "f")
		g := FromBF16(ToBF16(f))
		below, above := math.Float32frombits(math.Float32bits(g)-0x10000), math.Float32frombits(math.Float32bits(g)+0x10000)
		d := math.Abs(float64(f) - float64(g))
		for _, o := range []float32{below, above} {
			if od := math.Abs(float64(f) - float64(o)); od < d || od == d && math.Float32bits(g)>>16&1 == 1 {
				t.Fatalf("%v rounds to %v, %v is nearer or even", f, g, o)
			}
		}
	})
	for in, want := range map[uint32]uint16{0x7f7fffff: 0x7f80, 0x7f800000: 0x7f80, 0x7f800001: 0x7fc0, 0xffc00001: 0x7fc0, 0xff800001: 0x7fc0, 0x3f808000: 0x3f80, 0x3f818000: 0x3f82} {
		if got := ToBF16(math.Float32frombits(in)); got != want {
			t.Errorf("%08x becomes %04x, want %04x", in, got, want)
		}
	}
}

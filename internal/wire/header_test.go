package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A wrong bit in the length is noticed before the payload is there: else the reader would wait for bytes that nobody sends.
func TestLengthIsChecked(t *testing.T) {
	for _, n := range []uint32{0, 1, 2, 127, 128, 4096, 65535, MaxPayload - 1, MaxPayload} {
		h := Header{Kind: KindControl, Length: n}
		var b [Size]byte
		h.Put(b[:], nil, false)
		var got Header
		require.NoError(t, got.Parse(b[:]))
		require.Equal(t, n, got.Length)
		require.EqualValues(t, n, LengthOf(b[:]))
		for bit := range 32 {
			c := b
			c[8+bit/8] ^= 1 << (bit % 8)
			require.Error(t, got.Parse(c[:]), "length %d, bit %d", n, bit)
		}
	}
}

package route

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// With Spread the holders of an expert take equal turns over the sources, also where a source is one of them.
func TestSpreadHasNoHome(t *testing.T) {
	p, err := Contiguous(16, 4, 2)
	require.NoError(t, err)
	home := p.Digest()
	p.Spread = true
	require.NotEqual(t, home, p.Digest(), "ranks that route differently must not agree")
	for e := range p.Experts {
		by := map[int]int{}
		for src := range p.Ranks {
			o := p.Owner(e, All(4), src)
			require.Contains(t, p.Replicas[e], o)
			by[o]++
		}
		for _, r := range p.Replicas[e] {
			require.Equal(t, 2, by[r], "expert %d, rank %d", e, r)
		}
	}
	require.Equal(t, -1, p.Owner(0, Ranks{}, 0))
}

package faultpoint

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNamesAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range All() {
		require.False(t, seen[name], name)
		seen[name] = true
	}
	require.Len(t, seen, 24)
}

func TestHitCostsNothingUnarmed(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() { Hit(SealBefore) }))
	if !Enabled {
		require.Panics(t, func() { Arm(SealBefore, 1, nil) })
		require.Zero(t, Hits(SealBefore))
		Disarm()
	}
}

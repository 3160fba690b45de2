package host

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFenceMarks(t *testing.T) {
	var w atomic.Uint64
	w.Store(7)
	require.EqualValues(t, 7, Begin(&w, 9))
	require.EqualValues(t, 9, Recheck(&w))
	require.Zero(t, testing.AllocsPerRun(100, func() { Begin(&w, Recheck(&w)+1) }))
}

package dtype

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTypes(t *testing.T) {
	for _, d := range All() {
		require.True(t, d.Valid())
	}
	for i, row := range types {
		require.Equal(t, row.size, row.d.Size())
		require.Equal(t, i < 2, row.d.Float())
		require.Equal(t, row.name, row.d.String())
	}
	for _, d := range []DType{0, 3, 15, 19, 255} {
		require.False(t, d.Valid())
		require.Zero(t, d.Size())
	}
	require.Equal(t, "dtype(3)", DType(3).String())
}

// TestNumbersStay pins what travels between versions.
func TestNumbersStay(t *testing.T) {
	require.Equal(t, []DType{1, 2, 16, 17, 18}, All())
	require.Equal(t, []ReduceOp{1, 2, 3}, Ops())
}

func TestOps(t *testing.T) {
	for _, o := range Ops() {
		require.True(t, o.Valid())
	}
	require.False(t, ReduceOp(0).Valid())
	require.False(t, ReduceOp(4).Valid())
	require.Equal(t, "reduceop(9)", ReduceOp(9).String())
	require.Equal(t, []string{"sum", "avg", "max"}, []string{Sum.String(), Avg.String(), Max.String()})
}

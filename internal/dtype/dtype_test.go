package dtype

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTypes(t *testing.T) {
	for _, d := range All() {
		require.True(t, d.Valid())
		got, err := Parse(d.String())
		require.NoError(t, err)
		require.Equal(t, d, got)
	}
	for i, row := range types {
		require.Equal(t, row.size, row.d.Size())
		require.Equal(t, i < 2, row.d.Float())
		for _, s := range []string{row.torch, "torch." + row.torch} {
			got, err := Parse(s)
			require.NoError(t, err)
			require.Equal(t, row.d, got)
		}
	}
	for _, d := range []DType{0, 3, 15, 19, 255} {
		require.False(t, d.Valid())
		require.Zero(t, d.Size())
	}
	require.Equal(t, "dtype(3)", DType(3).String())
	_, err := Parse("f17")
	require.EqualError(t, err, `dtype: "f17" is not one of f32, bf16, i32, i64, u8`)
}

// TestNumbersStay pins what travels between versions.
func TestNumbersStay(t *testing.T) {
	require.Equal(t, []DType{1, 2, 16, 17, 18}, All())
	require.Equal(t, []ReduceOp{1, 2, 3}, Ops())
}

func TestOps(t *testing.T) {
	for _, o := range Ops() {
		require.True(t, o.Valid())
		got, err := ParseOp(o.String())
		require.NoError(t, err)
		require.Equal(t, o, got)
	}
	require.False(t, ReduceOp(0).Valid())
	require.False(t, ReduceOp(4).Valid())
	require.Equal(t, "reduceop(9)", ReduceOp(9).String())
	_, err := ParseOp("min")
	require.EqualError(t, err, `dtype: reduction "min" is not one of sum, avg, max`)
}

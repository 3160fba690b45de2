package witness_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/witness"
	"github.com/serry-project/serry/witness/witnesstest"
)

func TestMemory(t *testing.T) {
	m := witness.NewMemory()
	witnesstest.Run(t, func(t *testing.T, world string) witness.Witness { return m.World(world) })
}

func TestMemoryDown(t *testing.T) {
	m, down := witness.NewMemory(), errors.New("no way")
	w := m.World("a")
	require.NoError(t, w.Create(t.Context(), []byte("0")))
	m.Down(down)
	_, err := w.Swap(t.Context(), []byte("0"), []byte("1"))
	require.ErrorIs(t, err, down)
	require.ErrorIs(t, w.Create(t.Context(), []byte("0")), down)
	require.ErrorIs(t, w.Remove(t.Context()), down)
	m.Down(nil)
	held, err := w.Swap(t.Context(), []byte("0"), []byte("1"))
	require.NoError(t, err)
	require.Equal(t, "1", string(held))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = w.Swap(over, []byte("1"), []byte("2"))
	require.ErrorIs(t, err, context.Canceled)
}

func TestOpen(t *testing.T) {
	m := witness.NewMemory()
	_, err := witness.Open("paper://desk", "w", nil)
	require.ErrorContains(t, err, "import github.com/serry-project/serry/witness/etcd")
	witness.Register("paper", func(url, world string, _ *slog.Logger) (witness.Witness, error) {
		require.Equal(t, "paper://desk", url)
		return m.World(world), nil
	})
	require.Panics(t, func() { witness.Register("paper", nil) })
	for _, url := range []string{"stone://desk", "paper", ""} {
		_, err = witness.Open(url, "w", nil)
		require.ErrorContains(t, err, "this program knows paper://", url)
	}
	for _, world := range []string{"", "a/b", "a b"} {
		_, err = witness.Open("paper://desk", world, nil)
		require.ErrorContains(t, err, "is no name of a world")
	}
	w, err := witness.Open("paper://desk", "w-1", nil)
	require.NoError(t, err)
	require.NoError(t, w.Create(t.Context(), []byte("0")))
}

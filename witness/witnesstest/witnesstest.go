// Package witnesstest is what every kind of witness must do.
package witnesstest

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/witness"
)

// Run runs the tests. open returns the Witness of a world, as one more rank that asks for it.
func Run(t *testing.T, open func(t *testing.T, world string) witness.Witness) {
	t.Run("a register", func(t *testing.T) {
		a, b := open(t, "register"), open(t, "register")
		ctx := t.Context()
		held, err := a.Swap(ctx, []byte("0"), []byte("1"))
		require.NoError(t, err)
		require.Empty(t, held, "a swap makes no register")
		held, err = a.Swap(ctx, nil, []byte("1"))
		require.NoError(t, err)
		require.Empty(t, held, "nor does one that expects none")
		require.NoError(t, a.Create(ctx, []byte("0")))
		require.ErrorIs(t, b.Create(ctx, []byte("other")), witness.ErrExists)
		for _, c := range []struct {
			who            witness.Witness
			old, new, held string
		}{
			{b, "0", "b", "b"}, {b, "0", "b", "b"}, // again: it is there
			{a, "0", "a", "b"}, {a, "b", "a\x00c", "a\x00c"}, {b, "b", "d", "a\x00c"}, {b, "", "d", "a\x00c"},
		} {
			held, err := c.who.Swap(ctx, []byte(c.old), []byte(c.new))
			require.NoError(t, err)
			require.Equal(t, c.held, string(held), "%q to %q", c.old, c.new)
		}
		require.ErrorIs(t, a.Create(ctx, []byte("0")), witness.ErrExists, "it has been swapped since")
	})
	t.Run("worlds", func(t *testing.T) {
		a, b := open(t, "one"), open(t, "two")
		require.NoError(t, a.Create(t.Context(), []byte("a")))
		held, err := b.Swap(t.Context(), []byte("a"), []byte("b"))
		require.NoError(t, err)
		require.Empty(t, held)
	})
	t.Run("removed", func(t *testing.T) {
		a, b := open(t, "removed"), open(t, "removed")
		require.NoError(t, a.Remove(t.Context()))
		require.NoError(t, a.Create(t.Context(), []byte("0")))
		require.NoError(t, b.Remove(t.Context()))
		held, err := a.Swap(t.Context(), []byte("0"), []byte("1"))
		require.NoError(t, err)
		require.Empty(t, held)
		require.NoError(t, b.Remove(t.Context()))
	})
	t.Run("size", func(t *testing.T) {
		a := open(t, "size")
		large := bytes.Repeat([]byte{7}, witness.MaxVote)
		require.NoError(t, a.Create(t.Context(), []byte("0")))
		held, err := a.Swap(t.Context(), []byte("0"), large)
		require.NoError(t, err)
		require.True(t, bytes.Equal(large, held))
		held, err = a.Swap(t.Context(), large, []byte("1"))
		require.NoError(t, err)
		require.Equal(t, "1", string(held))
		for _, v := range [][]byte{nil, append(large, 7)} {
			_, err = a.Swap(t.Context(), []byte("1"), v)
			require.ErrorContains(t, err, "1048576")
			require.ErrorContains(t, open(t, "size-2").Create(t.Context(), v), "1048576")
		}
	})
	t.Run("who comes first", func(t *testing.T) {
		const n, rounds = 4, 20
		var ws []witness.Witness
		for range n {
			ws = append(ws, open(t, "race"))
		}
		require.NoError(t, ws[0].Create(t.Context(), []byte("0")))
		won := make([]int, rounds)
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i, w := range ws { // each counts up as long as it can: one of them makes each step
			wg.Go(func() {
				held := []byte("0")
				for {
					var k, by int
					_, _ = fmt.Sscanf(string(held), "%d by %d", &k, &by)
					if k >= rounds {
						return
					}
					mine := fmt.Appendf(nil, "%d by %d", k+1, i+1)
					now, err := w.Swap(t.Context(), held, mine)
					if err != nil {
						t.Error(err)
						return
					}
					if bytes.Equal(now, mine) {
						mu.Lock()
						won[k]++
						mu.Unlock()
					}
					held = now
				}
			})
		}
		wg.Wait()
		for k, c := range won {
			require.Equal(t, 1, c, "step %d", k+1)
		}
	})
	t.Run("over", func(t *testing.T) {
		require.NoError(t, open(t, "over").Close())
	})
}

package collectives

import (
	"errors"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/serry-project/serry/device/host"

	"github.com/stretchr/testify/require"
)

func TestClaim(t *testing.T) {
	words := make([]byte, WordsBytes)
	r := rand.New(rand.NewPCG(5, 6))
	dec := func(off int) decision { return decision(host.Word64(words, off).Load()) }
	at := map[int]uint64{}
	ids := map[uint64]int{}
	open := func() {
		id := r.Uint64() >> 1
		off, err := claim(words, id, 3, 4)
		require.NoError(t, err)
		require.Zero(t, at[off], "two groups share a word")
		require.LessOrEqual(t, off+wordEntry, WordsBytes)
		at[off], ids[id] = id, off
		require.Equal(t, decided(3, 4), dec(off))
	}
	for range wordEntries {
		open()
	}
	_, err := claim(words, 2, 1, 1)
	require.ErrorContains(t, err, "2016 groups are open on this host already")
	for id, off := range ids {
		again, err := claim(words, id, 9, 9)
		require.NoError(t, err)
		require.Equal(t, off, again)
		require.Equal(t, decided(3, 4), dec(off), "who comes later finds what is there")
	}
	for range 5000 { // groups come and go, without end
		for id, off := range ids {
			giveBack(words, off, id)
			giveBack(words, off, id) // another who was the last to see it
			require.Zero(t, dec(off))
			delete(ids, id)
			delete(at, off)
			break
		}
		open()
	}
	for _, id := range []uint64{0, maxGroup + 1, 1 << 63} {
		_, err := claim(words, id, 1, 1)
		require.ErrorContains(t, err, "group id")
	}
}

// TestClaimsOfTheDead: those who died between claiming a place and making it their group's leave nothing behind.
func TestClaimsOfTheDead(t *testing.T) {
	words := make([]byte, WordsBytes)
	for i := range wordEntries {
		host.Word64(words, 8*i).Store(uint64(i)<<32 | 1)
	}
	for range 100 {
		_, err := claim(words, rand.Uint64()>>1, 3, 4)
		require.NoError(t, err)
	}
}

// stepped is a word before each use of which another process may run.
type stepped struct {
	Word
	turn func()
}

func (w stepped) Load() uint64 { w.turn(); return w.Word.Load() }
func (w stepped) Store(x uint64) {
	w.turn()
	w.Word.Store(x)
}
func (w stepped) CompareAndSwap(old, new uint64) bool {
	w.turn()
	return w.Word.CompareAndSwap(old, new)
}

var errKilled = errors.New("killed")

// TestClaimInAnyOrder runs processes that claim places of one group at once, one access at a time in random order, while
// places of others come and go and processes die: those that live all get the same place.
func TestClaimInAnyOrder(t *testing.T) {
	var waited, gaveUp, died int
	for seed := range uint64(20_000) {
		r := rand.New(rand.NewPCG(seed, 8))
		words := make([]byte, WordsBytes)
		n := 3 + r.IntN(3)
		got := map[int]bool{}
		process := func(run func(x index)) iter.Seq[struct{}] {
			return func(yield func(struct{}) bool) {
				turn := func() {
					if !yield(struct{}{}) {
						panic(errKilled)
					}
				}
				defer func() {
					if e := recover(); e != nil && e != errKilled {
						panic(e)
					}
				}()
				run(index{n, func(i int) Word { return stepped{host.Word64(words, 8*i), turn} }, func() { waited++; turn() }})
			}
		}
		type running struct {
			next func() (struct{}, bool)
			stop func()
		}
		var ps []running
		start := func(run func(x index)) {
			next, stop := iter.Pull(process(run))
			ps = append(ps, running{next, stop})
		}
		const ours, theirs = 77, 99
		host.Word64(words, 0).Store(theirs << 1)
		start(func(x index) { // another group is closed meanwhile
			x.at(0).CompareAndSwap(theirs<<1, wordClosing)
			x.at(0).Store(0)
		})
		for range 2 + r.IntN(2) {
			start(func(x index) {
				i, err := x.claim(ours)
				require.NoError(t, err)
				got[i] = true
			})
		}
		for len(ps) > 0 {
			k := r.IntN(len(ps))
			if r.IntN(60) == 0 {
				ps[k].stop()
				died++
			} else if _, more := ps[k].next(); more {
				continue
			}
			ps = append(ps[:k], ps[k+1:]...)
		}
		final := 0
		for i := range n {
			switch w := host.Word64(words, 8*i).Load(); {
			case w == ours<<1:
				final++
			case w&1 != 0 && w != wordClosing:
				gaveUp++ // left by one who died
			}
		}
		require.LessOrEqual(t, len(got), 1, "seed %d", seed)
		require.LessOrEqual(t, final, 1, "seed %d", seed)
		require.LessOrEqual(t, len(got), final, "seed %d", seed)
	}
	require.Positive(t, waited)
	require.Positive(t, gaveUp)
	require.Positive(t, died)
}

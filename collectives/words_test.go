package collectives

import (
	"errors"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/serry-project/serry/device/host"

	"github.com/stretchr/testify/require"
)

// hostWords is the words of a host as production uses them.
func hostWords(words []byte) index { return index{machine{}, words} }

func TestClaim(t *testing.T) {
	words := make([]byte, WordsBytes)
	r := rand.New(rand.NewPCG(5, 6))
	dec := func(off int) decision { return decision(host.Word64(words, off).Load()) }
	at := map[int]uint64{}
	ids := map[uint64]int{}
	uses := map[int]uint64{}
	open := func() {
		id := r.Uint64() >> 1
		off, use, err := hostWords(words).claim(id)
		require.NoError(t, err)
		require.Zero(t, at[off], "two groups share a word")
		require.LessOrEqual(t, off+wordEntry, WordsBytes)
		at[off], ids[id] = id, off
		require.Equal(t, uses[off], use)
		require.Equal(t, decided(use, 0, 0), dec(off))
	}
	for range wordEntries {
		open()
	}
	_, _, err := hostWords(words).claim(2)
	require.ErrorIs(t, err, errNoWord)
	require.ErrorContains(t, err, "2016 groups are open on this host already")
	for id, off := range ids {
		again, _, err := hostWords(words).claim(id)
		require.NoError(t, err)
		require.Equal(t, off, again)
	}
	for range 5000 { // groups come and go, without end
		for id, off := range ids {
			hostWords(words).giveBack(off, id)
			hostWords(words).giveBack(off, id) // another who was the last to see it
			uses[off]++
			require.Equal(t, decided(uses[off], 0, 0), dec(off))
			delete(ids, id)
			delete(at, off)
			break
		}
		open()
	}
	for _, id := range []uint64{0, maxGroup + 1, 1 << 63} {
		_, _, err := hostWords(words).claim(id)
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
		_, _, err := hostWords(words).claim(rand.Uint64() >> 1)
		require.NoError(t, err)
	}
}

// TestSweep: the entries of groups of which nobody lives are free when no other is.
func TestSweep(t *testing.T) {
	words := make([]byte, WordsBytes)
	s := Shape{Size: 2, SlotBytes: 4096, Depth: 1, Lanes: 1}
	arena := func(groups ...uint64) *Arena {
		a, err := NewArena(make([]byte, 1<<20), func(int) error { return nil }, Shape{})
		require.NoError(t, err)
		for _, g := range groups {
			_, err := a.alloc(machine{}, g, s, 0)
			require.NoError(t, err)
		}
		return a
	}
	for id := range uint64(wordEntries) {
		_, _, err := hostWords(words).claim(id + 1)
		require.NoError(t, err)
	}
	mine, other := arena(1, 2), arena(2, 3)
	mine.Locals = func() [][]byte { return [][]byte{other.mem} }
	c, err := New(Config{Group: 5000, Slots: []int{0, 1}, Arena: mine, Words: words, Shape: s}, 1, 0, []Member{{}})
	require.NoError(t, err)
	require.Equal(t, decided(c.use, 1, 0), decision(c.dec.Load()))
	taken := map[uint64]bool{}
	for i := range wordEntries {
		if w := hostWords(words).at(i).Load(); w != 0 {
			taken[w>>1] = true
		}
	}
	require.Equal(t, map[uint64]bool{1: true, 2: true, 3: true, 5000: true}, taken)
}

// TestWordOfAnother: who was stopped while its group was closed finds the word another group's, in the same version, and
// touches it no more.
func TestWordOfAnother(t *testing.T) {
	w := newSim(t, 1, 2, Shape{SlotBytes: 8192, Depth: 2, Lanes: 1})
	old := w.ranks[0].comm
	hostWords(old.cfg.Words).giveBack(old.word, old.cfg.Group)
	for off := 0; off != old.word; { // another group gets the same entry
		id := rand.Uint64() >> 1
		var err error
		if off, _, err = hostWords(old.cfg.Words).claim(id); off != old.word {
			require.NoError(t, err)
			hostWords(old.cfg.Words).giveBack(off, id)
		}
	}
	next := &Comm{cfg: old.cfg, mem: old.mem, own: old.own, use: old.use + 1, dec: old.dec, gen: old.gen, sleep: old.sleep}
	next.cur.Store(old.Current())
	next.rearm(next.Current())
	now := old.dec.Load()
	require.Equal(t, decided(next.use, 1, 0), decision(now))
	o := &Op{Seq: 1, Ver: old.Current()}
	require.False(t, old.decide(o))
	old.CloseWord(2, func(int) bool { return true })
	old.rearm(&Version{Epoch: 9, From: 7})
	require.Equal(t, now, old.dec.Load())
	next.CloseWord(2, func(int) bool { return true })
	closed := next.dec.Load()
	require.NotEqual(t, now, closed)
	old.Reopen(5)
	require.Equal(t, closed, old.dec.Load())
	require.True(t, func() bool { next.Reopen(5); return next.decide(o) }())
}

// turns is a memory that lets another process run before each access.
type turns struct {
	machine
	turn, waited func()
}

func (m turns) Word64(b []byte, off int) Word { return turnWord{m.machine.Word64(b, off), m.turn} }
func (m turns) Yield()                        { m.waited(); m.turn() }

type turnWord struct {
	Word
	turn func()
}

func (w turnWord) Load() uint64 { w.turn(); return w.Word.Load() }
func (w turnWord) Store(x uint64) {
	w.turn()
	w.Word.Store(x)
}
func (w turnWord) CompareAndSwap(old, new uint64) bool {
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
		n := 3 + r.IntN(3)
		words := make([]byte, wordIndex+n*wordEntry)
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
				run(index{turns{turn: turn, waited: func() { waited++ }}, words})
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
				i, err := x.place(ours)
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

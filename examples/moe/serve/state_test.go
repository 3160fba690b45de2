package serve

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawState is any state that can come to be: owners that live, are dead, or were never there.
func drawState(t *rapid.T) *state {
	s := &state{step: rapid.Uint64().Draw(t, "step"), ending: rapid.Bool().Draw(t, "ending")}
	for slot := range 8 {
		if rapid.Bool().Draw(t, "active") {
			s.active = append(s.active, slot)
		}
	}
	if len(s.active) == 0 {
		s.active = []int{rapid.IntRange(0, 7).Draw(t, "only")}
	}
	for range rapid.IntRange(0, 20).Draw(t, "requests") {
		r := request{Owner: rapid.IntRange(gone(7), 7).Draw(t, "owner"), Done: rapid.Bool().Draw(t, "done")}
		r.Text = append(r.Text, rapid.SliceOfN(rapid.Byte(), 0, 5).Draw(t, "text")...)
		r.Hashes = append(r.Hashes, rapid.SliceOfN(rapid.Uint64(), 0, 5).Draw(t, "hashes")...)
		r.Lost = rapid.Float64().Draw(t, "lost")
		s.requests = append(s.requests, r)
	}
	return s
}

func (s *state) loads() map[int]int {
	load := map[int]int{}
	for _, a := range s.active {
		load[a] = 0
	}
	for _, r := range s.requests {
		if !r.Done {
			load[r.Owner]++
		}
	}
	return load
}

func TestAssign(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawState(t)
		before, err := decodeState(s.encode(nil))
		if err != nil {
			t.Fatal(err)
		}
		twin, _ := decodeState(s.encode(nil))
		me := rapid.IntRange(0, 7).Draw(t, "me")
		from, mine := s.assign(me)
		again, _ := twin.assign(me + 1)
		if !maps.EqualFunc(from, again, slices.Equal) || !slices.Equal(s.encode(nil), twin.encode(nil)) {
			t.Fatal("two ranks assign differently")
		}
		var taken, has []int
		for slot, requests := range from {
			taken = append(taken, requests...)
			for _, i := range requests {
				if was := before.requests[i].Owner; was != slot && was != gone(slot) {
					t.Fatalf("request %d of %d is said to be of %d", i, was, slot)
				}
			}
		}
		for i, r := range s.requests {
			if r.Owner == me && before.requests[i].Owner != me {
				has = append(has, i)
			}
		}
		if !slices.Equal(mine, has) {
			t.Fatalf("rank %d has got %v, and is told %v", me, has, mine)
		}
		load := s.loads()
		if len(load) != len(s.active) {
			t.Fatalf("owners %v, active %v", load, s.active)
		}
		least, most := 1<<30, 0
		for _, n := range load {
			least, most = min(least, n), max(most, n)
		}
		if most > least+1 {
			t.Fatalf("loads %v", load)
		}
		gave, got := map[int]bool{}, map[int]bool{}
		for i, r := range s.requests {
			was := before.requests[i]
			lived := slices.Contains(s.active, was.Owner)
			if want := !was.Done && !lived && was.Owner != nobody; want != slices.Contains(taken, i) {
				t.Fatalf("request %d of %d, done %v: taken is %v", i, was.Owner, was.Done, !want)
			}
			if was.Done && r.Owner != was.Owner {
				t.Fatal("a finished request moved")
			}
			if !was.Done && lived && r.Owner != was.Owner {
				gave[was.Owner], got[r.Owner] = true, true
			}
		}
		for slot := range gave {
			if got[slot] {
				t.Fatalf("rank %d gave a request away and got one", slot)
			}
			if load[slot] < most-1 {
				t.Fatalf("rank %d gave too much away: %v", slot, load)
			}
		}
		owners := make([]int, len(s.requests))
		for i, r := range s.requests {
			owners[i] = r.Owner
		}
		if more, again := s.assign(me); len(more) != 0 || len(again) != 0 {
			t.Fatalf("taken again: %v, got %v", more, again)
		}
		for i, r := range s.requests {
			if owners[i] != r.Owner {
				t.Fatal("a second assign moves requests")
			}
		}
	})
}

// A newcomer owns nothing of what its slot owned.
func TestEnter(t *testing.T) {
	s := newState(4, []int{0, 1})
	taken, got := s.assign(1)
	require.Empty(t, taken)
	require.Equal(t, []int{1, 3}, got)
	require.Equal(t, []int{0, 1, 0, 1}, []int{s.requests[0].Owner, s.requests[1].Owner, s.requests[2].Owner, s.requests[3].Owner})
	s.enter([]int{0, 1}, []int{1})
	taken, got = s.assign(1)
	require.Equal(t, map[int][]int{1: {1, 3}}, taken)
	require.Equal(t, []int{1, 3}, got)
	require.Equal(t, map[int]int{0: 2, 1: 2}, s.loads())
}

func TestApply(t *testing.T) {
	s := newState(2, []int{0})
	require.False(t, s.answered())
	require.NoError(t, s.apply(token{0, 'a', 1, 0.5}, 2))
	require.NoError(t, s.apply(token{0, 'b', 2, 0.25}, 2))
	require.NoError(t, s.apply(token{1, 0, 3, 0}, 2))
	require.True(t, s.answered())
	require.Equal(t, Answer{[]byte("ab"), []uint64{1, 2}, 0.75}, s.requests[0].Answer)
	require.Equal(t, Answer{nil, []uint64{3}, 0}, s.requests[1].Answer)
	for _, bad := range []int{-1, 0, 1, 2} {
		require.ErrorContains(t, s.apply(token{request: bad}, 2), "not open")
	}
}

func TestStateSurvivesTheWay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawState(t)
		got, err := decodeState(s.encode(nil))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.encode(nil), s.encode(nil)) || got.step != s.step || got.ending != s.ending || len(got.requests) != len(s.requests) {
			t.Fatalf("%+v became %+v", s, got)
		}
	})
}

// What cannot be read is an error, never a panic or a lot of memory; what can be read is written the same again.
func FuzzState(f *testing.F) {
	s := newState(3, []int{0, 2})
	_ = s.apply(token{1, 'x', 7, 1}, 5)
	f.Add(s.encode(nil))
	f.Add([]byte{})
	f.Add(s.encode(nil)[:30])
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeState(b)
		if err != nil {
			return
		}
		if s.assign(0); len(s.requests) > 0 {
			_ = s.answered()
		}
		if got, err := decodeState(s.encode(nil)); err != nil || len(got.requests) != len(s.requests) {
			t.Fatalf("%v: %d requests of %d", err, len(got.requests), len(s.requests))
		}
	})
}

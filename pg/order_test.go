package pg

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOrderOfGroups: a replacement has its slot's groups in the order in which the others have made them, also those that
// some of them do not know, and goes on from there.
func TestOrderOfGroups(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for victim := range 3 {
			t.Run(fmt.Sprint(victim), func(t *testing.T) {
				cfg.HeartbeatLimit = 200 * time.Millisecond
				ws := worlds(t, 3, cfg)
				ctx := within(t, 60*time.Second)
				o := Options{SlotBytes: 4096, Timeout: 10 * time.Second}
				var made [3][]uint64 // in the order of the program
				sub := func(w *World, from *Group, slots ...int) *Group {
					g, err := from.Sub(ctx, slots, o)
					require.NoError(t, err)
					if g != nil {
						made[w.Rank()] = append(made[w.Rank()], g.ID())
					}
					return g
				}
				next, last := (victim+1)%3, (victim+2)%3
				program := func(w *World) {
					for k := range 3 {
						g := sub(w, w.Group, victim, next)
						if g != nil { // the third one does not know these
							sub(w, sub(w, g, victim, next), victim)
							if k == 1 {
								sub(w, g, next, victim)
							}
						}
						sub(w, w.Group, victim, last)
						sub(w, w.Group, 0, 1, 2)
						sub(w, w.Group, victim)
					}
				}
				all(t, ws, func(w *World) error { program(w); return nil })
				var want []uint64 // all of the victim's that another one has too
				for _, id := range made[victim] {
					if slices.Contains(made[next], id) || slices.Contains(made[last], id) {
						want = append(want, id)
					}
				}
				_ = ws[victim].Close()
				rejoined(t, ctx, ws, victim, cfg)
				check := func() {
					for r, w := range ws {
						var ids []uint64
						for _, g := range w.Groups()[1:] {
							ids = append(ids, g.ID())
						}
						if r == victim {
							require.Equal(t, want, ids)
						} else {
							require.Equal(t, made[r], ids)
						}
					}
				}
				check()
				for r := range made {
					made[r] = slices.Clone(made[r])
				}
				n := len(made[victim])
				all(t, ws, func(w *World) error { program(w); return nil })
				want = append(want, made[victim][n:]...)
				check()
			})
		}
	})
}

// TestOrderOfTies: groups of one place in the order stand by their ids, whoever comes first here.
func TestOrderOfTies(t *testing.T) {
	w := &World{groups: map[uint64]*Group{}, born: map[uint64]uint64{}}
	for _, x := range [][2]uint64{{1, 0}, {9, 2}, {5, 2}, {7, 1}, {6, 2}, {2, 3}} {
		w.enlist(&Group{id: x[0]}, x[1])
	}
	require.Equal(t, []uint64{1, 7, 5, 6, 9, 2}, w.order)
	require.Equal(t, uint64(3), w.tick(0))
	require.Equal(t, uint64(8), w.tick(8))
	delete(w.groups, 5)
	w.order = slices.DeleteFunc(w.order, func(id uint64) bool { return id == 5 })
	w.enlist(&Group{id: 4}, 2)
	require.Equal(t, []uint64{1, 7, 4, 6, 9, 2}, w.order)
	require.Len(t, w.born, 6)
}

func sampleAttach() *World {
	w := &World{groups: map[uint64]*Group{}, born: map[uint64]uint64{}}
	w.enlist(&Group{id: worldID, opts: Options{}.withDefaults(4096)}, 0)
	w.enlist(&Group{id: 1 << 62, opts: Options{Mode: Raise, Depth: 3}.withDefaults(4096)}, 1<<40)
	return w
}

func TestAttach(t *testing.T) {
	losses := map[uint64][]*RankLost{1 << 62: {{Slots: []int{1, 700}, Epoch: 9, Why: "rank 1 died"}, {Epoch: 10}}}
	b := sampleAttach().encodeAttach(losses, []byte("step 5"))
	got, user, err := decodeAttach(b)
	require.NoError(t, err)
	require.Equal(t, "step 5", string(user))
	require.Equal(t, map[uint64]groupOptions{
		worldID: {opts: Options{}.withDefaults(4096)},
		1 << 62: {born: 1 << 40, opts: Options{Mode: Raise, Depth: 3}.withDefaults(4096), losses: losses[1<<62]},
	}, got)
	for i := range len(b) - len("step 5") {
		_, _, err := decodeAttach(b[:i])
		require.ErrorContains(t, err, "cannot be read", i)
	}
}

// FuzzAttach reads what members attach: it must not panic, nor take memory for what is not there.
func FuzzAttach(f *testing.F) {
	f.Add(sampleAttach().encodeAttach(nil, []byte("x")))
	f.Add(sampleAttach().encodeAttach(map[uint64][]*RankLost{1 << 62: {{Slots: []int{1}, Epoch: 9, Why: "died"}}}, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, user, err := decodeAttach(b)
		if err == nil && len(m)*(16+optionsBytes)+len(user) > len(b) {
			t.Fatalf("%d groups and %d bytes of %d", len(m), len(user), len(b))
		}
	})
}

package fault

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Rank 0 dies; ranks 1 and 2 have installed the view without it when they die too, rank 3 has heard nothing of it. The
// votes of the dead for that view are overwritten by those for the next one, but their records tell what was decided.
func TestTheDeadTellWhatWasDecided(t *testing.T) {
	var ms []Member
	for s := range 4 {
		ms = append(ms, Member{ID: ID{s, 1}, Nonce: Nonce{byte(s + 1)}, Host: 7})
	}
	second := Value{Epoch: 2, Members: ms[1:], Size: 4, Cuts: []Cut{{Group: 1, Seq: 5, Slots: SetOf(0, 1, 2, 3)}}, Why: "rank 0 died"}
	board := fakeBoard{ID{2, 1}: Record{Epoch: 2, Promised: Ballot{ballotBase(2) + 1, 2}, Past: [][]byte{appendValue(nil, second)}}}
	run := func(b Board) (views []uint64, over bool) {
		m, effs := New(Config{Self: ID{3, 1}, View: View{Epoch: 1, Size: 4, Capacity: 4, Members: ms}, Board: b}, 1)
		now := Time(1)
		events := []Event{Died{ID{0, 1}}, Died{ID{1, 1}}, Died{ID{2, 1}}}
		for n := 0; n < 20000 && !over && !slices.Contains(views, 3); n++ {
			for _, e := range effs {
				switch e := e.(type) {
				case Install:
					views = append(views, e.View.Epoch)
				case Close:
					var gs []GroupDone
					for _, g := range e.Groups {
						gs = append(gs, GroupDone{Group: g, Done: []Done{{3, 5}}})
					}
					events = slices.Insert(events, 0, Event(Closed{Ballot: e.Ballot, Groups: gs}))
				case NoQuorum, Evicted:
					over = true
				}
			}
			now += time.Millisecond
			ev := Event(Tick{})
			if len(events) > 0 {
				ev, events = events[0], events[1:]
			}
			effs = m.Step(now, ev)
		}
		return views, over
	}
	views, over := run(board)
	require.False(t, over)
	require.Equal(t, []uint64{2, 3}, views)

	r := board[ID{2, 1}]
	r.Past = nil
	_, over = run(fakeBoard{ID{2, 1}: r})
	require.True(t, over, "without it rank 3 must not go on: it does not know from where")
}

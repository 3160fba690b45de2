package history

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/internal/slots"
)

// A run of four ranks on one host: they found a world and issue calls in it, one a millisecond.
type story struct {
	*Run
	now int64
}

const (
	world = 1
	ms    = 1_000_000
)

func founded(ranks int) *story {
	s := &story{Run: &Run{World: world, Live: true, Detect: 100 * ms, Deadline: 500 * ms}}
	var all Set
	for r := range ranks {
		all.Add(r)
	}
	for r := range ranks {
		s.Procs = append(s.Procs, Process{Slot: r, Inc: 1})
		s.put(r, Event{Kind: Joined, Epoch: 1, Inc: 1})
		s.put(r, Event{Kind: View, Epoch: 1, Set: all, Size: uint32(ranks)})
		s.put(r, Event{Kind: Made, Group: world, Set: slots.Of(0, 1, 2, 3, 4, 5, 6, 7)})
	}
	return s
}

func (s *story) put(p int, e Event) *Event {
	s.now += ms
	e.Time = s.now
	s.Procs[p].Events = append(s.Procs[p].Events, e)
	return &s.Procs[p].Events[len(s.Procs[p].Events)-1]
}

// op has processes issue a call and return from it with an outcome.
func (s *story) op(call uint64, out Event, ps ...int) {
	for _, p := range ps {
		s.put(p, Event{Kind: Issue, Group: world, Op: AllReduce, Call: call})
	}
	for _, p := range ps {
		out.Kind, out.Group, out.Op, out.Call = Return, world, AllReduce, call
		s.put(p, out)
	}
}

// ok is a success; its sum is what the set gives (see want).
func ok(seq, epoch uint64, set Set) Event {
	return Event{Outcome: OK, Seq: seq, Epoch: epoch, Set: set, Sum: set[0]}
}

func lost(epoch uint64, who ...int) Event {
	return Event{Outcome: RankLost, Epoch: epoch, Set: slots.Of(who...), Why: "it died"}
}

// view has processes install one.
func (s *story) view(epoch uint64, set, gone Set, ps ...int) {
	for _, p := range ps {
		s.put(p, Event{Kind: View, Epoch: epoch, Set: set, Size: 4})
		if !gone.Empty() {
			s.put(p, Event{Kind: Lost, Epoch: epoch, Set: gone})
		}
	}
}

func (s *story) kill(p int) {
	s.now += ms
	s.Procs[p].Killed = s.now
	s.Deeds = append(s.Deeds, Deed{Time: s.now, Until: s.now, What: Kill, Proc: p, Fair: true})
}

func (s *story) deed(p int, what Done, fair bool) {
	s.now += ms
	s.Deeds = append(s.Deeds, Deed{Time: s.now, What: what, Proc: p, Fair: fair})
}

func want(_ int, e *Event) (uint64, bool) { return e.Set[0], e.Op == AllReduce }

var four, three = slots.Of(0, 1, 2, 3), slots.Of(0, 1, 2)

// after is a world that has lost rank 3 in epoch 2 and goes on.
func after(call uint64) *story {
	s := founded(4)
	s.op(1, ok(1, 1, four), 0, 1, 2, 3)
	s.kill(3)
	s.view(2, three, slots.Of(3), 0, 1, 2)
	s.op(call, ok(2, 2, three), 0, 1, 2)
	return s
}

// cases are histories; want is what is found, property and part of the text, "" for nothing.
var cases = []struct {
	name, want string
	make       func() *story
}{
	{"a loss", "", func() *story { return after(2) }},
	{"nothing happens", "", func() *story {
		s := founded(4)
		s.op(1, ok(1, 1, four), 0, 1, 2, 3)
		return s
	}},
	{"raise", "", func() *story {
		s := founded(4)
		s.kill(3)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, lost(2, 3), 0, 1, 2)
		s.op(2, ok(1, 2, three), 0, 1, 2)
		return s
	}},

	{"P1: outcomes differ", "P1: different outcomes", func() *story {
		s := after(3)
		s.op(5, ok(3, 2, three), 0, 1)
		s.op(5, lost(2, 3), 2)
		return s
	}},
	{"P1: sets differ", "P1: different sets", func() *story {
		s := after(3)
		s.op(5, ok(3, 2, three), 0, 1)
		s.op(5, ok(3, 2, slots.Of(0, 2)), 2)
		return s
	}},
	{"P1: what the dead returned does not count", "", func() *story {
		s := founded(4)
		s.op(1, ok(1, 1, four), 3)
		s.kill(3)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.op(2, ok(2, 2, three), 0, 1, 2)
		return s
	}},
	{"P1: what they returned before the last change does", "P1: different sets", func() *story {
		s := founded(4)
		s.kill(3)
		s.op(1, ok(1, 1, four), 2)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1)
		s.kill(2)
		s.view(3, slots.Of(0, 1), slots.Of(2), 0, 1)
		s.op(2, ok(2, 3, slots.Of(0, 1)), 0, 1)
		return s
	}},
	{"P1: a set that is not the epoch's", "P1: the view has", func() *story {
		s := after(2)
		s.op(3, ok(3, 2, four), 0, 1, 2)
		return s
	}},
	{"P1: one is silent", "P1: which goes on in the group", func() *story {
		s := after(2)
		s.op(3, ok(3, 2, three), 0, 1)
		s.op(4, ok(4, 2, three), 0, 1, 2)
		return s
	}},

	{"P2: a wrong sum", "P2: the contributors give", func() *story {
		s := after(2)
		bad := ok(3, 2, three)
		bad.Sum++
		s.op(3, bad, 0, 1, 2)
		return s
	}},
	{"P2: also of one that is evicted", "P2: the contributors give", func() *story {
		s := founded(4)
		bad := ok(1, 1, four)
		bad.Sum = 7
		s.op(1, bad, 3)
		s.kill(3)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.op(2, ok(2, 2, three), 0, 1, 2)
		return s
	}},
	{"P2: bits differ where nothing is known of them", "P2: different bits", func() *story {
		s := after(2)
		s.Want = nil
		a, b := ok(3, 2, three), ok(3, 2, three)
		b.Sum++
		s.op(3, a, 0, 1)
		s.op(3, b, 2)
		return s
	}},

	{"P3: two sets of one epoch", "P3: two sets", func() *story {
		s := after(2)
		s.view(3, slots.Of(0, 1), Set{}, 0, 1)
		s.view(3, slots.Of(0, 2), Set{}, 2)
		return s
	}},
	{"P3: the epoch falls", "P3: falls back", func() *story {
		s := after(2)
		s.op(3, ok(3, 1, four), 0)
		return s
	}},
	{"P3: the sequence stays", "P3: sequence 2 after 2", func() *story {
		s := after(2)
		s.op(3, ok(2, 2, three), 0, 1, 2)
		return s
	}},
	{"P3: growth in an operation", "P3: was called before Boundary 4", func() *story {
		s := after(2)
		for p := range 3 {
			s.put(p, Event{Kind: Issue, Group: world, Op: AllReduce, Call: 3})
		}
		s.join(3, 4)
		for p := range 3 {
			e := ok(3, 3, four)
			e.Kind, e.Group, e.Op, e.Call = Return, world, AllReduce, 3
			s.put(p, e)
		}
		s.op(5, ok(4, 3, four), 0, 1, 2, 4)
		return s
	}},
	{"P3: growth at a Boundary", "", func() *story {
		s := after(2)
		s.join(3, 4)
		s.boundary(4, 4, slots.Of(3), 0, 1, 2)
		s.op(5, ok(4, 3, four), 0, 1, 2, 4)
		return s
	}},

	{"P4: success after the exclusion", "P4: after the rank was excluded", func() *story {
		s := founded(4)
		s.deed(3, Stop, true)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 1, four), 3)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},
	{"P4: what was in flight in frames may complete it", "", func() *story {
		s := founded(4)
		s.Frames = true
		s.deed(3, Stop, true)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 1, four), 3)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},
	{"P4: what was called before may succeed", "", func() *story {
		s := founded(4)
		s.put(3, Event{Kind: Issue, Group: world, Op: AllReduce, Call: 1})
		s.deed(3, Stop, true)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		e := ok(1, 1, four)
		e.Kind, e.Group, e.Op, e.Call = Return, world, AllReduce, 1
		s.put(3, e)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},

	{"P4: who is excluded is told so", "P4: told of no quorum", func() *story {
		s := founded(4)
		s.deed(3, Stop, true)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: NoQuorum})
		s.op(1, ok(1, 2, three), 0, 1, 2)
		return s
	}},

	{"P5: no end", "P5: never returns", func() *story {
		s := after(2)
		s.put(1, Event{Kind: Issue, Group: world, Op: Barrier, Call: 3})
		return s
	}},
	{"P5: too long", "P5: at most 600 were promised", func() *story {
		s := founded(4)
		s.put(0, Event{Kind: Issue, Group: world, Op: AllReduce, Call: 1})
		s.now += 601 * ms
		s.Live = false
		e := ok(1, 1, four)
		e.Kind, e.Group, e.Op, e.Call = Return, world, AllReduce, 1
		s.put(0, e)
		return s
	}},
	{"P5: not so long with a fault", "", func() *story {
		s := founded(4)
		s.put(0, Event{Kind: Issue, Group: world, Op: AllReduce, Call: 1})
		s.kill(3)
		s.now += 601 * ms
		s.view(2, three, slots.Of(3), 0, 1, 2)
		e := ok(1, 2, three)
		e.Kind, e.Group, e.Op, e.Call = Return, world, AllReduce, 1
		s.put(0, e)
		s.op(1, ok(1, 2, three), 1, 2)
		s.op(2, ok(2, 2, three), 0, 1, 2)
		return s
	}},
	{"P5: no promised outcome", "P5: no promised outcome", func() *story {
		s := after(2)
		s.op(3, Event{Outcome: Other, Why: "?"}, 0, 1, 2)
		return s
	}},

	{"P6: nothing was done to it", "P6: nothing was done", func() *story {
		s := founded(4)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},
	{"P6: it was not late enough", "P6: nothing was done", func() *story {
		s := founded(4)
		s.deed(3, Stop, false)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		s.put(3, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},
	{"P6: its replacement as well", "P6: rank 3 is lost in epoch 4", func() *story {
		s := after(2)
		s.join(3, 4)
		s.boundary(4, 4, slots.Of(3), 0, 1, 2)
		s.view(4, three, slots.Of(3), 0, 1, 2)
		s.op(5, ok(4, 4, three), 0, 1, 2)
		s.put(4, Event{Kind: Ended, Outcome: Evicted})
		return s
	}},
	{"P6: a wrong name", "P6: names [2]", func() *story {
		s := founded(4)
		s.kill(3)
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, lost(2, 2), 0, 1, 2)
		s.op(2, ok(1, 2, three), 0, 1, 2)
		return s
	}},
	{"P6: a message between the living", "P6: that rank never was", func() *story {
		s := after(2)
		s.Continue = func(uint64) bool { return true }
		s.put(0, Event{Kind: Issue, Group: world, Op: Send, Call: 3, Peer: 1})
		s.put(0, Event{Kind: Return, Group: world, Op: Send, Call: 3, Peer: 1, Outcome: RankLost, Epoch: 2, Set: slots.Of(1)})
		return s
	}},

	{"P7: the half without the lowest", "P7: only [2 3] can have agreed", func() *story {
		s := founded(4)
		s.deed(0, Cut, true)
		s.deed(1, Cut, true)
		s.Procs[0].Doomed, s.Procs[1].Doomed = true, true
		s.Procs[2].Host, s.Procs[3].Host = 1, 1
		s.view(2, slots.Of(2, 3), slots.Of(0, 1), 2, 3)
		s.op(1, ok(1, 2, slots.Of(2, 3)), 2, 3)
		return s
	}},
	{"P7: with a witness", "", func() *story {
		s := founded(4)
		s.Witness = true
		s.deed(0, Cut, true)
		s.deed(1, Cut, true)
		s.Procs[0].Doomed, s.Procs[1].Doomed = true, true
		s.view(2, slots.Of(2, 3), slots.Of(0, 1), 2, 3)
		s.op(1, ok(1, 2, slots.Of(2, 3)), 2, 3)
		return s
	}},
	{"P7: the half with the lowest", "", func() *story {
		s := founded(4)
		s.deed(2, Cut, true)
		s.deed(3, Cut, true)
		s.Procs[2].Doomed, s.Procs[3].Doomed = true, true
		s.view(2, slots.Of(0, 1), slots.Of(2, 3), 0, 1)
		s.op(1, ok(1, 2, slots.Of(0, 1)), 0, 1)
		return s
	}},
	{"P7: all but one dead, of one host", "", func() *story {
		s := founded(4)
		for p := range 3 {
			s.kill(p)
		}
		s.view(2, slots.Of(3), slots.Of(0, 1, 2), 3)
		s.op(1, ok(1, 2, slots.Of(3)), 3)
		return s
	}},
	{"P7: all but one dead, of other hosts", "P7: only [3] can have agreed", func() *story {
		s := founded(4)
		for p := range 3 {
			s.Procs[p].Host = 1
			s.kill(p)
		}
		s.view(2, slots.Of(3), slots.Of(0, 1, 2), 3)
		s.op(1, ok(1, 2, slots.Of(3)), 3)
		return s
	}},

	{"P8: never let in", "P8: never let in", func() *story {
		s := after(2)
		s.Procs = append(s.Procs, Process{Slot: 3})
		return s
	}},
	{"P8: an identity twice", "P8: two processes are incarnation 1", func() *story {
		s := after(2)
		s.join(3, 4)
		s.Procs[4].Inc = 1
		s.boundary(4, 4, slots.Of(3), 0, 1, 2)
		s.op(5, ok(4, 3, four), 0, 1, 2, 4)
		return s
	}},

	{"P9: a group changes its slots", "P9: with slots", func() *story {
		s := after(2)
		s.put(1, Event{Kind: Made, Group: 7, Set: slots.Of(0, 1)})
		s.put(0, Event{Kind: Made, Group: 7, Set: slots.Of(0, 2)})
		return s
	}},
	{"P9: the size falls", "P9: the size is 4", func() *story {
		s := founded(4)
		s.kill(3)
		for p := range 3 {
			s.put(p, Event{Kind: View, Epoch: 2, Set: three, Size: 3})
			s.put(p, Event{Kind: Lost, Epoch: 2, Set: slots.Of(3)})
		}
		s.op(2, ok(2, 2, three), 0, 1, 2)
		return s
	}},

	{"P10: no quorum with a quorum", "P10: ends without a quorum", func() *story {
		s := founded(4)
		s.kill(0)
		s.op(1, Event{Outcome: NoQuorum}, 1, 2, 3)
		for p := 1; p < 4; p++ {
			s.put(p, Event{Kind: Ended, Outcome: NoQuorum})
		}
		return s
	}},
	{"P10: no quorum of a minority", "", func() *story {
		s := founded(4)
		s.deed(3, Cut, true)
		s.deed(3, Minority, false)
		s.op(1, Event{Outcome: NoQuorum}, 3)
		s.put(3, Event{Kind: Ended, Outcome: NoQuorum})
		s.view(2, three, slots.Of(3), 0, 1, 2)
		s.op(1, ok(1, 2, three), 0, 1, 2)
		return s
	}},
	{"P10: one does not go on", "P10: completed nothing", func() *story {
		s := founded(4)
		s.op(1, ok(1, 1, four), 0, 1, 2, 3)
		s.kill(0)
		s.view(2, slots.Of(1, 2, 3), slots.Of(0), 1, 2, 3)
		return s
	}},
}

// join lets a process in, as the next of Procs.
func (s *story) join(slot int, boundary uint32) {
	p := len(s.Procs)
	s.Procs = append(s.Procs, Process{Slot: slot, Inc: 2})
	s.put(p, Event{Kind: Joined, Epoch: 3, Inc: 2, N: boundary})
	s.view(3, four, Set{}, 0, 1, 2)
}

func (s *story) boundary(call uint64, n uint32, joined Set, ps ...int) {
	for _, p := range ps {
		s.put(p, Event{Kind: Issue, Group: world, Op: Boundary, Call: call})
	}
	for _, p := range ps {
		s.put(p, Event{Kind: Return, Group: world, Op: Boundary, Call: call, Outcome: OK, N: n, Set: joined})
	}
}

func TestCheckerBites(t *testing.T) {
	var c Checker
	for _, x := range cases {
		t.Run(x.name, func(t *testing.T) {
			s := x.make()
			if s.Want == nil && !strings.Contains(x.name, "nothing is known") {
				s.Want = want
			}
			s.End = s.now
			var all []string
			for _, v := range c.Check(s.Run) {
				all = append(all, v.String())
			}
			if x.want == "" {
				require.Empty(t, all)
				return
			}
			property, text, _ := strings.Cut(x.want, ": ")
			hit := false
			for _, v := range all {
				hit = hit || strings.HasPrefix(v, property+": ") && strings.Contains(v, text)
			}
			require.True(t, hit, "want %s, found %q", x.want, all)
			for _, v := range all { // and nothing that is not so
				require.True(t, strings.HasPrefix(v, property+": "), "%q", all)
			}
		})
	}
}

// TestEveryPropertyBites: the table has a violation, and a near miss, of each.
func TestEveryPropertyBites(t *testing.T) {
	bites := map[string]bool{}
	for _, x := range cases {
		property, _, _ := strings.Cut(x.want, ":")
		bites[property] = true
	}
	for _, p := range []string{"P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10"} {
		require.True(t, bites[p], p)
	}
}

func TestJSON(t *testing.T) {
	es := []Event{
		{Time: 5, Kind: Joined, Epoch: 1, Inc: 2, N: 7},
		{Time: 6, Kind: View, Epoch: 3, Set: slots.Of(0, 2, 1023), Size: 3},
		{Time: 7, Kind: Issue, Op: Send, Peer: 0, Group: 1 << 63, Call: 9},
		{Time: 8, Kind: Return, Op: AllToAll, Outcome: RankLost, Group: 3, Call: 1, Seq: 2, Epoch: 3, Sum: 1<<64 - 1, Set: slots.Of(1), Why: "a \"quoted\"\nline"},
		{Time: 9, Kind: Ended, Outcome: Left},
	}
	var b []byte
	for i := range es {
		b = es[i].AppendJSON(b)
	}
	got, err := Parse(b)
	require.NoError(t, err)
	require.Equal(t, es, got)
	got, err = Parse(b[:len(b)-3])
	require.NoError(t, err, "the last line of one that was killed")
	require.Equal(t, es[:4], got)
	for _, bad := range []string{"{}x\n", `{"kind":"nothing"}` + "\n", `{"kind":"view","set":[1024]}` + "\n", `{"kind":"view","set":[-1]}` + "\n"} {
		_, err = Parse([]byte(bad))
		require.ErrorContains(t, err, "line 1", bad)
	}
}

// TestCheckerIsCheap: a simulation checks hundreds of histories a second.
func TestCheckerIsCheap(t *testing.T) {
	s := long(8, 200)
	var c Checker
	require.Empty(t, c.Check(s.Run))
	require.Less(t, testing.AllocsPerRun(10, func() { c.Check(s.Run) }), 20.0, "for 3,200 events")
}

func long(ranks, calls int) *story {
	s := founded(ranks)
	var all Set
	var ps []int
	for r := range ranks {
		all.Add(r)
		ps = append(ps, r)
	}
	for i := range calls {
		s.op(uint64(i+1), ok(uint64(i+1), 1, all), ps...)
	}
	s.Want, s.End = want, s.now
	return s
}

func BenchmarkCheck(b *testing.B) {
	s := long(8, 20)
	var c Checker
	for b.Loop() {
		c.Check(s.Run)
	}
}

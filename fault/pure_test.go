package fault

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const time100 = 100 * ms

// testView has a member in each slot, on the hosts given.
func testView(hosts ...uint64) View {
	v := View{Epoch: 1, Size: len(hosts), Capacity: len(hosts) + 2}
	for i, h := range hosts {
		v.Members = append(v.Members, Member{ID: ID{i, 1}, Nonce: Nonce{byte(i + 1)}, Host: h})
	}
	return v
}

func testMachine(self ID, hosts ...uint64) *Machine {
	m, _ := New(Config{Self: self, View: testView(hosts...), HeartbeatLimit: simHL, BallotTimeout: simBT, AskTimeout: simAsk}, ms)
	return m
}

func TestQuorum(t *testing.T) {
	v := testView(0, 0, 0, 0)
	for _, c := range []struct {
		votes Set
		want  bool
	}{
		{SetOf(), false}, {SetOf(0), false}, {SetOf(1, 2), false}, {SetOf(2, 3), false}, {SetOf(0, 3), true},
		{SetOf(1, 2, 3), true}, {SetOf(0, 1, 2, 3), true}, {SetOf(0, 9), false}, {SetOf(1, 8, 9), false},
	} {
		if got := quorum(v, c.votes); got != c.want {
			t.Errorf("%v: %v", c.votes.Slots(), got)
		}
	}
	if quorum(View{}, SetOf(0)) {
		t.Error("a view without members has no quorum")
	}
}

func TestQuorumsMeet(t *testing.T) {
	for n := 1; n <= 7; n++ {
		v := testView(make([]uint64, n)...)
		set := func(x int) (s Set) {
			for i := range n {
				if x>>i&1 != 0 {
					s.Add(i)
				}
			}
			return s
		}
		for a := range 1 << n {
			for b := range 1 << n {
				if a&b == 0 && quorum(v, set(a)) && quorum(v, set(b)) {
					t.Fatalf("of %d: %b and %b", n, a, b)
				}
			}
		}
	}
}

func TestUnlink(t *testing.T) {
	for name, c := range map[string]struct {
		members Set
		silent  map[int]Set
		want    []int
	}{
		"nobody says anything":      {SetOf(0, 1, 2), nil, nil},
		"one end alone":             {SetOf(0, 1, 2), map[int]Set{0: SetOf(1)}, nil},
		"a tie: the higher goes":    {SetOf(0, 1, 2), map[int]Set{0: SetOf(1), 1: SetOf(0)}, []int{1}},
		"the one with fewer links":  {SetOf(0, 1, 2, 3), map[int]Set{0: SetOf(1, 2), 1: SetOf(0), 2: SetOf(0)}, []int{0}},
		"one end's word for counts": {SetOf(0, 1, 2), map[int]Set{0: SetOf(1), 1: SetOf(0), 2: SetOf(0)}, []int{0}},
		"two pairs":                 {SetOf(0, 1, 2, 3), map[int]Set{0: SetOf(1), 1: SetOf(0), 2: SetOf(3), 3: SetOf(2)}, []int{3, 1}},
		"a ring of four without the diagonals": {SetOf(0, 1, 2, 3),
			map[int]Set{0: SetOf(2), 2: SetOf(0), 1: SetOf(3), 3: SetOf(1)}, []int{3, 2}},
		"a star: only the middle is linked": {SetOf(0, 1, 2, 3),
			map[int]Set{1: SetOf(2, 3), 2: SetOf(1, 3), 3: SetOf(1, 2)}, []int{3, 2}},
		"one that is out already": {SetOf(0, 2), map[int]Set{0: SetOf(1), 1: SetOf(0)}, nil},
	} {
		if got := unlink(c.members, c.silent); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 300 { // what is left is mutually connected
		n := 2 + rng.IntN(8)
		all, silent := SetOf(upTo(n)...), map[int]Set{}
		for i := range n {
			var s Set
			for j := range n {
				if i != j && rng.IntN(3) == 0 {
					s.Add(j)
				}
			}
			silent[i] = s
		}
		rest := all
		for _, s := range unlink(all, silent) {
			rest.Del(s)
		}
		for _, a := range rest.Slots() {
			for _, b := range rest.Slots() {
				sa, sb := silent[a], silent[b]
				if sa.Has(b) && sb.Has(a) {
					t.Fatalf("%d and %d do not reach each other", a, b)
				}
			}
		}
	}
}

func says(slot int, gone []ID, groups ...held) vote {
	return vote{ID{slot, 1}, promise{Groups: groups, Gone: gone}}
}

func state(id uint64, slots Set, done ...Done) held {
	return held{GroupDone{Group: id, Done: done}, slots, uint32(id)}
}

func TestPlan(t *testing.T) {
	v := testView(0, 0, 1, 1, 2) // ranks 0 1 | 2 3 | 4
	all, g := SetOf(0, 1, 2, 3, 4), SetOf(2, 4)
	drop := func(k kind, slots ...int) (d []suspicion) {
		for _, s := range slots {
			d = append(d, suspicion{ID: ID{s, 1}, Kind: k, Why: "x"})
		}
		return d
	}
	for name, c := range map[string]struct {
		votes   []vote
		ch      change
		cuts    []Cut
		missing Set
	}{
		"the cut is where the furthest survivor is": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 6})), says(2, []ID{{3, 1}}, state(1, all, Done{2, 4})), says(4, nil, state(1, all, Done{4, 5}))},
			change{drop: drop(kDied, 3)}, []Cut{{1, 6, "", all}}, Set{}},
		"what the dropped returned from does not bind": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5})), says(2, nil, state(1, all, Done{2, 5}, Done{3, 6})), says(3, nil, state(1, all, Done{3, 6})), says(4, nil, state(1, all, Done{4, 5}))},
			change{drop: drop(kLate, 3)}, []Cut{{1, 5, "", all}}, Set{}},
		"what a leaver returned from does": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5})), says(2, nil, state(1, all, Done{2, 5}, Done{3, 6})), says(3, nil, state(1, all, Done{3, 6})), says(4, nil, state(1, all, Done{4, 5}))},
			change{drop: drop(kLeft, 3)}, []Cut{{1, 6, "", all}}, Set{}},
		"no word of 4": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5})), says(2, []ID{{3, 1}}, state(1, all, Done{2, 5}))},
			change{drop: drop(kDied, 3)}, []Cut{{1, 5, "", all}}, SetOf(4)},
		"3 lives, and 2 does not know how far it is": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5})), says(2, nil, state(1, all, Done{2, 5}))},
			change{drop: drop(kSilent, 4)}, []Cut{{1, 5, "", all}}, SetOf(3)},
		"a group that loses nobody has no cut": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5})), says(2, nil, state(1, all, Done{2, 5}), state(7, g, Done{2, 1})), says(3, nil, state(1, all, Done{3, 5})), says(4, nil, state(7, g, Done{4, 1}))},
			change{drop: drop(kLate, 1)}, []Cut{{1, 5, "", all}}, Set{}},
		"a promise that does not know the group yet is at its start": {
			[]vote{says(0, nil, state(1, all, Done{0, 5})), says(2, nil, state(1, all, Done{2, 5}, Done{3, 5}), state(7, g, Done{2, 0})), says(3, nil), says(4, nil, state(1, all, Done{4, 5}))},
			change{drop: drop(kLate, 1)}, []Cut{{1, 5, "", all}}, Set{}},
		"a failed group": {
			[]vote{says(0, nil), says(1, nil), says(2, nil, state(7, g, Done{2, 3})), says(3, nil), says(4, nil, state(7, g, Done{4, 2}))},
			change{fails: []failing{{7, "mismatch"}}}, []Cut{{7, 3, "mismatch", g}}, Set{}},
		"a word about another host does not count": {
			[]vote{says(0, nil, state(1, all, Done{0, 5}, Done{1, 5}, Done{4, 9})), says(2, []ID{{3, 1}}, state(1, all, Done{2, 5})), says(4, nil, state(1, all, Done{4, 5}))},
			change{drop: drop(kDied, 3)}, []Cut{{1, 5, "", all}}, Set{}},
	} {
		val, missing := plan(v, c.votes, c.ch, bugNone)
		if !reflect.DeepEqual(val.Cuts, c.cuts) || missing != c.missing {
			t.Errorf("%s: cuts %+v, missing %v\nwant %+v, %v", name, val.Cuts, missing.Slots(), c.cuts, c.missing.Slots())
		}
		if len(val.Members) != len(v.Members)-len(c.ch.drop) {
			t.Errorf("%s: %d members", name, len(val.Members))
		}
	}
}

func said(slot int, g, seq uint64, arrived uint64, waits, wseq uint64, missing ...int) answer {
	return answer{question: question{slot, wait{g, seq}}, known: true,
		status: status{Arrived: arrived, WaitGroup: waits, WaitSeq: wseq, Missing: SetOf(missing...)}}
}

func TestJudgeWaits(t *testing.T) {
	root := wait{5, 7}
	mute := answer{question: question{2, root}, mute: true}
	over := said(1, 5, 7, 6, 8, 2, 3)
	over.Over = true
	for name, c := range map[string]struct {
		asked      []answer
		late, ring []int
	}{
		"it computes":                          {[]answer{said(1, 5, 7, 6, 0, 0)}, []int{1}, nil},
		"it does not answer":                   {[]answer{mute}, []int{2}, nil},
		"it has arrived meanwhile":             {[]answer{said(1, 5, 7, 7, 0, 0)}, nil, nil},
		"it waits for one who computes":        {[]answer{said(1, 5, 7, 6, 8, 2, 3), said(3, 8, 2, 1, 0, 0)}, nil, nil},
		"... and the deadline of that is over": {[]answer{over, said(3, 8, 2, 1, 0, 0)}, []int{3}, nil},
		"a ring":                               {[]answer{said(1, 5, 7, 6, 8, 2, 0), said(0, 8, 2, 1, 5, 7, 1)}, nil, []int{1, 0}},
		"a ring behind one that waits": {[]answer{said(1, 5, 7, 6, 8, 2, 3), said(3, 8, 2, 1, 9, 1, 4), said(4, 9, 1, 0, 8, 2, 3)},
			nil, []int{3, 4}},
		"one of the ring has arrived": {[]answer{said(1, 5, 7, 6, 8, 2, 0), said(0, 8, 2, 2, 5, 7, 1)}, nil, nil},
		"one of the ring has moved": {[]answer{said(1, 5, 7, 6, 8, 2, 0), said(0, 8, 2, 1, 5, 7, 1), said(1, 9, 9, 0, 8, 3, 0)},
			nil, nil},
		"a sink goes before a ring": {[]answer{said(1, 5, 7, 6, 8, 2, 0), said(0, 8, 2, 1, 5, 7, 1), mute}, []int{2}, nil},
	} {
		late, ring := judgeWaits(root, c.asked)
		slots := func(as []answer) (s []int) {
			for _, a := range as {
				s = append(s, a.slot)
			}
			return s
		}
		if !slices.Equal(slots(late), c.late) || !slices.Equal(slots(ring), c.ring) {
			t.Errorf("%s: late %v, ring %v", name, slots(late), slots(ring))
		}
	}
	_, ring := judgeWaits(root, []answer{said(1, 5, 7, 6, 8, 2, 0), said(0, 8, 2, 1, 5, 7, 1)})
	if got, want := ringText(ring), "deadlock: rank 0 waits in group 5 op 7 for rank 1, rank 1 waits in group 8 op 2 for rank 0"; got != want {
		t.Errorf("%s", got)
	}
}

func TestRingIsFoundFast(t *testing.T) { // 600 ranks, each waits for all others in one of two groups: no path is walked twice
	var asked []answer
	all := SetOf(upTo(600)...)
	for i := range 600 {
		g := uint64(i / 300)
		a := answer{question: question{i, wait{1 - g + 10, 1}}, known: true, status: status{WaitGroup: g + 10, WaitSeq: 1, Missing: all}}
		if g == 1 {
			a.WaitGroup, a.Missing = 12, SetOf(999)
		}
		asked = append(asked, a)
	}
	begin := time.Now()
	if ring := findRing(asked); ring != nil {
		t.Error("there is no ring")
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("took %v", d)
	}
}

func TestBallots(t *testing.T) {
	a, b := Ballot{ballotBase(5) + 1, 3}, Ballot{ballotBase(5) + 1, 4}
	if !a.Less(b) || b.Less(a) || a.Less(a) || !b.Less(Ballot{ballotBase(5) + 2, 0}) {
		t.Error("order")
	}
	for epoch, void := range map[uint64]bool{4: false, 5: false, 6: true, 7: true} {
		if a.Void(epoch) != void {
			t.Errorf("a ballot of epoch 5 in epoch %d: void %v", epoch, a.Void(epoch))
		}
	}
	last := Ballot{ballotBase(1<<20-1) + 7, 0} // where the numbers wrap
	if !last.Void(1<<20) || last.Void(1<<20-1) {
		t.Error("wrap")
	}
}

// fakeBoard has the records of others.
type fakeBoard map[ID]Record

func (b fakeBoard) Publish(Record)                 {}
func (b fakeBoard) Read(id ID) (r Record, ok bool) { r, ok = b[id]; return r, ok }

func find[T any](t *testing.T, es []Effect) (x T) {
	t.Helper()
	for _, e := range es {
		if s, ok := e.(Send); ok {
			if x, ok := s.Msg.(T); ok {
				return x
			}
		}
	}
	t.Fatalf("no %T in %+v", x, es)
	return x
}

func TestProxy(t *testing.T) {
	value := Value{Epoch: 2, Members: testView(0).Members}
	voted := Record{Epoch: 1, Promised: Ballot{4097, 3}, Accepted: Ballot{4097, 3}, Value: appendValue(nil, value)}
	higher := Record{Epoch: 1, Promised: Ballot{4200, 1}}
	later := Record{Epoch: 2, Promised: Ballot{8193, 1}}
	broken := voted
	broken.Value = []byte{1}
	ballot := Ballot{4099, 3}
	for name, c := range map[string]struct {
		board    fakeBoard
		promises bool // its promise counts for the dead
		accepted Ballot
		accepts  bool // its acceptance does
	}{
		"nobody voted":                      {fakeBoard{}, true, Ballot{}, true},
		"the dead one accepted":             {fakeBoard{{1, 1}: voted}, true, voted.Accepted, true},
		"a living one accepted":             {fakeBoard{{2, 1}: voted}, true, voted.Accepted, true},
		"another promised a higher ballot":  {fakeBoard{{2, 1}: higher}, true, Ballot{}, false},
		"another knows a later view":        {fakeBoard{{2, 1}: later}, false, Ballot{}, false},
		"a record that cannot be read":      {fakeBoard{{1, 1}: broken}, false, Ballot{}, true},
		"a vote of an earlier view is none": {fakeBoard{{1, 1}: {Epoch: 0, Promised: Ballot{9999, 1}}}, true, Ballot{}, true},
	} {
		m, _ := New(Config{Self: ID{0, 1}, View: testView(0, 0, 0, 1), Board: c.board}, ms)
		m.Step(2*ms, Received{From: ID{3, 1}, Msg: prepare{head: head{1}, Ballot: ballot}})
		es := m.Step(3*ms, Died{ID{1, 1}}) // the promise is sent again, for one more
		p := find[promise](t, es)
		if (len(p.Dead) == 1) != c.promises || p.Accepted != c.accepted || len(p.Gone) != 1 {
			t.Errorf("%s: promise %+v", name, p)
		}
		a := find[accepted](t, m.Step(4*ms, Received{From: ID{3, 1}, Msg: accept{head{1}, ballot, value}}))
		if (len(a.Dead) == 1) != c.accepts {
			t.Errorf("%s: accepted %+v", name, a)
		}
	}
}

func TestAcceptorRefuses(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 1, 2)
	b := Ballot{4099, 2}
	m.Step(2*ms, Received{From: ID{2, 1}, Msg: prepare{head: head{1}, Ballot: b}})
	low := Ballot{4098, 1}
	if n := find[nack](t, m.Step(3*ms, Received{From: ID{1, 1}, Msg: prepare{head: head{1}, Ballot: low}})); n.Promised != b {
		t.Errorf("%+v", n)
	}
	find[nack](t, m.Step(3*ms, Received{From: ID{1, 1}, Msg: accept{head{1}, low, Value{Epoch: 2}}}))
	for _, e := range m.Step(4*ms, Received{From: ID{1, 1}, Msg: prepare{head: head{1}, Ballot: Ballot{5000, 2}}}) {
		if s, ok := e.(Send); ok {
			t.Errorf("a ballot in another's name is answered: %+v", s)
		}
	}
}

func TestCreated(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 1, 2, 3)
	ms4 := m.view.Members
	m.Step(2*ms, Received{From: ID{1, 1}, Msg: commit{Value{Epoch: 2, Size: 4, Members: ms4[:3], Cuts: []Cut{{Group: 1, Seq: 4}}}}})
	m.Step(2*ms, Received{From: ID{1, 1}, Msg: commit{Value{Epoch: 3, Size: 4, Members: ms4[:2], Cuts: []Cut{{Group: 1, Seq: 5}}}}})
	for i, c := range []struct {
		slots   Set
		epoch   uint64
		version uint64
		active  Set
	}{
		{SetOf(0, 1), 1, 1, SetOf(0, 1)}, {SetOf(0, 3), 2, 2, SetOf(0)},
		// Lost a member since, without a cut: it is cut by the next change, like at those who knew it when the member was lost.
		{SetOf(0, 3), 1, 1, SetOf(0, 3)}, {SetOf(0, 2, 3), 1, 1, SetOf(0, 2, 3)},
	} {
		id := uint64(50 + i)
		m.Step(3*ms, Created{Group{ID: id, Slots: c.slots, Version: c.epoch}, c.epoch})
		if g, ok := m.Group(id); !ok || g.Version != c.version || g.Active != c.active || g.Cut != 0 {
			t.Errorf("%v since epoch %d: %+v", c.slots.Slots(), c.epoch, g)
		}
	}
	if g, _ := m.Group(1); g.Version != 3 || g.Cut != 5 {
		t.Errorf("%+v", g)
	}
	m.Step(4*ms, Dropped{50})
	if _, ok := m.Group(50); ok {
		t.Error("a dropped group is still there")
	}
}

func TestCreatedAfterThePromise(t *testing.T) { // it is closed before anything is decided in it
	m := testMachine(ID{0, 1}, 0, 1, 2)
	es := m.Step(2*ms, Received{From: ID{1, 1}, Msg: prepare{head: head{1}, Ballot: Ballot{4097, 1}, Suspects: []suspicion{{ID: ID{2, 1}, Kind: kLate}}}})
	c := es[slices.IndexFunc(es, func(e Effect) bool { _, ok := e.(Close); return ok })].(Close)
	m.Step(2*ms, Closed{Ballot: c.Ballot})
	for _, e := range m.Step(3*ms, Created{Group{ID: 7, Slots: SetOf(0, 2)}, 1}) {
		if c, ok := e.(Close); ok && slices.Equal(c.Groups, []uint64{1, 7}) {
			return
		}
	}
	t.Error("group 7 stays open")
}

// TestCreatedAfterANamedPromise: the change names the group alone, to cut it late, and none of its members.
func TestCreatedAfterANamedPromise(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 1, 2)
	m.Step(2*ms, Received{From: ID{1, 1}, Msg: prepare{head: head{1}, Ballot: Ballot{4097, 1}, Groups: []uint64{7}}})
	m.Step(2*ms, Closed{Ballot: Ballot{4097, 1}})
	for _, e := range m.Step(3*ms, Created{Group{ID: 7, Slots: SetOf(0, 2)}, 1}) {
		if c, ok := e.(Close); ok && slices.Contains(c.Groups, 7) {
			return
		}
	}
	t.Error("group 7 stays open")
}

func TestOrphan(t *testing.T) { // a group that nobody who promised knew is cut by the next change
	m := testMachine(ID{0, 1}, 0, 1, 2)
	m.Step(2*ms, Created{Group{ID: 7, Slots: SetOf(0, 2), Version: 1}, 1})
	es := m.Step(3*ms, Received{From: ID{1, 1}, Msg: commit{Value{Epoch: 2, Size: 3, Members: m.view.Members[:2], Cuts: []Cut{{Group: 1}}}}})
	if g, _ := m.Group(7); g.Version != 1 || g.Active != SetOf(0, 2) {
		t.Errorf("%+v", g)
	}
	if p := find[prepare](t, es); !slices.Contains(p.Groups, 7) || len(p.Suspects) != 0 {
		t.Errorf("%+v", p)
	}
}

func TestOwnPauseAgesNobody(t *testing.T) { // a process that was stopped does not find others dead
	m := testMachine(ID{1, 1}, 0, 1, 2)
	m.Step(2*ms, Silent{ID{0, 1}})
	m.Step(2*ms, Silent{ID{2, 1}}) // alone, for two heartbeat limits: no quorum
	es := m.Step(10*time.Second, Tick{})
	if m.over {
		t.Fatalf("gives up at once after a pause: %+v", es)
	}
	at := 10 * time.Second
	for range 40 {
		at += 10 * ms
		es = m.Step(at, Tick{})
		if m.over {
			break
		}
	}
	if !m.over {
		t.Error("never gives up")
	}
	if n, ok := es[len(es)-1].(NoQuorum); !ok || !strings.Contains(n.Why, "2 of the 3 ranks of epoch 1 cannot be reached (0, 2)") {
		t.Errorf("%+v", es)
	}
}

func TestVouch(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 1, 1)
	es := m.Step(2*ms, Silent{ID{2, 1}})
	if a := find[ask](t, es); a.ID != (ID{2, 1}) {
		t.Errorf("%+v", a)
	}
	m.Step(3*ms, Received{From: ID{1, 1}, Msg: vouch{head{1}, ID{2, 1}, false}})
	if m.att != nil {
		t.Error("one that is vouched for is suspected")
	}
	m.Step(4*ms, Received{From: ID{1, 1}, Msg: vouch{head{1}, ID{2, 1}, true}})
	if m.att == nil || m.att.prep.Suspects[0].Kind != kDied {
		t.Error("one that is dead by its host's word is not suspected")
	}
	b := testMachine(ID{1, 1}, 0, 1, 1)
	if v := find[vouch](t, b.Step(2*ms, Received{From: ID{0, 1}, Msg: ask{head{1}, ID{2, 1}}})); v.Dead {
		t.Errorf("%+v", v)
	}
	b.Step(3*ms, Died{ID{2, 1}})
	if v := find[vouch](t, b.Step(4*ms, Received{From: ID{0, 1}, Msg: ask{head{1}, ID{2, 1}}})); !v.Dead {
		t.Errorf("%+v", v)
	}
}

func TestTooFarBehind(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 1, 2)
	for e := uint64(2); e < keepHistory+10; e++ {
		m.Step(Time(e)*ms, Received{From: ID{1, 1}, Msg: commit{Value{Epoch: e, Size: 3, Members: m.view.Members}}})
	}
	b := find[behind](t, m.Step(time.Second, Received{From: ID{2, 1}, Msg: hello{head{3}}}))
	old := testMachine(ID{2, 1}, 0, 1, 2)
	es := old.Step(2*ms, Received{From: ID{0, 1}, Msg: b})
	if _, ok := es[len(es)-1].(Evicted); !ok || !old.over {
		t.Errorf("%+v", es)
	}
	var n int
	for _, e := range m.Step(time.Second, Received{From: ID{2, 1}, Msg: hello{head{keepHistory + 5}}}) {
		if s, ok := e.(Send); ok && s.To == (ID{2, 1}) {
			n++
		}
	}
	if n != 4 {
		t.Errorf("%d commits for one who misses 4", n)
	}
}

func TestNewRefusesAStranger(t *testing.T) {
	m, es := New(Config{Self: ID{9, 1}, View: testView(0, 1)}, ms)
	if _, ok := es[0].(Evicted); !ok || m.Step(2*ms, Tick{}) != nil {
		t.Errorf("%+v", es)
	}
}

func TestLateIsInnocentOnceItArrives(t *testing.T) {
	m := testMachine(ID{0, 1}, 0, 0, 0)
	m.late = []suspicion{{ID: ID{2, 1}, Kind: kLate, Group: 1, Seq: 5}}
	m.att = &attempt{promises: []vote{{ID{2, 1}, promise{Groups: []held{{GroupDone: GroupDone{Group: 1, Issued: 4}}}}}}}
	if drop, _ := m.judge(); len(drop) != 1 {
		t.Error("it has not arrived and goes free")
	}
	m.att.promises[0].Groups[0].Issued = 5
	if drop, _ := m.judge(); len(drop) != 0 {
		t.Error("it has arrived and is dropped")
	}
}

func TestWordAboutOneThatHasNotStarted(t *testing.T) { // its host-mate knows what it was welcomed with
	v := testView(0, 0, 1)
	m, _ := New(Config{Self: ID{0, 1}, View: v, Groups: []Group{{ID: 1, Version: 1, Cut: 16}}}, ms)
	b := Ballot{4097, 2}
	m.Step(2*ms, Received{From: ID{2, 1}, Msg: prepare{head: head{1}, Ballot: b, Suspects: []suspicion{{ID: ID{2, 1}, Kind: kLeft}}}})
	p := find[promise](t, m.Step(2*ms, Closed{b, []GroupDone{{1, []Done{{0, 18}, {1, 0}}, 18}}}))
	if d := p.Groups[0].Done; d[0].Seq != 18 || d[1].Seq != 16 {
		t.Errorf("%+v", d)
	}
}

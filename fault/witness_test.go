package fault

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// newHalves is a lab of two hosts with two ranks each, and a witness.
func newHalves(t *testing.T) *lab {
	t.Helper()
	l := newLabIn(t, []int{0, 0, 1, 1}, func(w *world) { w.witness = &simWitness{held: FirstVote(), cut: map[int]bool{}} })
	return l
}

func (l *lab) cutHosts() {
	l.w.cut(func(p, q *proc) bool { return p.host != q.host }, 10*time.Second)
}

// bound is what the loser may take: the silence, and what a quorum is waited for.
const bound = simHL*3/2 + 10*ms

// wantHalf wants these to go on, and the others to have no quorum.
func (l *lab) wantHalf(epoch uint64, members string, lost ...int) {
	l.Helper()
	for _, s := range lost {
		l.wantEnd(l.rank(s), "no quorum")
	}
	l.wantView(epoch, members)
	l.goOn()
}

func TestOneOfTwoHalves(t *testing.T) {
	for seed := range 40 {
		l := newHalves(t)
		for range seed {
			l.w.rng.Uint64()
		}
		l.cutHosts()
		l.run(bound)
		on := 0
		if l.rank(0).dead {
			on = 2
		}
		l.wantHalf(2, fmt.Sprintf("%d %d", on, on+1), 2-on, 3-on)
	}
}

func TestTheHalfThatReachesTheWitness(t *testing.T) {
	for host := range 2 {
		l := newHalves(t)
		l.w.witness.cut[host] = true
		l.cutHosts()
		l.run(bound)
		on := 2 - 2*host
		l.wantEnd(l.rank(2-on), "this half needs the vote of the witness, and did not get it in 37.5ms (")
		l.wantHalf(2, fmt.Sprintf("%d %d", on, on+1), 2-on, 3-on)
	}
}

func TestTheLowestHalfIsLost(t *testing.T) { // for good, with its host: nobody can prove it
	l := newHalves(t)
	l.kill(0, 1)
	l.run(simHL + 20*ms)
	l.wantHalf(2, "2 3")
	l = newLab(t, []int{0, 0, 1, 1}) // and without a witness
	l.kill(0, 1)
	l.run(bound)
	l.wantEnd(l.rank(2), "2 of the 4 ranks of epoch 1 cannot be reached (0, 1): of two halves the one with the lowest rank (0) goes on")
	l.wantEnd(l.rank(3), "with a witness either half can go on")
}

func TestWitnessDoesNotAnswer(t *testing.T) {
	for name, trouble := range map[string]func(*world){
		"it is down":         func(w *world) { w.witness.down = true },
		"it has no record":   func(w *world) { w.witness.held = nil },
		"cannot be read":     func(w *world) { w.witness.held = []byte{99} },
		"no way to it":       func(w *world) { w.witness.cut = map[int]bool{0: true, 1: true} },
		"no answer":          func(w *world) { w.witness.slow = time.Second },
		"voted in epoch 900": func(w *world) { w.witness.held = register{Epoch: 900}.encode() },
	} {
		t.Run(name, func(t *testing.T) {
			l := newHalves(t)
			trouble(l.w)
			held := l.w.witness.held
			l.cutHosts()
			l.run(bound)
			for s := range 4 {
				l.wantEnd(l.rank(s), "no quorum: 2 of the 4 ranks of epoch 1 cannot be reached")
				l.wantEnd(l.rank(s), "if the others are lost for good, start again from what was saved")
				l.wantEnd(l.rank(s), name)
			}
			if !slices.Equal(held, l.w.witness.held) {
				t.Errorf("it holds %s", registerText(l.w.witness.held))
			}
		})
	}
}

func TestMajorityNeedsNoWitness(t *testing.T) {
	l := newLabIn(t, []int{0, 0, 1, 1, 2, 2}, func(w *world) { w.witness = &simWitness{down: true} })
	l.w.cut(func(p, q *proc) bool { return p.host != q.host && (p.host == 2 || q.host == 2) }, 10*time.Second)
	l.run(bound)
	l.wantEnd(l.rank(4), "no quorum: 4 of the 6 ranks")
	l.wantHalf(2, "0 1 2 3", 4, 5)
	l.kill(3)
	l.run(30 * ms)
	l.wantView(3, "0 1 2")
	if l.w.witness.asked > 0 {
		t.Errorf("the witness was asked %d times", l.w.witness.asked)
	}
}

func TestDeadOfOurHostNeedNoWitness(t *testing.T) { // a living process of the host votes for them
	l := newLabIn(t, []int{0, 0, 0, 0}, func(w *world) { w.witness = &simWitness{down: true} })
	l.kill(0, 1)
	l.run(30 * ms)
	l.wantHalf(l.rank(2).m.View().Epoch, "2 3")
}

// TestDiesWithTheVote kills whoever coordinates a half at each of its steps, with the vote of the witness and without: the
// other of its half ends what it began, and the halves never both go on.
func TestDiesWithTheVote(t *testing.T) {
	for name, is := range map[string]func(Effect) bool{
		"asks":    func(e Effect) bool { _, ok := e.(AskWitness); return ok },
		"accept":  func(e Effect) bool { s, ok := e.(Send); _, is := s.Msg.(accept); return ok && is },
		"commit":  func(e Effect) bool { s, ok := e.(Send); _, is := s.Msg.(commit); return ok && is },
		"install": func(e Effect) bool { _, ok := e.(Install); return ok },
	} {
		for _, slot := range []int{0, 2} {
			for nth := range 3 {
				for _, after := range []bool{false, true} {
					t.Run(fmt.Sprintf("rank %d %s %d after %v", slot, name, nth+1, after), func(t *testing.T) {
						l := newHalves(t)
						l.w.witness.cut[1-slot/2] = true // this half has it to itself at first
						n, hit := 0, false
						l.w.before = func(p *proc, e Effect) bool {
							if p.id.Slot != slot || !is(e) || hit {
								return false
							}
							if n++; n <= nth {
								return false
							}
							hit = true
							if after {
								l.w.at(0, p.crash)
							}
							return !after
						}
						l.w.at(simHL+30*ms, func() { clear(l.w.witness.cut) })
						l.cutHosts()
						l.run(4 * simHL)
						if !hit {
							l.wantHalf(2, fmt.Sprintf("%d %d", slot, slot+1), 2-slot, 3-slot)
							return
						}
						mate := l.rank(slot + 1)
						if mate.dead {
							t.Fatalf("rank %d does not go on: %s", slot+1, mate.ended)
						}
						l.wantHalf(mate.m.View().Epoch, fmt.Sprint(slot+1), slot^2, slot^3)
					})
				}
			}
		}
	}
}

// TestHalfDiesWithTheVote: nobody of the half that has the vote is left. If the witness has accepted its value, that may
// have been chosen, and the other half must not go on with another.
func TestHalfDiesWithTheVote(t *testing.T) {
	for name, c := range map[string]struct {
		is func(register) bool
		on bool
	}{
		"before it":          {func(register) bool { return true }, true},
		"with a promise":     {func(r register) bool { return r.Promised.Slot == 0 && r.Promised.Num > 0 }, true},
		"with an acceptance": {func(r register) bool { return r.Accepted.Slot == 0 && r.Accepted.Num > 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newHalves(t)
			l.w.witness.cut[1] = true
			var wait func()
			wait = func() {
				if r, _ := parseRegister(l.w.witness.held); !c.is(r) {
					l.w.at(ms/100, wait)
					return
				}
				l.kill(0, 1)
				clear(l.w.witness.cut)
			}
			wait()
			l.cutHosts()
			l.run(3 * simHL)
			if c.on {
				l.wantHalf(2, "2 3")
				return
			}
			for _, s := range []int{2, 3} {
				l.wantEnd(l.rank(s), "no quorum: the witness gave its vote for epoch 2 to ranks [0 1], which cannot be reached")
			}
		})
	}
}

// TestVoteOfALaterEpochStays: a half that was stopped for two epochs finds a later vote, and takes none.
func TestVoteOfALaterEpochStays(t *testing.T) {
	l := newLabIn(t, []int{0, 1, 2, 2}, func(w *world) { w.witness = &simWitness{held: FirstVote(), cut: map[int]bool{}} })
	for _, s := range []int{2, 3} {
		l.w.pause(l.rank(s), 4*simHL)
	}
	l.w.cut(func(p, q *proc) bool { return (p.host == 2) != (q.host == 2) }, 10*time.Second)
	l.run(bound)
	l.rank(1).crash()
	l.run(bound)
	if v := l.rank(0).m.View(); v.Epoch != 3 || len(v.Members) != 1 {
		t.Fatalf("rank 0 does not go on: %+v", v)
	}
	held := l.w.witness.held
	l.run(4 * simHL)
	l.wantEnd(l.rank(2), "it has voted in epoch 2: the others have gone on")
	l.wantHalf(3, "0", 2, 3)
	if !slices.Equal(held, l.w.witness.held) {
		t.Errorf("it holds %s", registerText(l.w.witness.held))
	}
}

func TestQuorumsWithAWitnessMeet(t *testing.T) {
	for n := 1; n <= 7; n++ {
		m := testMachine(ID{0, 1}, make([]uint64, n)...)
		m.cfg.Witness = true
		for a := range 1 << (n + 1) { // the last bit is the witness
			for b := range 1 << (n + 1) {
				set := func(x int) (s Set) {
					for i := range n {
						if x>>i&1 != 0 {
							s.Add(i)
						}
					}
					return s
				}
				if a&b == 0 && m.enough(set(a), a>>n != 0) && m.enough(set(b), b>>n != 0) {
					t.Fatalf("of %d: %b and %b", n, a, b)
				}
			}
		}
		all := SetOf(upTo(n / 2)...)
		if got := m.enough(all, true); got != (n%2 == 0) {
			t.Errorf("%d of %d and the witness: %v", n/2, n, got)
		}
	}
}

func TestRegister(t *testing.T) {
	v := sampleValue()
	full := register{Epoch: v.Epoch - 1, Promised: Ballot{40000, 9}, Accepted: Ballot{39999, 3}, Value: v}
	for _, r := range []register{{}, {Epoch: 7, Promised: Ballot{4, 2}}, full} {
		b := r.encode()
		got, err := parseRegister(b)
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%v: %+v, want %+v", err, got, r)
		}
		for i := range b {
			if x, err := parseRegister(b[:i]); err == nil {
				t.Fatalf("%d of %d bytes are read as %+v", i, len(b), x)
			}
		}
		if _, err := parseRegister(append(slices.Clone(b), 0)); err == nil {
			t.Error("a byte too many")
		}
		b[0]++
		if _, err := parseRegister(b); err == nil {
			t.Error("another version is read")
		}
	}
	other := full
	other.Epoch++
	if _, err := parseRegister(other.encode()); err == nil || !strings.Contains(err.Error(), "another epoch") {
		t.Errorf("a value of another epoch: %v", err)
	}
	if r := full.in(full.Epoch); !reflect.DeepEqual(r, full) {
		t.Errorf("%+v", r)
	}
	if r := full.in(full.Epoch + 1); !reflect.DeepEqual(r, register{Epoch: full.Epoch + 1}) {
		t.Errorf("what an earlier epoch voted counts in a later one: %+v", r)
	}
}

// FuzzWitnessed gives a coordinator that needs the witness any answer: it must not panic, and must ask for nothing that
// goes back.
func FuzzWitnessed(f *testing.F) {
	v := Value{Epoch: 2, Size: 2, Members: testView(0, 0).Members}
	for _, r := range []register{{}, {Epoch: 1, Promised: Ballot{4097, 1}}, {Epoch: 1, Promised: Ballot{4099, 1}, Accepted: Ballot{4097, 1}, Value: v}} {
		f.Add(r.encode())
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, _ := New(Config{Self: ID{0, 1}, View: testView(0, 1), HeartbeatLimit: simHL, BallotTimeout: simBT, Witness: true}, ms)
		es := m.Step(2*ms, Silent{ID{1, 1}})
		for i := range 20 {
			for k := 0; k < len(es); k++ {
				switch e := es[k].(type) {
				case Close:
					es = append(es, m.Step(m.last, Closed{Ballot: e.Ballot, Groups: []GroupDone{{Group: 1, Done: []Done{{0, 3}}}}})...)
				case AskWitness:
					if r, err := parseRegister(b); err == nil && slices.Equal(e.Old, b) {
						n, err := parseRegister(e.New)
						if err != nil || n.Epoch < r.Epoch || n.Epoch == r.Epoch && (n.Promised.Less(r.Promised) || n.Accepted.Less(r.Accepted)) {
							t.Fatalf("%v: from %s to %s", err, registerText(e.Old), registerText(e.New))
						}
					}
					es = append(es, m.Step(m.last, Witnessed{Held: b})...)
				}
				if len(es) > 2000 {
					t.Fatal("it does not come to rest")
				}
			}
			es = m.Step(Time(i+3)*5*ms, Tick{})
		}
	})
}

package fault

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

func sampleMembers() []Member {
	return []Member{
		{ID: ID{0, 1}, Nonce: Nonce{1, 2, 3}, Host: 7, Addr: []byte("tcp:10.0.0.1:4711")},
		{ID: ID{3, 2}, Nonce: Nonce{9}, Host: 1 << 63},
		{ID: ID{MaxSlots - 1, 1<<32 - 1}, Host: 8},
	}
}

func sampleValue() Value {
	return Value{Epoch: 9, Members: sampleMembers(), Size: 5, At: 17, Why: "rank 1 died",
		Cuts: []Cut{{1, 40, "", SetOf(0, 1, 2, 3)}, {1 << 63, 0, "deadlock", SetOf(MaxSlots - 1)}}}
}

func sampleView() View {
	return View{Epoch: 8, Size: 5, Capacity: 64, Members: sampleMembers(), Incs: []uint32{1, 0, 0, 2}}
}

func sampleReports() []report {
	return []report{{From: ID{1, 1}, N: 3, Silent: SetOf(2, 70)}, {From: ID{3, 2}, N: 1,
		Suspects: []suspicion{{ID{2, 1}, kLate, 5, 6, "late"}}, Fails: []failing{{5, "no"}, {6, ""}}}}
}

func samples() []Msg {
	h := head{8}
	b, c := Ballot{32769, 3}, Ballot{32770, 1023}
	return []Msg{
		hello{h}, behind{h, 3, "too far"},
		prepare{h, b, []suspicion{{ID{2, 1}, kDied, 0, 0, "died"}}, []uint64{1, 100}, 3, 17, sampleMembers()},
		promise{h, b, c, sampleValue(), []held{{GroupDone{1, []Done{{0, 4}, {1, 5}}, 6}, SetOf(0, 1), 2}}, []ID{{1, 1}}, []ID{{1, 1}, {2, 1}}, sampleReports()},
		promise{head: h, Ballot: b},
		nack{h, b, c}, accept{h, b, sampleValue()}, accepted{h, b, []ID{{4, 4}}}, patience{h, b}, commit{sampleValue()},
		suspect{h, sampleReports()}, ask{h, ID{1, 2}}, vouch{h, ID{1, 2}, true},
		askStatus{h, 1, 2, 3}, status{h, 1, 2, 3, 4, 5, 6, SetOf(0, 1000), true, true},
		joinFwd{h, sampleMembers()[0]}, growAsk{h, 1}, growCount{h, 1, 2}, growAt{h, 1, 2}, growReady{h, 1, 2}, growNo{h, 1}, growOff{h, 1}, noQuorum{h, "alone"},
		Join{Member{ID: ID{Slot: -1}, Nonce: Nonce{5}, Host: 3, Addr: []byte{0}}, 8},
		Welcome{ID{3, 2}, sampleView(), []Group{{ID: 1, Slots: SetOf(0, 3), Active: SetOf(3), Version: 9, Cut: 40, Failed: "x"}}, 17, []byte("step 5"), SetOf(3, 5), sampleValue()},
		Refused{"full"}, Stale{sampleView()},
	}
}

func TestCodec(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range samples() {
		seen[reflect.TypeOf(m).Name()] = true
		b := AppendMsg([]byte("before"), m)
		if !bytes.HasPrefix(b, []byte("before")) {
			t.Fatalf("%T: what was in the slice is gone", m)
		}
		b = b[len("before"):]
		got, err := ParseMsg(b)
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%T: %v\n got %+v\nwant %+v", m, err, got, m)
		}
		for i := range b { // cut short anywhere
			if x, err := ParseMsg(b[:i]); err == nil {
				t.Fatalf("%T: %d of %d bytes parse as %+v", m, i, len(b), x)
			}
		}
		if _, err := ParseMsg(append(bytes.Clone(b), 0)); err == nil {
			t.Errorf("%T: a byte too many", m)
		}
	}
	if len(seen) != len(shapes) {
		t.Errorf("samples of %d types, there are %d", len(seen), len(shapes))
	}
}

// TestWire holds the layout: a change of it is a new version.
func TestWire(t *testing.T) {
	for _, c := range []struct {
		m    Msg
		want string
	}{
		{accepted{head{300}, Ballot{5, 2}, []ID{{0, 1}, {7, 2}}}, "01 07 ac02 05 02 02 0101 0802"},
		{Join{Member{ID: ID{Slot: -1}, Host: 3, Addr: []byte("a")}, 8}, "01 16 0000 00000000000000000000000000000000 03 0161 08"},
		{Refused{"no"}, "01 18 02 6e6f"},
	} {
		if got := hex.EncodeToString(AppendMsg(nil, c.m)); got != strings.ReplaceAll(c.want, " ", "") {
			t.Errorf("%T: %s, want %s", c.m, got, c.want)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	long := AppendMsg(nil, Refused{strings.Repeat("x", 2*maxText)})
	if m, err := ParseMsg(long); err != nil || len(m.(Refused).Reason) != maxText {
		t.Errorf("a sentence that is too long is clipped: %v", err)
	}
	for name, b := range map[string][]byte{
		"another version":       {2, 1, 0},
		"an unknown type":       {1, 200, 0},
		"type 0":                {1, 0, 0},
		"a slot out of range":   append([]byte{1, 11, 8}, 0xff, 0xff, 0x03, 1),
		"a list without items":  {1, 7, 8, 1, 1, 0xff, 0x07},
		"a set with 17 words":   append([]byte{1, 14, 8, 1, 2, 3, 4, 5, 6, 17}, make([]byte, 200)...),
		"a set that ends in 0":  append([]byte{1, 14, 8, 1, 2, 3, 4, 5, 6, 1}, make([]byte, 9)...),
		"a bool of 2":           {1, 12, 8, 1, 1, 2},
		"members out of order":  AppendMsg(nil, Stale{View{Members: []Member{{ID: ID{2, 1}}, {ID: ID{1, 1}}}}}),
		"a member in two slots": AppendMsg(nil, Stale{View{Members: []Member{{ID: ID{2, 1}}, {ID: ID{2, 2}}}}}),
		"a capacity of 1025":    {1, 25, 1, 1, 0x81, 0x08, 0, 0},
	} {
		if m, err := ParseMsg(b); err == nil {
			t.Errorf("%s: parses as %+v", name, m)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, m := range samples() {
		f.Add(AppendMsg(nil, m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMsg(b)
		if err != nil {
			return
		}
		c := AppendMsg(nil, m)
		n, err := ParseMsg(c)
		if err != nil || !reflect.DeepEqual(m, n) {
			t.Fatalf("%T is another after a second parse: %v", m, err)
		}
	})
}

// FuzzStep gives a machine any message from anybody: it must not panic, and must answer in bounded space.
func FuzzStep(f *testing.F) {
	for _, m := range samples() {
		f.Add(AppendMsg(nil, m), uint8(1))
	}
	f.Fuzz(func(t *testing.T, b []byte, from uint8) {
		m, err := ParseMsg(b)
		if err != nil {
			return
		}
		x := testMachine(ID{0, 1}, 0, 0, 1, 1)
		for i := range 4 {
			es := x.Step(Time(i+2)*ms, Received{From: ID{int(from % 5), uint32(from%2) + 1}, Nonce: Nonce{from}, Msg: m})
			for _, e := range es {
				if c, ok := e.(Close); ok {
					x.Step(Time(i+2)*ms, Closed{Ballot: c.Ballot})
				}
			}
			x.Step(Time(i+1)*time100, Tick{})
		}
	})
}

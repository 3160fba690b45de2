package faulty

import (
	"errors"
	"flag"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/devicetest"
	"github.com/serry-project/serry/device/sim"
	"github.com/serry-project/serry/internal/wire"
)

const ms = time.Millisecond

// A link with rules that keep a link's promises passes the suite like one without any.
func TestConformance(t *testing.T) {
	for i, test := range []struct {
		text string
		real bool
	}{
		{"", false},
		{"(delay 3ms)", false},
		{"(delay 2ms (every 3)) (delay 1ms recv (chance 0.1))", false},
		{"(delay 3ms recv)", false},
		{"(delay 200us (every 3)) (delay 100us recv (chance 0.1))", true},
		{"(drop (group 1) (group 2)) (corrupt recv (nth 0))", false},
	} {
		if testing.Short() && i%2 == 1 {
			continue
		}
		t.Run(test.text, func(t *testing.T) { conformance(t, test.text, test.real) })
	}
}

func conformance(t *testing.T, text string, real bool) {
	script := MustParse(text)
	devicetest.Run(t, func(t *testing.T) devicetest.Pair {
		n := sim.New(3)
		a, b := n.Pair(0, 1, sim.Params{Latency: 100 * time.Microsecond, Bandwidth: 1e9})
		o := Options{Now: n.Now}
		step := func() { n.Advance(n.Now() + ms/2) }
		if real {
			o.Now = nil
			start, nap := time.Now(), devicetest.Nap()
			step = func() {
				nap()
				n.Advance(time.Since(start))
			}
		}
		return devicetest.Pair{
			A: script.Wrap(a, o), B: script.Wrap(b, o), NameA: "node 0", NameB: "node 1", Caps: device.Caps{Name: "sim"},
			Step: step, Cut: func() { n.Cut(0, 1) }, Gone: func() { n.Crash(0) },
		}
	})
}

// world is a wrapped link and its plain other end.
type world struct {
	t    *testing.T
	net  *sim.Network
	link *Link
	peer *sim.Link
}

func wrap(t *testing.T, text string) *world {
	t.Helper()
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, net: sim.New(1)}
	var inner *sim.Link
	inner, w.peer = w.net.Pair(0, 1, sim.Params{})
	w.link = s.Wrap(inner, Options{Now: w.net.Now, Seed: 1})
	return w
}

func frame(kind wire.Kind, seq uint64, payload string) *device.Frame {
	n := len(payload)
	return &device.Frame{
		Header:  wire.Header{Kind: kind, Seq: seq, To: uint16(seq % 4), Group: seq / 10, Length: uint32(n), Total: uint64(n)},
		Payload: []byte(payload),
	}
}

// sends sends data frames from..to and returns the sequences refused, and the last other error.
func (w *world) sends(l device.Link, from, to uint64) (refused []uint64, last error) {
	for seq := from; seq <= to; seq++ {
		switch err := l.Send(frame(wire.KindData, seq, "payload")); {
		case errors.Is(err, device.ErrFull):
			refused = append(refused, seq)
		case err != nil:
			last = err
		}
	}
	return refused, last
}

// gets is what an end has at time at.
func (w *world) gets(l device.Link, at time.Duration) (seqs []uint64, err error) {
	w.net.Advance(at)
	n, err := l.Poll(func(f *device.Frame) { seqs = append(seqs, f.Seq) })
	if n != len(seqs) {
		w.t.Fatalf("Poll returned %d and delivered %d", n, len(seqs))
	}
	return seqs, err
}

func list(from, to uint64, without ...uint64) (seqs []uint64) {
next:
	for s := from; s <= to; s++ {
		for _, x := range without {
			if s == x {
				continue next
			}
		}
		seqs = append(seqs, s)
	}
	return seqs
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func TestDrop(t *testing.T) {
	for _, test := range []struct {
		rule string
		gone []uint64
	}{
		{"", nil},
		{"(drop (nth 3))", []uint64{3}},
		{"(drop (kind data) (nth 3))", []uint64{3}},
		{"(drop (kind control) (nth 3))", nil},
		{"(drop (kind 0x20 control) (nth 3))", []uint64{3}},
		{"(drop (to 2) (nth 2))", []uint64{6}},
		{"(drop (nth 2) (to 2))", []uint64{2}},
		{"(drop (every 7))", []uint64{7, 14}},
		{"(drop (seq 4..6))", []uint64{4, 5, 6}},
		{"(drop (seq ..2))", []uint64{1, 2}},
		{"(drop (seq 19..))", []uint64{19, 20}},
		{"(drop (group 1) (not (seq 12..)))", []uint64{10, 11}},
		{"(drop (or (seq 3) (and (seq 5..9) (to 0))))", []uint64{3, 8}},
		{"(drop (or))", nil},
		{"(drop (seq 5)) (drop (nth 5))", []uint64{5, 6}}, // the second does not see what the first took
		{"(drop (size 7) (total 7) (offset 0) (slot 0) (inc 0) (toinc 0) (tag 0) (op 0) (phase 0) (flags 0) (version 0) (completed 0) (nth 1))", []uint64{1}},
		{"(drop recv (nth 1))", nil},
		{"(drop (chance 0))", nil},
		{"(drop (chance 1) (nth ..2))", []uint64{1, 2}},
	} {
		w := wrap(t, test.rule)
		if refused, err := w.sends(w.link, 1, 20); refused != nil || err != nil {
			t.Fatalf("%s: refused %v, %v", test.rule, refused, err)
		}
		got, err := w.gets(w.peer, 0)
		equal(t, test.rule, got, list(1, 20, test.gone...))
		equal(t, test.rule, err, nil)
	}
}

func TestChance(t *testing.T) {
	w := wrap(t, "(drop (chance 0.25))")
	w.sends(w.link, 1, 4000)
	got, _ := w.gets(w.peer, 0)
	if len(got) < 2900 || len(got) > 3100 {
		t.Errorf("%d of 4000 frames are left by a chance of 0.25", len(got))
	}
	equal(t, "Fired", w.link.Fired(), []uint64{4000 - uint64(len(got))})
}

func TestRecv(t *testing.T) {
	w := wrap(t, "(drop recv (nth 2)) (corrupt recv (seq 5)) (delay 10ms recv (seq 7)) (drop (seq 1))")
	w.sends(w.peer, 1, 9)
	got, err := w.gets(w.link, ms)
	equal(t, "before the delay", got, []uint64{1, 3, 4, 5, 6})
	equal(t, "error", err, nil)
	if fd, _ := w.link.Fd(); fd != -1 {
		t.Errorf("Fd is %d while frames are held back", fd)
	}
	got, _ = w.gets(w.link, 5*ms)
	equal(t, "during the delay", got, []uint64(nil))
	w.sends(w.peer, 10, 10)
	got, _ = w.gets(w.link, 11*ms)
	equal(t, "after the delay", got, []uint64{7, 8, 9, 10})
	equal(t, "Fired", w.link.Fired(), []uint64{1, 1, 1, 0})
}

// What was held back is delivered before the loss is reported.
func TestRecvDelayThenLost(t *testing.T) {
	w := wrap(t, "(delay 10ms recv)")
	w.sends(w.peer, 1, 2)
	w.peer.Close()
	got, err := w.gets(w.link, ms)
	equal(t, "held", got, []uint64(nil))
	equal(t, "error while frames are held", err, nil)
	got, err = w.gets(w.link, 20*ms)
	equal(t, "after", got, []uint64{1, 2})
	if !errors.Is(err, device.ErrLost) {
		t.Fatalf("error %v, want ErrLost", err)
	}
}

func TestDelay(t *testing.T) {
	w := wrap(t, "(delay 5ms (seq 3))")
	w.sends(w.link, 1, 5)
	step := func(at time.Duration, want ...uint64) {
		t.Helper()
		w.net.Advance(at)
		if _, err := w.gets(w.link, at); err != nil {
			t.Fatal(err)
		}
		got, _ := w.gets(w.peer, at)
		equal(t, at.String(), got, want)
	}
	step(ms, 1, 2)
	w.sends(w.link, 6, 6)
	step(4 * ms)
	step(5*ms, 3, 4, 5, 6)
	w.sends(w.link, 7, 7)
	step(6*ms, 7)
}

// A delayed frame leaves without Poll where time is real.
func TestDelayRealTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := sim.New(1)
		a, b := n.Pair(0, 1, sim.Params{})
		stop := make(chan struct{})
		go n.Drive(stop)
		defer close(stop)
		l := MustParse("(delay 1h)").Wrap(a, Options{})
		begin := time.Now()
		if err := l.Send(frame(wire.KindData, 1, "x")); err != nil {
			t.Fatal(err)
		}
		<-b.Ready()
		equal(t, "delay", time.Since(begin), time.Hour)
		l.Send(frame(wire.KindData, 1, "x"))
		l.Close() // the timer too
	})
}

func TestDelayBacklog(t *testing.T) {
	w := wrap(t, "(delay 1s)")
	f := frame(wire.KindData, 1, strings.Repeat("x", 100<<10))
	sent := 0
	for ; sent < 1000; sent++ {
		if err := w.link.Send(f); err != nil {
			equal(t, "error", err, device.ErrFull)
			break
		}
	}
	if sent < 80 || sent > 90 {
		t.Errorf("ErrFull after %d frames of 100 KiB", sent)
	}
	equal(t, "control", w.link.Send(frame(wire.KindControl, 1, "")), nil)
	w.net.Advance(time.Second)
	w.link.Poll(nil)
	got, _ := w.gets(w.peer, 2*time.Second)
	equal(t, "frames", len(got), sent+1)
}

func TestCorrupt(t *testing.T) {
	w := wrap(t, "(corrupt (seq 2..3))")
	sent := []string{"hello", "hello", ""}
	for i, payload := range sent {
		f := frame(wire.KindData, uint64(i+1), payload)
		if err := w.link.Send(f); err != nil {
			t.Fatal(err)
		}
		equal(t, "the sender's payload", string(f.Payload), payload)
		equal(t, "the sender's header", f.Seq, uint64(i+1))
	}
	var seqs []uint64
	var payloads []string
	w.net.Advance(0)
	w.peer.Poll(func(f *device.Frame) {
		seqs = append(seqs, f.Seq)
		payloads = append(payloads, string(f.Payload))
	})
	equal(t, "sequences", seqs, []uint64{1, 2, 2}) // 3 has no payload: its sequence is hit
	equal(t, "the first", payloads[0], "hello")
	diff := 0
	for i := range 5 {
		for x := payloads[1][i] ^ "hello"[i]; x > 0; x &= x - 1 {
			diff++
		}
	}
	equal(t, "bits flipped", diff, 1)
}

func TestClose(t *testing.T) {
	w := wrap(t, "(close (seq 4))")
	_, err := w.sends(w.link, 1, 6)
	check := func(err error) {
		t.Helper()
		if !errors.Is(err, device.ErrLost) || !strings.Contains(err.Error(), "node 1") || !strings.Contains(err.Error(), "(close (seq 4))") {
			t.Fatalf("error %v, want ErrLost that names peer and rule", err)
		}
	}
	check(err)
	if fd, _ := w.link.Fd(); fd != -1 {
		t.Errorf("Fd is %d", fd)
	}
	_, err = w.gets(w.link, 0)
	check(err)
	check(w.link.Send(frame(wire.KindControl, 1, "")))
	got, err := w.gets(w.peer, ms)
	equal(t, "what was before", got, []uint64{1, 2, 3})
	if !errors.Is(err, device.ErrLost) {
		t.Fatalf("the peer's error is %v, want ErrLost", err)
	}
	w.link.Close()
	if _, err := w.link.Poll(nil); !errors.Is(err, device.ErrClosed) {
		t.Fatalf("after Close: %v, want ErrClosed", err)
	}

	w = wrap(t, "(close recv (nth 3))")
	w.sends(w.peer, 1, 6)
	got, err = w.gets(w.link, 0)
	equal(t, "before the end", got, []uint64{1, 2})
	if !errors.Is(err, device.ErrLost) {
		t.Fatalf("error %v, want ErrLost", err)
	}
	if _, err = w.gets(w.peer, ms); !errors.Is(err, device.ErrLost) {
		t.Fatalf("the peer's error is %v, want ErrLost", err)
	}
}

func TestFull(t *testing.T) {
	w := wrap(t, "(full (nth 2..3))")
	for range 3 {
		equal(t, "control", w.link.Send(frame(wire.KindControl, 0, "")), nil)
	}
	refused, err := w.sends(w.link, 1, 5)
	equal(t, "refused", refused, []uint64{2, 3})
	equal(t, "error", err, nil)
	got, _ := w.gets(w.peer, 0)
	equal(t, "arrived", got, []uint64{0, 0, 0, 1, 4, 5})
}

// A frame that the link itself refuses is not counted before it is accepted.
func TestRefusedIsNotCounted(t *testing.T) {
	n := sim.New(1)
	a, b := n.Pair(0, 1, sim.Params{Backlog: 1})
	l := MustParse("(drop (nth 4)) (corrupt (seq 2))").Wrap(a, Options{Now: n.Now})
	var got []uint64
	for seq := uint64(1); seq <= 6; {
		if l.Send(frame(wire.KindData, seq, "x")) == nil {
			seq++
			continue
		}
		if l.Send(frame(wire.KindData, seq, "x")) == nil {
			t.Fatal("room without Poll")
		}
		n.Advance(n.Now())
		b.Poll(func(f *device.Frame) { got = append(got, f.Seq) })
	}
	n.Advance(n.Now())
	b.Poll(func(f *device.Frame) { got = append(got, f.Seq) })
	equal(t, "arrived", got, []uint64{1, 2, 3, 5, 6})
	equal(t, "Fired", l.Fired(), []uint64{1, 1})
}

func TestPlain(t *testing.T) {
	a, _ := sim.New(1).Pair(0, 1, sim.Params{})
	var none *Script
	l := none.Wrap(a, Options{})
	if l.Unwrap() != device.Link(a) || l.Fired() != nil || none.String() != "" {
		t.Error("a link without rules is not plain")
	}
}

func TestParseErrors(t *testing.T) {
	deep := strings.Repeat("(and ", 60) + strings.Repeat(")", 60)
	for _, test := range [][2]string{
		{"drop", `byte 0 of "drop": found "drop", want a rule`},
		{"(", "found the end, want an action: drop, delay"},
		{"(explode)", `byte 1 of "(explode)": found "explode", want an action`},
		{"(delay)", `found ")", want a duration`},
		{"(delay -5ms)", "not negative"},
		{"(full recv)", "cannot be refused"},
		{"(drop", "found the end, want a predicate"},
		{"(drop nth 3)", `byte 6 of "(drop nth 3)": found "nth", want a predicate in parentheses`},
		{"(drop (nth 3)", "found the end, want a predicate"},
		{"(drop (nth))", `found ")", want a number`},
		{"(drop (nth 3 4))", `found "4", want )`},
		{"(drop (every 0))", "want a number from 1"},
		{"(drop (seq 5..4))", "holds nothing"},
		{"(drop (seq ..))", "on one side"},
		{"(drop (seq 1..x))", `want a number`},
		{"(drop (kind))", "want a kind: control"},
		{"(drop (kind dat))", `found "dat", want a kind: control, agent, data`},
		{"(drop (kind 256))", "want a kind"},
		{"(drop (chance 1.5))", "fraction from 0 to 1"},
		{"(drop (chance NaN))", "fraction from 0 to 1"},
		{"(drop (not))", "not takes one predicate, found 0"},
		{"(drop (colour red))", `byte 7 of "(drop (colour red))": found "colour", want a predicate: kind, nth`},
		{"(drop))", `found ")", want a rule`},
		{"(drop " + deep + ")", "nest deeper"},
	} {
		_, err := Parse(test[0])
		if err == nil || !strings.Contains(err.Error(), test[1]) {
			t.Errorf("%s: error %v, want one with %q", test[0], err, test[1])
		}
	}
}

func TestFlag(t *testing.T) {
	var s Script
	flags := flag.NewFlagSet("x", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.Var(&s, "fault", "")
	if err := flags.Parse([]string{"-fault", " (close(seq 0x10) ) (delay 1500us recv (kind 33 99)(or (nth 2..)(chance .5)))\n"}); err != nil {
		t.Fatal(err)
	}
	equal(t, "String", s.String(), "(close (seq 16)) (delay 1.5ms recv (kind hold 99) (or (nth 2..) (chance 0.5)))")
	if err := flags.Parse([]string{"-fault", "(boom)"}); err == nil {
		t.Error("a wrong flag passes")
	}
	if s.String() == "" {
		t.Error("a wrong flag changes the value")
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("MustParse of a wrong script does not panic")
			}
		}()
		MustParse("(")
	}()
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"", "(drop (kind data) (nth 3))", "(delay 5ms (to 2))", "(corrupt (group 7))", "(close (seq 10))", "(full (every 3))",
		"(drop recv (or (and (seq 1..) (not (to ..3))) (chance 0.5)))", "(delay 1h2m3.5s (kind 1 255 p2p))", "(drop (seq 5", ")(",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(s.String())
		if err != nil {
			t.Fatalf("%q prints as %q, which does not parse: %v", text, s, err)
		}
		if again.String() != s.String() {
			t.Fatalf("%q prints as %q, and that as %q", text, s, again)
		}
		if s.String() != "" && len(s.rules) != len(again.rules) {
			t.Fatalf("%q has %d rules, %q has %d", text, len(s.rules), again, len(again.rules))
		}
		n := sim.New(1)
		a, b := n.Pair(0, 1, sim.Params{})
		l := s.Wrap(a, Options{Now: n.Now})
		for i := range uint64(8) {
			l.Send(frame(wire.KindData, i, "abc"))
			b.Send(frame(wire.KindP2P, i, ""))
			n.Advance(n.Now() + time.Second)
			l.Poll(func(*device.Frame) {})
		}
		l.Close()
	})
}

// Package devicetest is what every link must do, as one suite of tests: the contract of device.Link, run.
//
// A new link calls it like this:
//
//	func TestConformance(t *testing.T) {
//		devicetest.Run(t, func(t *testing.T) devicetest.Pair {
//			a, b := connected(t)
//			return devicetest.Pair{A: a, B: b, NameA: "rank 0", NameB: "rank 1", Caps: device.Caps{Name: "tcp"}}
//		})
//	}
package devicetest

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// Pair is two ends of one link, connected, and what a test can do to it. The suite closes both ends, twice.
type Pair struct {
	A, B         device.Link
	NameA, NameB string      // how an error of the other end names this one
	Caps         device.Caps // what both ends say
	World        [16]byte    // goes into every header
	Step         func()      // lets a little time pass; nil: Nap
	Cut          func()      // breaks the connection between the living ends at any time; nil: there is none to break
	Gone         func()      // ends A's process, or what stands for it; nil: A.Close
}

// limit is how long a test waits for what must come.
const limit = 20 * time.Second

// Run runs the suite. open makes a new pair for each test and leaves its clean-up to t.
func Run(t *testing.T, open func(t *testing.T) Pair) {
	for _, test := range []struct {
		name string
		run  func(*state)
	}{
		{"Caps", caps},
		{"Idle", idle},
		{"Sizes", sizes},
		{"Order", order},
		{"SendOwnsNothing", sendOwnsNothing},
		{"Backpressure", backpressure},
		{"ConcurrentSend", concurrentSend},
		{"SendFromPoll", sendFromPoll},
		{"Descriptor", descriptor},
		{"Random", random},
		{"Cut", cut},
		{"CutFull", cutFull},
		{"CutRandom", cutRandom},
		{"Close", closing},
		{"CloseOther", closingOther},
		{"PeerGone", peerGone},
		{"NoAllocation", noAllocation},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(start(t, open)) })
	}
	t.Run("NoLeak", func(t *testing.T) { noLeak(t, open) })
}

// state is a pair under test.
type state struct {
	*testing.T
	Pair
	a, b  *end
	since time.Time
}

// end is one end, with what it has sent and expects.
type end struct {
	name string
	link device.Link
	out  []*stream
	in   []*stream // the peer's out, as seen here
	got  int
	bad  error
	recv func(*device.Frame)
}

func start(t *testing.T, open func(t *testing.T) Pair) *state {
	t.Helper()
	s := &state{T: t, Pair: open(t), since: time.Now()}
	if s.Step == nil {
		s.Step = Nap()
	}
	s.a = &end{name: "A", link: s.A}
	s.b = &end{name: "B", link: s.B}
	for _, e := range []*end{s.a, s.b} {
		e.recv = e.receive
	}
	s.streams(1, small)
	t.Cleanup(func() {
		for range 2 {
			if err := s.A.Close(); err != nil {
				t.Errorf("Close of A: %v", err)
			}
			if err := s.B.Close(); err != nil {
				t.Errorf("Close of B: %v", err)
			}
		}
	})
	return s
}

// Nap returns a Step for real time: it yields, and sleeps a little now and then.
func Nap() func() {
	steps := 0
	return func() {
		if steps++; steps%64 == 0 {
			time.Sleep(50 * time.Microsecond)
		}
		runtime.Gosched()
	}
}

// streams starts n streams each way, of frames with so many bytes.
func (s *state) streams(n int, size func(n uint64) int) {
	s.a.out, s.b.out, s.a.in, s.b.in = nil, nil, nil, nil
	for i := range n {
		ab, ba := uint64(1000+i), uint64(2000+i)
		s.a.out = append(s.a.out, &stream{seed: ab, tag: uint32(i), size: size, world: s.World})
		s.b.in = append(s.b.in, &stream{seed: ab, tag: uint32(i), size: size, world: s.World})
		s.b.out = append(s.b.out, &stream{seed: ba, tag: uint32(i), size: size, world: s.World})
		s.a.in = append(s.a.in, &stream{seed: ba, tag: uint32(i), size: size, world: s.World})
	}
}

// send sends the next frame of the end's first stream, false on ErrFull.
func (s *state) send(e *end) bool {
	s.Helper()
	ok, err := e.send(0)
	if err != nil {
		s.Fatalf("Send of %s: %v", e.name, err)
	}
	return ok
}

func (e *end) send(stream int) (bool, error) {
	o := e.out[stream]
	err := e.link.Send(o.frame())
	if err == nil {
		o.n++
		return true, nil
	}
	if errors.Is(err, device.ErrFull) {
		if o.f.Kind < wire.KindData {
			return false, fmt.Errorf("frame of control kind %d is refused: %w", o.f.Kind, err)
		}
		return false, nil
	}
	return false, err
}

// mustSend sends the next frame and lets the link run while it is full.
func (s *state) mustSend(e *end) {
	s.Helper()
	for !s.send(e) {
		s.move("room in the backlog")
	}
}

// receive checks a frame against what the peer sent. It only takes down what is wrong: a test must not end in Poll.
func (e *end) receive(f *device.Frame) {
	e.got++
	if e.bad != nil {
		return
	}
	if int(f.Tag) >= len(e.in) {
		e.bad = fmt.Errorf("frame of unknown stream %d", f.Tag)
		return
	}
	e.bad = e.in[f.Tag].check(f)
}

func (s *state) poll(e *end) {
	s.Helper()
	before := e.got
	n, err := e.link.Poll(e.recv)
	switch {
	case e.bad != nil:
		s.Fatalf("%s received: %v", e.name, e.bad)
	case err != nil:
		s.Fatalf("Poll of %s: %v", e.name, err)
	case n != e.got-before:
		s.Fatalf("Poll of %s returned %d and delivered %d frames", e.name, n, e.got-before)
	}
}

// move polls both ends and lets time pass.
func (s *state) move(what string) {
	s.Helper()
	s.poll(s.a)
	s.poll(s.b)
	s.Pair.Step()
	s.patience(what)
}

func (s *state) patience(what string) {
	s.Helper()
	if time.Since(s.since) > limit {
		s.Fatalf("waited %v for %s; A has sent %v, B received %v; B has sent %v, A received %v",
			limit, what, counts(s.a.out), counts(s.b.in), counts(s.b.out), counts(s.a.in))
	}
}

func counts(streams []*stream) (n []uint64) {
	for _, x := range streams {
		n = append(n, x.n)
	}
	return n
}

// settle moves until all that was sent has arrived, and a little longer: nothing may come twice.
func (s *state) settle() {
	s.Helper()
	for !s.settled() {
		s.move("what was sent")
	}
	for range 20 {
		s.move("nothing")
	}
	if !s.settled() {
		s.Fatalf("more arrived than was sent")
	}
}

func (s *state) settled() bool {
	for i := range s.a.out {
		if s.a.out[i].n != s.b.in[i].n || s.b.out[i].n != s.a.in[i].n {
			return false
		}
	}
	return true
}

// names checks that a final error is of the right kind and says whom it is about.
func (s *state) names(what string, err, want error, peer string) {
	s.Helper()
	switch {
	case err == nil:
		s.Fatalf("%s: no error, want one that wraps %q", what, want)
	case !errors.Is(err, want):
		s.Fatalf("%s: error %q does not wrap %q", what, err, want)
	case peer != "" && !strings.Contains(err.Error(), peer):
		s.Fatalf("%s: error %q does not name the peer, %q", what, err, peer)
	case errors.Is(err, device.ErrClosed) == errors.Is(err, device.ErrLost):
		s.Fatalf("%s: error %q is both ErrClosed and ErrLost", what, err)
	}
}

// count is n, or a tenth of it in short mode.
func count(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

package devicetest

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

func caps(s *state) {
	for _, e := range []*end{s.a, s.b} {
		if c := e.link.Caps(); c != s.Pair.Caps || c.Name == "" {
			s.Errorf("Caps of %s are %+v, want %+v with a name", e.name, c, s.Pair.Caps)
		}
	}
}

// idle: a Poll with nothing to do does nothing, at once.
func idle(s *state) {
	begin := time.Now()
	for range 1000 {
		s.poll(s.a)
		s.poll(s.b)
		if d := time.Since(begin); d > 3*time.Second {
			s.Fatalf("calls of Poll on an idle link have taken %v", d)
		}
	}
	if s.a.got+s.b.got > 0 {
		s.Errorf("frames arrived that nobody sent")
	}
}

func sizes(s *state) {
	all := []int{0, 1, 2, 3, 7, 8, 9, 63, 64, 65}
	for p := 128; p <= wire.MaxPayload; p *= 2 {
		all = append(all, p-1, p, p+1)
	}
	all = all[:len(all)-1]
	s.streams(1, func(n uint64) int { return all[n%uint64(len(all))] })
	for range 2 * len(all) {
		s.mustSend(s.a)
		s.mustSend(s.b)
	}
	s.settle()
}

// order: many frames both ways, polled in fits and starts.
func order(s *state) {
	r := rand.New(rand.NewPCG(1, 2))
	for range count(4000) {
		s.mustSend(s.a)
		s.mustSend(s.b)
		switch r.IntN(40) {
		case 0:
			s.poll(s.a)
		case 1:
			s.poll(s.b)
		case 2:
			s.move("frames")
		}
	}
	s.settle()
}

// sendOwnsNothing: frame and payload are the caller's again when Send returns.
func sendOwnsNothing(s *state) {
	s.streams(1, func(n uint64) int { return int(n * 977 % 20000) })
	for range count(1000) {
		s.mustSend(s.a)
		o := s.a.out[0]
		for i := range o.f.Payload {
			o.f.Payload[i] = 0xEE
		}
		o.f.Header = wire.Header{Length: 1 << 31, Seq: 1 << 63}
		if s.a.out[0].n%16 == 0 {
			s.move("frames")
		}
	}
	s.settle()
}

// fill sends from A until it is full, while B does not poll.
func (s *state) fill() {
	s.Helper()
	const bound = 64 << 20
	for sent := 0; ; {
		size := s.a.out[0].size(s.a.out[0].n)
		if s.send(s.a) {
			if sent += size + wire.Size; sent > bound {
				s.Fatalf("Send took %d bytes that nobody polls and never said ErrFull", sent)
			}
			continue
		}
		// It is full when it stays so although A runs.
		full := true
		for range 50 {
			s.poll(s.a)
			s.Pair.Step()
			if s.send(s.a) {
				full = false
				break
			}
		}
		if full {
			return
		}
	}
}

func (s *state) sendKind(e *end, kind wire.Kind) {
	s.Helper()
	e.out[0].kind = kind
	if !s.send(e) {
		s.Fatalf("a frame of kind %d was refused", kind)
	}
	e.out[0].kind = 0
}

func backpressure(s *state) {
	// The receiver learns from a frame's number of what kind it has to be.
	special := make(map[uint64]wire.Kind)
	s.streams(1, func(n uint64) int {
		if special[n] != 0 {
			return 100
		}
		return 64 << 10
	})
	in, out := s.b.in[0], s.a.out[0]
	s.b.recv = func(f *device.Frame) {
		if in.kind = wire.KindData; special[in.n] != 0 {
			in.kind = special[in.n]
		}
		s.b.receive(f)
	}
	for range 2 {
		out.kind = wire.KindData
		s.fill()
		for i := range 200 {
			kind := wire.KindControl
			if i%2 == 1 {
				kind = wire.KindAgent
			}
			special[out.n] = kind
			s.sendKind(s.a, kind)
		}
		// The other way is open: A hears B, which polls little, to flush.
		if !s.send(s.b) {
			s.Fatalf("B is full although it has hardly sent anything")
		}
		for i := 0; s.a.in[0].n < s.b.out[0].n; i++ {
			if i%50 == 0 {
				s.poll(s.b)
			}
			s.poll(s.a)
			s.Pair.Step()
			s.patience("a frame against the full direction")
		}
		s.settle()
	}
	out.kind = wire.KindData
	if !s.send(s.a) {
		s.Errorf("ErrFull although the backlog is empty")
	}
	s.settle()
}

func concurrentSend(s *state) {
	const senders = 8
	s.streams(senders, small)
	each := count(500)
	var group sync.WaitGroup
	var stop atomic.Bool
	defer group.Wait()
	defer stop.Store(true) // also if the test ends in the middle
	for i := range senders {
		for _, e := range []*end{s.a, s.b} {
			group.Go(func() {
				for e.out[i].n < uint64(each) && !stop.Load() {
					ok, err := e.send(i)
					if err != nil {
						s.Errorf("Send of %s: %v", e.name, err)
						return
					}
					if !ok {
						runtime.Gosched()
					}
				}
			})
		}
	}
	done := func() bool {
		for i := range senders {
			if s.a.in[i].n < uint64(each) || s.b.in[i].n < uint64(each) {
				return false
			}
		}
		return true
	}
	for !done() && !s.Failed() {
		s.poll(s.a)
		s.poll(s.b)
		s.Pair.Step()
		if time.Since(s.since) > limit {
			s.Fatalf("waited %v for %d frames of each of %d senders; A has %v, B %v", limit, each, senders, counts(s.a.in), counts(s.b.in))
		}
	}
	stop.Store(true)
	group.Wait()
	if !s.Failed() {
		s.settle()
	}
}

// sendFromPoll: fn answers a frame at once.
func sendFromPoll(s *state) {
	var sendErr error
	answered := 0
	s.b.recv = func(f *device.Frame) {
		s.b.receive(f)
		if _, err := s.b.send(0); err != nil {
			sendErr = err
		}
		answered++
	}
	n := count(1000)
	for i := range n {
		s.mustSend(s.a)
		if i%3 == 0 {
			s.move("frames")
		}
	}
	s.settle()
	if sendErr != nil {
		s.Errorf("Send inside of Poll: %v", sendErr)
	}
	if answered != n {
		s.Errorf("%d answers, want %d", answered, n)
	}
}

// random: anything in any order, frames of up to the largest size.
func random(s *state) { mixed(s, nil) }

// cutRandom is random with breaks.
func cutRandom(s *state) {
	if s.Pair.Cut == nil {
		s.Skip("this link has no connection to break")
	}
	mixed(s, s.Pair.Cut)
}

func mixed(s *state, cut func()) {
	r := rand.New(rand.NewPCG(3, 4))
	s.streams(1, func(n uint64) int {
		if mix(n)%4 == 0 {
			return large(n)
		}
		return small(n)
	})
	cuts := 0
	for range count(3000) {
		switch k := r.IntN(100); {
		case k < 35:
			s.mustSend(s.a)
		case k < 70:
			s.mustSend(s.b)
		case k < 80:
			s.poll(s.a)
		case k < 90:
			s.poll(s.b)
		case k < 99:
			s.Pair.Step()
		case cut != nil && cuts < 12:
			cuts++
			cut()
		}
	}
	s.settle()
}

// cut: a broken connection costs time, and no frame.
func cut(s *state) {
	if s.Pair.Cut == nil {
		s.Skip("this link has no connection to break")
	}
	for round := range 6 {
		for range 50 {
			s.mustSend(s.a)
			s.mustSend(s.b)
		}
		if round%2 == 0 {
			s.poll(s.a) // some of it is under way
		}
		if round%3 == 0 {
			s.settle() // none
		}
		s.Pair.Cut()
		if round%2 == 1 {
			s.Pair.Cut()
		}
		for range 50 {
			s.mustSend(s.a)
			s.mustSend(s.b)
		}
		s.settle()
	}
}

// cutFull: a full backlog survives a break.
func cutFull(s *state) {
	if s.Pair.Cut == nil {
		s.Skip("this link has no connection to break")
	}
	s.streams(1, func(uint64) int { return 100 << 10 })
	for _, e := range []*end{s.a, s.b} {
		e.out[0].kind, e.in[0].kind = wire.KindData, wire.KindData
	}
	s.fill()
	s.Pair.Cut()
	s.settle()
	s.mustSend(s.a)
	s.mustSend(s.b)
	s.settle()
}

func closing(s *state)      { closed(s, s.a, s.NameB) }
func closingOther(s *state) { closed(s, s.b, s.NameA) }

// closed: what a closed end says, with frames under way in both directions.
func closed(s *state, e *end, peer string) {
	for range 50 {
		s.mustSend(s.a)
		s.mustSend(s.b)
	}
	s.poll(e)
	var group sync.WaitGroup
	defer group.Wait()
	for range 4 {
		group.Go(func() { // Send may run at the time
			f := device.Frame{Header: wire.Header{Kind: wire.KindControl, World: s.World}}
			for range 1000 {
				if err := e.link.Send(&f); err != nil && !errors.Is(err, device.ErrClosed) {
					s.Errorf("Send while Close runs: %v", err)
				}
			}
		})
	}
	for range 3 {
		if err := e.link.Close(); err != nil {
			s.Fatalf("Close: %v", err)
		}
	}
	group.Wait()
	got := e.got
	for range 3 {
		s.names("Send after Close", e.link.Send(&device.Frame{Header: wire.Header{Kind: wire.KindControl, World: s.World}}), device.ErrClosed, peer)
		n, err := e.link.Poll(e.recv)
		s.names("Poll after Close", err, device.ErrClosed, peer)
		if n != 0 || e.got != got {
			s.Fatalf("Poll after Close delivered frames")
		}
		s.Pair.Step()
	}
	e.link.Fd() // must not panic
	if c := e.link.Caps(); c.Name == "" {
		s.Errorf("Caps after Close have no name")
	}
}

// peerGone: the survivor gets what arrived, in order, and then ErrLost for good.
func peerGone(s *state) {
	for range 50 {
		s.mustSend(s.a)
	}
	s.settle()
	for range 50 {
		s.mustSend(s.a)
	}
	if s.Pair.Gone != nil {
		s.Pair.Gone()
	} else if err := s.A.Close(); err != nil {
		s.Fatalf("Close of A: %v", err)
	}
	var err error
	for err == nil {
		_, err = s.B.Poll(s.b.recv)
		if s.b.bad != nil {
			s.Fatalf("B received: %v", s.b.bad)
		}
		s.Pair.Step()
		s.patience("B to learn that A is gone")
	}
	s.names("Poll after the peer is gone", err, device.ErrLost, s.NameA)
	for range 3 {
		f := device.Frame{Header: wire.Header{Kind: wire.KindControl, World: s.World}}
		s.names("Send after the peer is gone", s.B.Send(&f), device.ErrLost, s.NameA)
		_, err = s.B.Poll(s.b.recv)
		s.names("Poll after the peer is gone", err, device.ErrLost, s.NameA)
		s.Pair.Step()
	}
	if err := s.B.Close(); err != nil {
		s.Fatalf("Close after the peer is gone: %v", err)
	}
	want := device.ErrClosed
	if _, err = s.B.Poll(s.b.recv); errors.Is(err, device.ErrLost) {
		want = device.ErrLost // the first word may stay the last
	}
	s.names("Poll after Close after the peer is gone", err, want, s.NameA)
}

// noAllocation: small frames cost no garbage once everything is warm.
func noAllocation(s *state) {
	if raceEnabled {
		s.Skip("the race detector allocates")
	}
	got := 0
	fn := func(*device.Frame) { got++ }
	payload := make([]byte, 64)
	f := device.Frame{Header: wire.Header{Length: 64, Kind: wire.KindData, Total: 64, World: s.World}, Payload: payload}
	var bad error
	round := func() {
		if err := s.A.Send(&f); err != nil {
			bad = err
		}
		if err := s.B.Send(&f); err != nil {
			bad = err
		}
		for before := got; got < before+2 && bad == nil; {
			_, errA := s.A.Poll(fn)
			_, errB := s.B.Poll(fn)
			if bad = errors.Join(errA, errB); bad == nil && time.Since(s.since) > limit {
				bad = errors.New("a frame does not arrive")
			}
			s.Pair.Step()
		}
	}
	for range 600 {
		round()
	}
	n := testing.AllocsPerRun(300, round)
	if bad != nil {
		s.Fatal(bad)
	}
	if n > 0 {
		s.Errorf("%v allocations for one small frame each way", n)
	}
}

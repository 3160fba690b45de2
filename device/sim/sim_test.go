package sim

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/devicetest"
	"github.com/serry-project/serry/internal/wire"
)

const ms = time.Millisecond

func TestConformance(t *testing.T) {
	for _, test := range []struct {
		name string
		p    Params
	}{
		{"Ideal", Params{}},
		{"Lan", Params{Latency: 50 * time.Microsecond, Jitter: 20 * time.Microsecond, Bandwidth: 10e9}},
		{"Lossy", Params{Latency: ms, Jitter: 5 * ms, Loss: 0.2, Bandwidth: 1e9}},
	} {
		t.Run(test.name, func(t *testing.T) {
			devicetest.Run(t, func(t *testing.T) devicetest.Pair {
				n := New(7)
				a, b := n.Pair(0, 1, test.p)
				return devicetest.Pair{
					A: a, B: b, NameA: "node 0", NameB: "node 1", Caps: device.Caps{Name: "sim"},
					Step: func() { n.Advance(n.Now() + ms/2) },
					Cut:  func() { n.Cut(0, 1) },
					Gone: func() { n.Crash(0) },
				}
			})
		})
	}
}

func data(seq uint64, size int) *device.Frame {
	return &device.Frame{
		Header:  wire.Header{Kind: wire.KindData, Seq: seq, Length: uint32(size), Total: uint64(size)},
		Payload: make([]byte, size),
	}
}

func send(t *testing.T, l *Link, f *device.Frame) {
	t.Helper()
	if err := l.Send(f); err != nil {
		t.Fatalf("%v: Send: %v", l, err)
	}
}

// take polls and returns the sequences that came.
func take(l *Link) (seqs []uint64, err error) {
	_, err = l.Poll(func(f *device.Frame) { seqs = append(seqs, f.Seq) })
	return seqs, err
}

func want(t *testing.T, l *Link, seqs ...uint64) {
	t.Helper()
	got, err := take(l)
	if err != nil {
		t.Fatalf("%v: Poll: %v", l, err)
	}
	if !reflect.DeepEqual(got, seqs) {
		t.Fatalf("%v: got %v, want %v", l, got, seqs)
	}
}

func TestTimes(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{Latency: 10 * ms, Bandwidth: 1000 * (wire.Size + 872)})
	if _, ok := n.Next(); ok {
		t.Fatal("something is going to happen on an idle network")
	}
	send(t, a, data(1, 872)) // 1 ms on the wire
	send(t, a, data(2, 872))
	want(t, b)
	for _, step := range []struct {
		at   time.Duration
		seqs []uint64
	}{{11 * ms, []uint64{1}}, {12 * ms, []uint64{2}}} {
		at, ok := n.Next()
		if !ok || at != step.at {
			t.Fatalf("Next is %v, %v, want %v", at, ok, step.at)
		}
		n.Advance(at - 1)
		want(t, b)
		n.Advance(at)
		want(t, b, step.seqs...)
	}
	n.Advance(5 * ms)
	if n.Now() != 12*ms {
		t.Fatalf("the clock went back to %v", n.Now())
	}
	send(t, b, data(3, 872)) // the other way is free
	n.Advance(23 * ms)
	want(t, a, 3)
}

func TestShape(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{Latency: 10 * ms})
	n.Shape(1, 2, Params{Latency: ms})
	send(t, a, data(1, 1))
	send(t, b, data(2, 1))
	n.Advance(ms)
	want(t, b, 1)
	want(t, a)
	n.Advance(10 * ms)
	want(t, a, 2)
}

func TestPartition(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{Latency: ms})
	send(t, a, data(1, 0)) // under way when the cable is pulled
	n.PartitionOneWay(1, 2)
	send(t, a, data(2, 0))
	send(t, b, data(3, 0))
	n.Advance(time.Second)
	want(t, b)
	want(t, a, 3)
	n.Partition(2, 1)
	send(t, b, data(4, 0))
	n.Advance(2 * time.Second)
	want(t, a)
	if at, ok := n.Next(); ok {
		t.Fatalf("something is going to happen at %v although nothing gets through", at)
	}
	n.Heal(1, 2)
	n.Advance(2*time.Second + 3*ms)
	want(t, a)
	n.Advance(3 * time.Second)
	want(t, b, 1, 2)
	want(t, a, 4)

	n.Isolate(2)
	c, d := n.Pair(2, 3, Params{})
	send(t, a, data(5, 0))
	send(t, c, data(6, 0))
	n.Advance(4 * time.Second)
	want(t, b)
	want(t, d)
	n.Heal(1, 2) // is not what it takes
	n.Advance(5 * time.Second)
	want(t, b)
	n.HealAll()
	n.Advance(6 * time.Second)
	want(t, b, 5)
	want(t, d, 6)
}

// One way blocked: what the other way delivers is not acknowledged, so the backlog fills up, and empties on Heal.
func TestPartitionHoldsCredit(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{Latency: ms, Backlog: 10 * (wire.Size + 1000)})
	n.PartitionOneWay(2, 1)
	for i := range uint64(10) {
		send(t, a, data(i, 1000))
	}
	n.Advance(time.Second)
	if seqs, _ := take(b); len(seqs) != 10 {
		t.Fatalf("%d of 10 frames arrived", len(seqs))
	}
	n.Advance(2 * time.Second)
	if err := a.Send(data(10, 1000)); !errors.Is(err, device.ErrFull) {
		t.Fatalf("Send: %v, want ErrFull", err)
	}
	<-drain(a)
	n.Heal(1, 2)
	at, ok := n.Next()
	if !ok {
		t.Fatal("no event for a sender that waits for room")
	}
	n.Advance(at)
	select {
	case <-a.Ready():
	default:
		t.Fatal("the sender is not told of the room")
	}
	send(t, a, data(10, 1000))
}

// drain empties Ready.
func drain(l *Link) <-chan struct{} {
	select {
	case <-l.Ready():
	default:
	}
	c := make(chan struct{})
	close(c)
	return c
}

func TestCrash(t *testing.T) {
	arrived := make(map[int]int)
	for seed := range uint64(60) {
		n := New(seed)
		a, b := n.Pair(1, 2, Params{Latency: ms})
		c, _ := n.Pair(3, 2, Params{Latency: ms})
		for i := range uint64(5) {
			send(t, a, data(i, 10))
			send(t, b, data(i, 10))
		}
		n.Crash(1)
		if err := a.Send(data(9, 0)); !errors.Is(err, device.ErrClosed) || !strings.Contains(err.Error(), "crashed") {
			t.Fatalf("Send of the dead: %v", err)
		}
		if _, err := take(a); !errors.Is(err, device.ErrClosed) {
			t.Fatalf("Poll of the dead: %v", err)
		}
		send(t, b, data(9, 0)) // does not know yet
		want(t, b)
		n.Advance(2 * ms)
		seqs, err := take(b)
		if !errors.Is(err, device.ErrLost) || !strings.Contains(err.Error(), "node 1") {
			t.Fatalf("Poll of the survivor: %v", err)
		}
		for i, s := range seqs {
			if s != uint64(i) {
				t.Fatalf("got %v, want the first of what was sent", seqs)
			}
		}
		arrived[len(seqs)]++
		want(t, c)
		// A new process of node 1.
		a, b = n.Pair(1, 2, Params{Latency: ms})
		send(t, a, data(1, 0))
		n.Advance(4 * ms)
		want(t, b, 1)
	}
	if len(arrived) != 6 {
		t.Errorf("of 5 frames under way arrived, with 60 seeds: %v (frames: times); want all of 0 to 5", arrived)
	}
}

// A crash behind a partition is not seen before it heals.
func TestCrashUnseen(t *testing.T) {
	n := New(1)
	_, b := n.Pair(1, 2, Params{})
	n.Isolate(1)
	n.Crash(1)
	n.Advance(time.Hour)
	want(t, b)
	n.HealAll()
	n.Advance(2 * time.Hour)
	if _, err := take(b); !errors.Is(err, device.ErrLost) {
		t.Fatalf("Poll: %v, want ErrLost", err)
	}
}

// Close loses what waits for bandwidth and delivers what has left.
func TestCloseBacklog(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{Latency: 10 * ms, Bandwidth: 1000 * (wire.Size + 872)})
	for i := range uint64(5) {
		send(t, a, data(i, 872))
	}
	n.Advance(2 * ms)
	a.Close()
	n.Advance(ms * 100)
	seqs, err := take(b)
	if !reflect.DeepEqual(seqs, []uint64{0, 1}) || !errors.Is(err, device.ErrLost) {
		t.Fatalf("got %v and %v, want the 2 frames that had left, and ErrLost", seqs, err)
	}
	b.Close()
	if len(n.links) != 0 || len(n.events) != 0 {
		t.Fatalf("%d links and %d events are left of a closed network", len(n.links), len(n.events))
	}
}

// history runs a random program on a network and writes down all that is seen.
func history(seed uint64) string {
	const nodes = 4
	var log strings.Builder
	n := New(seed)
	r := rand.New(rand.NewPCG(seed, 99))
	var links []*Link
	pair := func(i, j int) {
		a, b := n.Pair(i, j, Params{Latency: ms, Jitter: 3 * ms, Loss: 0.1, Bandwidth: 1e6, Backlog: 20000})
		links = append(links, a, b)
	}
	for i := range nodes {
		for j := range i {
			pair(i, j)
		}
	}
	seq := uint64(0)
	for range 600 {
		i, j := r.IntN(nodes), r.IntN(nodes-1)
		if j >= i {
			j++
		}
		switch k := r.IntN(200); {
		case k < 120:
			seq++
			l := links[r.IntN(len(links))]
			if err := l.Send(data(seq, r.IntN(3000))); err != nil {
				fmt.Fprintf(&log, "%v: send %d: %v\n", l, seq, err)
			}
		case k < 180:
			if at, ok := n.Next(); ok {
				n.Advance(at + time.Duration(r.IntN(1000))*time.Microsecond)
			}
		case k < 183:
			n.Partition(i, j)
		case k < 186:
			n.PartitionOneWay(i, j)
		case k < 190:
			n.Heal(i, j)
		case k < 194:
			n.Cut(i, j)
		case k < 195:
			n.HealAll()
		case k < 196:
			n.Isolate(i)
		case k < 197:
			n.Crash(i)
			for j := range nodes {
				if j != i {
					pair(i, j)
				}
			}
		}
		for _, l := range links {
			if seqs, err := take(l); len(seqs) > 0 {
				fmt.Fprintf(&log, "%v %v: %v %v\n", n.Now(), l, seqs, err)
			}
		}
	}
	n.HealAll()
	n.Settle(math.MaxInt64, func() {
		for _, l := range links {
			seqs, err := take(l)
			if len(seqs) > 0 {
				fmt.Fprintf(&log, "%v %v: %v %v\n", n.Now(), l, seqs, err)
			}
		}
	})
	return log.String()
}

func TestDeterministic(t *testing.T) {
	first := history(1)
	for seed := range uint64(20) {
		if a, b := history(seed), history(seed); a != b {
			t.Fatalf("seed %d: two histories:\n%s\nand\n%s", seed, a, b)
		} else if seed != 1 && a == first {
			t.Fatalf("seeds 1 and %d have the same history", seed)
		}
	}
}

// What befalls one direction does not depend on traffic elsewhere.
func TestStreamsAreApart(t *testing.T) {
	arrivals := func(noise bool) (at []time.Duration) {
		n := New(5)
		a, b := n.Pair(1, 2, Params{Latency: ms, Jitter: 10 * ms, Loss: 0.3})
		c, _ := n.Pair(1, 3, Params{Jitter: ms})
		for i := range uint64(50) {
			send(t, a, data(i, 1))
			if noise {
				send(t, c, data(i, 1))
				send(t, b, data(i, 1))
			}
		}
		n.Settle(time.Hour, func() {
			seqs, _ := take(b)
			for range seqs {
				at = append(at, n.Now())
			}
		})
		return at
	}
	if quiet, noisy := arrivals(false), arrivals(true); !reflect.DeepEqual(quiet, noisy) {
		t.Fatalf("arrivals\n%v\nbecome, with other traffic,\n%v", quiet, noisy)
	}
}

// In a bubble of synctest the network runs on the fake clock, and an hour costs nothing.
func TestDrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(1)
		a, b := n.Pair(1, 2, Params{Latency: time.Minute})
		stop := make(chan struct{})
		go n.Drive(stop)
		echo := func(l *Link) {
			for range l.Ready() {
				_, err := l.Poll(func(f *device.Frame) {
					f.Seq++
					if err := l.Send(f); err != nil {
						t.Error(err)
					}
				})
				if err != nil {
					return
				}
			}
		}
		go echo(b)
		begin := time.Now()
		send(t, a, data(0, 100))
		for i := range uint64(30) {
			<-a.Ready()
			want(t, a, 2*i+1)
			send(t, a, data(2*i+2, 100))
		}
		if d := time.Since(begin); d != time.Hour {
			t.Errorf("30 round trips of 2 min took %v", d)
		}
		n.Crash(1)
		synctest.Wait()
		time.Sleep(time.Minute)
		close(stop)
		synctest.Wait()
	})
}

func TestMisusePanics(t *testing.T) {
	n := New(1)
	a, b := n.Pair(1, 2, Params{})
	panics := func(what string, fn func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s does not panic", what)
			}
		}()
		fn()
	}
	panics("a node paired with itself", func() { n.Pair(1, 1, Params{}) })
	panics("a loss of everything", func() { n.Pair(1, 3, Params{Loss: 1}) })
	panics("a wrong length", func() { a.Send(&device.Frame{Payload: make([]byte, 3)}) })
	panics("a fragment outside of its whole", func() { a.Send(&device.Frame{Header: wire.Header{Kind: wire.KindData, Offset: 1}}) })
	send(t, a, data(1, 4))
	n.Advance(0)
	var kept []byte
	b.Poll(func(f *device.Frame) { kept = f.Payload })
	if kept[0] != 0xDB {
		t.Errorf("a kept payload still reads %#x", kept[0])
	}
	send(t, a, data(2, 4))
	n.Advance(0)
	panics("Poll inside of Poll", func() { b.Poll(func(*device.Frame) { b.Poll(nil) }) })
}

func BenchmarkSendPoll(b *testing.B) {
	n := New(1)
	x, y := n.Pair(1, 2, Params{Latency: ms})
	f := data(1, 64)
	fn := func(*device.Frame) {}
	b.ReportAllocs()
	for b.Loop() {
		x.Send(f)
		n.Advance(n.Now() + ms)
		y.Poll(fn)
	}
}

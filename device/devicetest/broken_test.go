package devicetest_test

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/devicetest"
	"github.com/serry-project/serry/device/sim"
	"github.com/serry-project/serry/internal/wire"
)

var brokenMode = flag.String("broken", "", "for TestSuiteFindsFaults: run the suite on a link with this fault")

// faults are ways to break the contract, and a test of the suite that has to see it.
var faults = map[string]string{
	"drops":          "Order",
	"doubles":        "Order",
	"swaps":          "Order",
	"flips":          "Sizes",
	"truncates":      "Sizes",
	"borrows":        "SendOwnsNothing",
	"boundless":      "Backpressure",
	"refusesControl": "Backpressure",
	"racySend":       "ConcurrentSend",
	"miscounts":      "Order",
	"blocks":         "Idle",
	"wrongCaps":      "Caps",
	"forgetsClose":   "Close",
	"nameless":       "Close",
	"closedIsLost":   "CloseOther",
	"forgives":       "PeerGone",
	"failsOnCut":     "Cut",
	"replaysTwice":   "Cut",
	"allocates":      "NoAllocation",
	"leaks":          "NoLeak",
}

// The suite is worth something only if a broken link fails it: this runs it on one after the other in a process of its
// own.
func TestSuiteFindsFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes")
	}
	for fault, where := range faults {
		t.Run(fault, func(t *testing.T) {
			if where == "NoAllocation" && devicetest.RaceEnabled {
				t.Skip("the race detector allocates")
			}
			text, err := exec.Command(os.Args[0], "-test.run", "^TestBroken$/^"+where+"$", "-test.short", "-broken", fault).CombinedOutput()
			if err == nil || !strings.Contains(string(text), "--- FAIL: TestBroken/"+where+" ") {
				t.Errorf("a link that %s passes %s: %v\n%s", fault, where, err, text)
			}
		})
	}
}

// TestBroken is what TestSuiteFindsFaults starts.
func TestBroken(t *testing.T) {
	if *brokenMode == "" {
		return
	}
	devicetest.Run(t, func(t *testing.T) devicetest.Pair {
		n := sim.New(1)
		p := sim.Params{Latency: time.Microsecond}
		if *brokenMode == "boundless" {
			p.Backlog = 1 << 40
		}
		a, b := n.Pair(0, 1, p)
		la, lb := &broken{Link: a, mode: *brokenMode}, &broken{Link: b, mode: *brokenMode}
		return devicetest.Pair{
			A: la, B: lb, NameA: "node 0", NameB: "node 1", Caps: device.Caps{Name: "sim"},
			Step: func() { n.Advance(n.Now() + time.Millisecond) },
			Cut: func() {
				n.Cut(0, 1)
				la.cut, lb.cut = true, true
			},
		}
	})
}

// broken is a link that breaks its contract in one way.
type broken struct {
	device.Link
	mode   string
	mu     sync.Mutex
	sent   int
	kept   *device.Frame
	cut    bool
	closed bool
}

func clone(f *device.Frame) *device.Frame {
	g := *f
	g.Payload = append([]byte(nil), f.Payload...)
	return &g
}

var sink any

func (b *broken) Send(f *device.Frame) error {
	if b.mode == "racySend" {
		f = clone(f)
		b.mu.Lock()
		kept := b.kept
		b.kept = nil
		if kept == nil && f.Tag > 0 && f.Seq%8 == 7 {
			b.kept = f
			b.mu.Unlock()
			return nil
		}
		b.mu.Unlock()
		err := b.Link.Send(f)
		if err == nil && kept != nil {
			err = b.Link.Send(kept)
		}
		return err
	}
	b.sent++
	switch b.mode {
	case "drops":
		if b.sent == 40 {
			return nil
		}
	case "doubles":
		if b.sent == 40 {
			if err := b.Link.Send(f); err != nil {
				return err
			}
		}
	case "swaps":
		if b.sent == 40 {
			b.kept = clone(f)
			return nil
		}
		if b.kept != nil {
			defer b.Link.Send(b.kept)
			b.kept = nil
		}
	case "flips":
		if len(f.Payload) > 100 {
			f = clone(f)
			f.Payload[100] ^= 4
		}
	case "truncates":
		if len(f.Payload) == wire.MaxPayload {
			f = clone(f)
			f.Payload = f.Payload[:wire.MaxPayload-1]
			f.Length--
		}
	case "borrows":
		if b.kept != nil {
			if err := b.Link.Send(b.kept); err != nil {
				return err
			}
		}
		g := *f
		b.kept = &g
		return nil
	case "refusesControl":
		if f.Kind == wire.KindControl && b.sent > 50 {
			return device.ErrFull
		}
	case "allocates":
		sink = new([64]byte)
	case "forgetsClose":
		if b.closed {
			return nil
		}
	case "forgives":
		if err := b.Link.Send(f); !errors.Is(err, device.ErrLost) {
			return err
		}
		return nil
	}
	return b.wrong(b.Link.Send(f))
}

func (b *broken) Poll(fn func(*device.Frame)) (int, error) {
	if b.kept != nil && b.mode == "borrows" {
		b.Link.Send(b.kept)
		b.kept = nil
	}
	if b.cut && b.mode == "failsOnCut" {
		return 0, errors.New("connection reset")
	}
	if b.mode == "blocks" {
		time.Sleep(10 * time.Millisecond)
	}
	n, err := b.Link.Poll(func(f *device.Frame) {
		fn(f)
		if b.cut && b.mode == "replaysTwice" {
			b.cut = false
			fn(f)
		}
	})
	if b.mode == "miscounts" {
		n++
	}
	return n, b.wrong(err)
}

func (b *broken) wrong(err error) error {
	switch {
	case errors.Is(err, device.ErrClosed) && b.mode == "nameless":
		return device.ErrClosed
	case errors.Is(err, device.ErrClosed) && b.mode == "closedIsLost":
		return errors.New("node 0 node 1: lost")
	}
	return err
}

func (b *broken) Caps() device.Caps {
	c := b.Link.Caps()
	c.OneSidedGet = b.mode == "wrongCaps"
	return c
}

func (b *broken) Close() error {
	if b.mode == "leaks" && !b.closed {
		go func() { select {} }()
	}
	b.closed = true
	return b.Link.Close()
}

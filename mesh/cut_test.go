package mesh

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// cut breaks the connection under a peer's link.
func (p *Peer) cut(how int) {
	p.base.WithFd(func(fd int) { _ = unix.Shutdown(fd, how) })
}

// TestCutUnderLoad: connections break while both sides send; nothing is lost, comes twice, or out of order.
func TestCutUnderLoad(t *testing.T) {
	links(t, func(t *testing.T, change func(*Config)) {
		const cutsWanted = 12
		var wrong, na, nb atomic.Int64
		count := func(n *atomic.Int64) func(*Peer, *device.Frame) {
			return func(_ *Peer, f *device.Frame) {
				if int64(f.Seq) != n.Load() || len(f.Payload) > 0 && binary.LittleEndian.Uint64(f.Payload) != f.Seq {
					wrong.Add(1)
				}
				n.Add(1)
			}
		}
		ra, rb := newRec(), newRec()
		ra.frame, rb.frame = count(&na), count(&nb)
		_, _, ab, ba := pair(t, ra, rb, func(c *Config) {
			if change != nil {
				change(c)
			}
			c.HeartbeatLimit = 10 * time.Second
		})
		var wg sync.WaitGroup
		var done atomic.Bool
		var sent [2]atomic.Int64
		for i, p := range []*Peer{ab, ba} {
			r := rand.New(rand.NewPCG(1, uint64(i)))
			wg.Go(func() {
				b := make([]byte, wire.MaxPayload)
				for s := uint64(0); !done.Load(); {
					binary.LittleEndian.PutUint64(b, s)
					n := 8 + r.IntN(20000)
					if s%100 == 0 {
						n = len(b)
					}
					switch err := p.Send(frame(s, b[:n])); err {
					case nil:
						s++
						sent[i].Store(int64(s))
						if s%200 == 0 {
							time.Sleep(time.Millisecond)
						}
					case device.ErrFull:
						time.Sleep(time.Millisecond)
					default:
						t.Error(err)
						return
					}
				}
			})
		}
		cuts := 0
		r := rand.New(rand.NewPCG(5, 6))
		end := time.Now().Add(20 * time.Second)
		for seen := 0; cuts < cutsWanted && time.Now().Before(end); {
			time.Sleep(time.Duration(r.IntN(8)) * time.Millisecond)
			if n := ab.base.Attached(); n > seen || r.IntN(20) == 0 {
				seen = n
				cuts++
				[]*Peer{ab, ba}[r.IntN(2)].cut([]int{unix.SHUT_RDWR, unix.SHUT_WR, unix.SHUT_RD}[r.IntN(3)])
			}
		}
		done.Store(true)
		wg.Wait()
		for (na.Load() < sent[1].Load() || nb.Load() < sent[0].Load()) && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		if na.Load() != sent[1].Load() || nb.Load() != sent[0].Load() || wrong.Load() > 0 {
			t.Errorf("%d and %d of %d and %d frames, %d wrong", na.Load(), nb.Load(), sent[1].Load(), sent[0].Load(), wrong.Load())
		}
		t.Logf("%d frames, %d cuts, %d connections", na.Load()+nb.Load(), cuts, ab.base.Attached())
		if ra.count("died b")+rb.count("died a")+ra.count("linked b") != 1 {
			t.Error(ra.events, rb.events)
		}
	})
}

// TestSilence: a far process whose listener is gone and connection broken becomes silent; an unsilenced one is heard.
func TestSilence(t *testing.T) {
	ra, rb := newRec(), newRec()
	var mu sync.Mutex
	hole := false
	_, _, _, _ = pair(t, ra, rb, func(c *Config) {
		far()(c)
		c.HeartbeatEvery, c.HeartbeatLimit = 20*time.Millisecond, 150*time.Millisecond
		c.Wrap = func(l device.Link) device.Link {
			return &holey{Link: l, hole: func() bool { mu.Lock(); defer mu.Unlock(); return hole }}
		}
	})
	time.Sleep(400 * time.Millisecond)
	if ra.count("silent b")+rb.count("silent a") > 0 {
		t.Fatal("silent while heartbeats go")
	}
	mu.Lock()
	hole = true
	mu.Unlock()
	start := time.Now()
	d := ra.wait(t, "silent b").Sub(start)
	rb.wait(t, "silent a")
	t.Logf("silent after %v", d)
	mu.Lock()
	hole = false
	mu.Unlock()
	ra.wait(t, "heard b")
	rb.wait(t, "heard a")
}

// TestStarvedObserver: who did not run itself accuses nobody.
func TestStarvedObserver(t *testing.T) {
	ra, rb := newRec(), newRec()
	var hole atomic.Bool
	ra.frame = func(*Peer, *device.Frame) { time.Sleep(700 * time.Millisecond) }
	_, _, _, ba := pair(t, ra, rb, func(c *Config) {
		far()(c)
		c.HeartbeatEvery, c.HeartbeatLimit = 20*time.Millisecond, 250*time.Millisecond
		if c.Name == "b" {
			c.Wrap = func(l device.Link) device.Link { return &holey{Link: l, hole: hole.Load} }
		}
	})
	if err := ba.Send(frame(0, nil)); err != nil {
		t.Fatal(err)
	}
	hole.Store(true)
	time.Sleep(750 * time.Millisecond)
	hole.Store(false)
	time.Sleep(100 * time.Millisecond)
	if n := ra.count("silent b"); n > 0 {
		t.Error("b is silent for a starved a")
	}
	if n := rb.count("silent a"); n != 1 {
		t.Error("a was not silent for b")
	}
}

// holey drops what is sent while there is a hole.
type holey struct {
	device.Link
	hole func() bool
}

func (h *holey) Send(f *device.Frame) error {
	if h.hole() {
		return nil
	}
	return h.Link.Send(f)
}

// TestForget: a forgotten peer is told nothing, and its side gives up.
func TestForget(t *testing.T) {
	links(t, func(t *testing.T, change func(*Config)) {
		t.Parallel()
		ra, rb := newRec(), newRec()
		a, b, ab, ba := pair(t, ra, rb, change)
		ab.Forget()
		ab.Forget()
		if len(a.Peers()) != 0 {
			t.Error("still there")
		}
		if err := ab.Send(frame(0, nil)); err == nil {
			t.Error("sent to a forgotten peer")
		}
		for end := time.Now().Add(refusedTime + 5*time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if err := ba.Send(frame(0, nil)); err != nil {
				break
			}
		}
		if err := ba.Send(frame(0, nil)); err == nil {
			t.Error("the link did not end")
		}
		if n := rb.count("died a"); n > 0 {
			t.Error("who forgets us is not dead")
		}
		_ = b
	})
}

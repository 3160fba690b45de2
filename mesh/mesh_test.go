package mesh

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

func TestMain(m *testing.M) {
	if code, isChild := child(); isChild {
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// rec is a Handler that remembers.
type rec struct {
	mu      sync.Mutex
	events  []string
	at      map[string]time.Time
	changed chan struct{}
	frame   func(p *Peer, f *device.Frame)
	ticks   atomic.Int64
}

func newRec() *rec { return &rec{at: map[string]time.Time{}, changed: make(chan struct{})} }

func (r *rec) note(what string, p *Peer) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	e := what + " " + p.Name()
	r.events = append(r.events, e)
	r.at[e] = now
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *rec) Frame(p *Peer, f *device.Frame) {
	if r.frame != nil {
		r.frame(p, f)
	}
}
func (r *rec) Died(p *Peer)                     { r.note("died", p) }
func (r *rec) Silent(p *Peer)                   { r.note("silent", p) }
func (r *rec) Heard(p *Peer)                    { r.note("heard", p) }
func (r *rec) Linked(p *Peer)                   { r.note("linked", p) }
func (r *rec) Tick(time.Duration) time.Duration { r.ticks.Add(1); return 0 }

func (r *rec) count(e string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, v := range r.events {
		if v == e {
			n++
		}
	}
	return n
}

// wait returns when event e came (for the first time).
func (r *rec) wait(t testing.TB, e string) time.Time {
	t.Helper()
	deadline := time.After(15 * time.Second)
	for {
		r.mu.Lock()
		at, ok := r.at[e]
		c := r.changed
		r.mu.Unlock()
		if ok {
			return at
		}
		select {
		case <-c:
		case <-deadline:
			r.mu.Lock()
			defer r.mu.Unlock()
			t.Fatalf("no %q in 15 s; there were %q", e, r.events)
		}
	}
}

var testWorld = [16]byte{1, 2, 3}

type logWriter struct {
	mu sync.Mutex
	t  testing.TB
}

func (w *logWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Logf("%s", bytes.TrimSpace(b))
	}
	return len(b), nil
}

func testLog(t testing.TB) *slog.Logger {
	w := &logWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		w.t = nil
		w.mu.Unlock()
	})
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

func testConfig(t testing.TB, name string) Config {
	return Config{World: testWorld, Key: []byte("key"), Name: name, Arena: 1 << 20, Log: testLog(t).With("at", name)}
}

// open makes a started mesh that ends with the test.
func open(t testing.TB, cfg Config, r *rec) *Mesh {
	t.Helper()
	m, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := m.Start(r); err != nil {
		t.Fatal(err)
	}
	return m
}

func short(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// pair returns two linked meshes of this process.
func pair(t testing.TB, ra, rb *rec, change func(*Config)) (a, b *Mesh, ab, ba *Peer) {
	t.Helper()
	ca, cb := testConfig(t, "a"), testConfig(t, "b")
	if change != nil {
		change(&ca)
		change(&cb)
	}
	a, b = open(t, ca, ra), open(t, cb, rb)
	ab, err := a.Connect(short(t), b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if ba, err = b.Await(short(t), a.Addr()); err != nil {
		t.Fatal(err)
	}
	return a, b, ab, ba
}

func frame(seq uint64, payload []byte) *device.Frame {
	return &device.Frame{Header: wire.Header{
		Kind: wire.KindData, Seq: seq, Length: uint32(len(payload)), Total: uint64(len(payload)),
	}, Payload: payload}
}

func links(t *testing.T, f func(t *testing.T, change func(*Config))) {
	t.Run("shm", func(t *testing.T) { f(t, nil) })
	t.Run("tcp", func(t *testing.T) { f(t, func(c *Config) { c.Links = "tcp" }) })
	t.Run("far", func(t *testing.T) { f(t, far()) }) // as if on two hosts
}

var farHost atomic.Uint64

// far gives every mesh a host of its own.
func far() func(*Config) {
	return func(c *Config) { c.testHost = farHost.Add(2) }
}

func TestPair(t *testing.T) {
	links(t, func(t *testing.T, change func(*Config)) {
		ra, rb := newRec(), newRec()
		got := make(chan string, 10)
		rb.frame = func(p *Peer, f *device.Frame) { got <- fmt.Sprint(p.Name(), f.Seq, string(f.Payload)) }
		ra.frame = func(p *Peer, f *device.Frame) { got <- fmt.Sprint(p.Name(), f.Seq, string(f.Payload)) }
		a, b, ab, ba := pair(t, ra, rb, change)
		if err := ab.Send(frame(7, []byte("hello"))); err != nil {
			t.Fatal(err)
		}
		if g := <-got; g != "a7hello" {
			t.Error(g)
		}
		if err := ba.Send(frame(8, nil)); err != nil {
			t.Fatal(err)
		}
		if g := <-got; g != "b8" {
			t.Error(g)
		}
		if again, err := a.Connect(short(t), b.Addr()); again != ab || err != nil {
			t.Error(again, err)
		}
		sub := t.Name()[len("TestPair/"):]
		if ab.SameHost() != (sub != "far") || (ab.Board() != nil) != (sub != "far") || (ba.Arena() != nil) != (sub == "shm") {
			t.Errorf("same host %v, board %d, arena %d bytes", ab.SameHost(), len(ab.Board()), len(ba.Arena()))
		}
		copy(a.Board()[100:], "board")
		copy(a.Arena()[4096:], "arena")
		if ba.Board() != nil && string(ba.Board()[100:105]) != "board" {
			t.Error("board is not shared")
		}
		if ba.Arena() != nil && string(ba.Arena()[4096:4101]) != "arena" {
			t.Error("arena is not shared")
		}
		if s := a.Status(); len(s) != 1 || s[0].State != "up" || s[0].Why == "" || s[0].In == 0 || s[0].Out == 0 {
			t.Errorf("%+v", s)
		}
		before := ra.ticks.Load()
		a.Post()
		for end := time.Now().Add(time.Second); ra.ticks.Load() == before && time.Now().Before(end); {
			runtime.Gosched()
		}
		if ra.ticks.Load() == before {
			t.Error("Post makes no tick")
		}
		b.Close()
		ra.wait(t, "died b")
		if err := ab.Send(frame(9, nil)); !errors.Is(err, device.ErrLost) {
			t.Error(err)
		}
		if _, err := a.Connect(short(t), b.Addr()); err == nil {
			t.Error("connect to the dead")
		}
		if n := ra.count("died b"); n != 1 {
			t.Errorf("died %d times", n)
		}
	})
}

func TestFullMesh(t *testing.T) {
	const n = 6
	links(t, func(t *testing.T, change func(*Config)) {
		var ms []*Mesh
		var sum [n]atomic.Int64
		for i := range n {
			c := testConfig(t, fmt.Sprint("rank ", i))
			c.Log = nil
			if change != nil {
				change(&c)
			}
			r := newRec()
			r.frame = func(_ *Peer, f *device.Frame) { sum[i].Add(int64(f.Seq)) }
			ms = append(ms, open(t, c, r))
		}
		if err := ms[0].MakeWords(); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i, m := range ms {
			for j, o := range ms {
				if i == j {
					continue
				}
				wg.Go(func() { // both sides dial at once
					p, err := m.Connect(short(t), o.Addr())
					if err != nil {
						t.Error(err)
						return
					}
					for k := range 1000 {
						if err := p.Send(frame(uint64(k), nil)); err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		for i := range sum {
			for end := time.Now().Add(5 * time.Second); sum[i].Load() != 499500*(n-1) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			if s := sum[i].Load(); s != 499500*(n-1) {
				t.Errorf("rank %d got %d of %d", i, s, 499500*(n-1))
			}
		}
		if ms[1].Peers()[0].SameHost() {
			w0, _ := ms[0].Words(short(t))
			w0[5] = 77
			for _, m := range ms {
				w, err := m.Words(short(t))
				if err != nil || w[5] != 77 || len(w) != WordsBytes {
					t.Error(err, len(w))
				}
			}
		}
	})
}

func TestWordsAfterLinks(t *testing.T) {
	a, b, _, _ := pair(t, newRec(), newRec(), nil)
	if err := a.MakeWords(); err != nil {
		t.Fatal(err)
	}
	wa, _ := a.Words(short(t))
	wa[1<<20-1] = 3
	wb, err := b.Words(short(t))
	if err != nil || wb[1<<20-1] != 3 {
		t.Fatal(err)
	}
	if err := b.MakeWords(); err == nil {
		t.Error("words made twice")
	}
}

// TestBulk sends more than the backlog both ways, from several goroutines.
func TestBulk(t *testing.T) {
	links(t, func(t *testing.T, change func(*Config)) {
		const senders, each = 4, 100
		var good, bad atomic.Int64
		check := func(next []uint64) func(*Peer, *device.Frame) {
			return func(_ *Peer, f *device.Frame) {
				ok := len(f.Payload) == wire.MaxPayload && f.Seq == next[f.Tag]
				next[f.Tag]++
				if ok && binary.LittleEndian.Uint64(f.Payload[wire.MaxPayload-8:]) == f.Seq {
					good.Add(1)
				} else {
					bad.Add(1)
				}
			}
		}
		ra, rb := newRec(), newRec()
		ra.frame, rb.frame = check(make([]uint64, senders)), check(make([]uint64, senders))
		_, _, ab, ba := pair(t, ra, rb, change)
		start := time.Now()
		var wg sync.WaitGroup
		for s := range senders {
			for _, p := range []*Peer{ab, ba} {
				wg.Go(func() {
					b := make([]byte, wire.MaxPayload)
					for k := range each {
						binary.LittleEndian.PutUint64(b[wire.MaxPayload-8:], uint64(k))
						f := frame(uint64(k), b)
						f.Tag = uint32(s)
						for {
							err := p.Send(f)
							if err == nil {
								break
							}
							if err != device.ErrFull {
								t.Error(err)
								return
							}
							time.Sleep(time.Millisecond)
						}
					}
				})
			}
		}
		wg.Wait()
		for end := time.Now().Add(10 * time.Second); good.Load()+bad.Load() < 2*senders*each && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		if good.Load() != 2*senders*each || bad.Load() != 0 {
			t.Errorf("%d good, %d bad", good.Load(), bad.Load())
		}
		t.Logf("%.1f GB/s both ways", float64(2*senders*each*wire.MaxPayload)/time.Since(start).Seconds()/1e9)
	})
}

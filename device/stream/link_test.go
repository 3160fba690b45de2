package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

func sockets(t testing.TB) (a, b int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	return p[0], p[1]
}

// join connects two links anew, as a handshake does.
func join(t testing.TB, a, b *Link) {
	t.Helper()
	ra, ga := a.Reset()
	rb, gb := b.Reset()
	fa, fb := sockets(t)
	if err := a.Attach(fa, rb, ga); err != nil {
		t.Fatal(err)
	}
	if err := b.Attach(fb, ra, gb); err != nil {
		t.Fatal(err)
	}
}

func two(t testing.TB, sum bool) (a, b *Link) {
	a, b = New(Options{Peer: "b", Sum: sum}), New(Options{Peer: "a", Sum: sum})
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func data(seq uint64, n int) *device.Frame {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(seq) + byte(i)
	}
	return &device.Frame{Header: wire.Header{Kind: wire.KindData, Seq: seq, Length: uint32(n), Total: uint64(n)}, Payload: p}
}

// inOrder checks that frames come once, in order and whole.
type inOrder struct {
	t    testing.TB
	next uint64
}

func (o *inOrder) frame(f *device.Frame) {
	if f.Seq != o.next {
		o.t.Errorf("frame %d, want %d", f.Seq, o.next)
	}
	o.next = f.Seq + 1
	for i, v := range f.Payload {
		if v != byte(f.Seq)+byte(i) {
			o.t.Errorf("frame %d: byte %d is wrong", f.Seq, i)
			break
		}
	}
}

func TestOrderAndSizes(t *testing.T) {
	a, b := two(t, true)
	join(t, a, b)
	in := inOrder{t: t}
	seq := uint64(0)
	for _, n := range []int{0, 1, 127, 4096, smallChunk - wire.Size, smallChunk - wire.Size + 1, wire.MaxPayload, 3, wire.MaxPayload, 5} {
		for range 3 {
			if err := a.Send(data(seq, n)); err != nil {
				t.Fatal(err)
			}
			seq++
			_, _ = a.Poll(nil)
			if _, err := b.Poll(in.frame); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 100 {
		_, _ = a.Poll(func(*device.Frame) {})
		_, _ = b.Poll(in.frame)
	}
	if in.next != seq {
		t.Errorf("%d of %d frames came", in.next, seq)
	}
	f := data(0, 5)
	f.Length = 4
	if err := a.Send(f); err == nil {
		t.Error("a wrong length is accepted")
	}
}

func TestFull(t *testing.T) {
	a, b := two(t, false)
	seq := uint64(0)
	fill := func() {
		for {
			err := a.Send(data(seq, 100<<10))
			if err == device.ErrFull {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			seq++
		}
	}
	fill() // not connected
	if n := int(seq) * (100<<10 + wire.Size); n < defaultBacklog || n > defaultBacklog+128<<10 {
		t.Errorf("%d bytes wait", n)
	}
	c := data(seq, 10)
	c.Kind = wire.KindControl
	c.Total = 0
	if err := a.Send(c); err != nil {
		t.Error("control is refused:", err)
	}
	seq++
	join(t, a, b)
	fill() // connected, but the peer does not read
	in := inOrder{t: t}
	for end := time.Now().Add(5 * time.Second); in.next != seq && time.Now().Before(end); {
		_, _ = b.Poll(in.frame)
		_, _ = a.Poll(func(*device.Frame) {})
	}
	if in.next != seq {
		t.Errorf("%d of %d", in.next, seq)
	}
	a.wmu.Lock()
	if a.q.retained > defaultBacklog/8 {
		t.Errorf("%d bytes are retained after the peer has read everything", a.q.retained)
	}
	a.wmu.Unlock()
	if err := a.Send(data(seq, 0)); err != nil {
		t.Error(err)
	}
}

// TestCut breaks the connection again and again while both sides send, and nothing is lost or comes twice.
func TestCut(t *testing.T) {
	a, b := two(t, true)
	join(t, a, b)
	const frames = 1500
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i, l := range []*Link{a, b} {
		r := rand.New(rand.NewPCG(1, uint64(i)))
		wg.Go(func() {
			for s := uint64(0); s < frames; {
				err := l.Send(data(s, r.IntN(20000)))
				switch err {
				case nil:
					s++
				case device.ErrFull:
					time.Sleep(100 * time.Microsecond)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	ina, inb := inOrder{t: t}, inOrder{t: t}
	r := rand.New(rand.NewPCG(2, 3))
	cuts := 0
	for end := time.Now().Add(20 * time.Second); (ina.next < frames || inb.next < frames) && time.Now().Before(end); {
		_, _ = a.Poll(ina.frame)
		_, _ = b.Poll(inb.frame)
		if r.IntN(4) == 0 {
			cuts++
			switch r.IntN(4) {
			case 0: // one side's descriptor dies under it
				a.WithFd(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })
			case 1:
				b.WithFd(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_WR) })
			case 2: // rubbish in the stream
				a.WithFd(func(fd int) {
					_, _ = send(fd, []byte("rubbish of more than one header, which is enough: "+string(make([]byte, 128))))
				})
			}
			for range r.IntN(3) {
				_, _ = a.Poll(ina.frame)
				_, _ = b.Poll(inb.frame)
			}
			if r.IntN(5) > 0 {
				join(t, a, b)
			}
		}
		if a.Down() != nil || b.Down() != nil {
			join(t, a, b)
		}
	}
	close(stop)
	wg.Wait()
	if ina.next != frames || inb.next != frames {
		t.Errorf("%d and %d of %d frames came", ina.next, inb.next, frames)
	}
	t.Logf("%d cuts", cuts)
}

func TestBadChecksumCostsTheConnectionOnly(t *testing.T) {
	a, b := two(t, true)
	ra, ga := a.Reset()
	_, gb := b.Reset()
	fa, x := sockets(t)
	y, fb := sockets(t)
	if err := errors.Join(a.Attach(fa, 0, ga), b.Attach(fb, ra, gb)); err != nil {
		t.Fatal(err)
	}
	if err := a.Send(data(0, 100)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1000)
	n, _ := recv(x, buf)
	buf[200] ^= 1
	_, _ = send(y, buf[:n])
	in := inOrder{t: t}
	if _, err := b.Poll(in.frame); err != nil || b.Down() == nil || in.next != 0 {
		t.Error(err, b.Down(), in.next)
	}
	unix.Close(x)
	unix.Close(y)
	join(t, a, b)
	if _, err := b.Poll(in.frame); err != nil || in.next != 1 {
		t.Error(err, in.next)
	}
}

func TestAttachThatCanNotBe(t *testing.T) {
	a, b := two(t, false)
	join(t, a, b)
	for i := range uint64(10) {
		_ = a.Send(data(i, 10))
		_ = b.Send(data(i, 10))
		_, _ = b.Poll(func(*device.Frame) {})
		_, _ = a.Poll(func(*device.Frame) {})
	}
	_, g := a.Reset()
	f1, f2 := sockets(t)
	unix.Close(f2)
	if err := a.Attach(f1, 5, g-1); err != ErrStale {
		t.Error(err)
	}
	f1, f2 = sockets(t)
	unix.Close(f2)
	if err := a.Attach(f1, 1000, g); !errors.Is(err, device.ErrLost) {
		t.Error(err)
	}
	if err := a.Send(data(0, 0)); !errors.Is(err, device.ErrLost) {
		t.Error(err)
	}
	b.Close()
	if _, err := b.Poll(nil); !errors.Is(err, device.ErrClosed) {
		t.Error(err)
	}
}

// TestCloseRaces closes and cuts under senders and a poller.
func TestCloseRaces(t *testing.T) {
	for range 30 {
		a, b := two(t, false)
		join(t, a, b)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for i := uint64(0); ; i++ {
					if err := a.Send(data(i, 3000)); err != nil && err != device.ErrFull {
						return
					}
					a.Fd()
					a.Pending()
				}
			})
		}
		for range 20 {
			_, _ = a.Poll(func(*device.Frame) {})
			_, _ = b.Poll(func(*device.Frame) {})
		}
		wg.Go(func() { a.Reset() })
		a.Close()
		b.Close()
		wg.Wait()
	}
}

// FuzzReader feeds frames, broken or not, in pieces.
func FuzzReader(f *testing.F) {
	var good []byte
	for i := range uint64(3) {
		d := data(i, int(i)*50)
		b := make([]byte, wire.Size)
		d.Put(b, d.Payload, true)
		good = append(append(good, b...), d.Payload...)
	}
	f.Add(good, uint64(1), true)
	f.Add(good[:200], uint64(7), false)
	f.Add([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"+string(make([]byte, 200))), uint64(3), false)
	f.Fuzz(func(t *testing.T, in []byte, seed uint64, sum bool) {
		whole, werr := read(in, sum, func() int { return len(in) })
		r := rand.New(rand.NewPCG(seed, 1))
		parts, perr := read(in, sum, func() int { return 1 + r.IntN(300) })
		if !bytes.Equal(whole, parts) || (werr == nil) != (perr == nil) {
			t.Errorf("in one piece: %d bytes, %v; in parts: %d bytes, %v", len(whole), werr, len(parts), perr)
		}
	})
}

// read returns a digest of the frames of in, which comes in pieces of the given sizes.
func read(in []byte, sum bool, piece func() int) (out []byte, err error) {
	d := reader{sum: sum, size: bufSize}
	var f device.Frame
	for len(in) > 0 {
		n := copy(d.room(), in[:min(piece(), len(in))])
		d.fed(n)
		in = in[n:]
		for {
			ok, err := d.next(&f)
			if err != nil {
				return out, err
			}
			if !ok {
				break
			}
			out = binary.LittleEndian.AppendUint64(out, f.Seq)
			out = append(out, f.Payload...)
		}
	}
	return out, nil
}

// FuzzLink feeds a link from a peer that speaks well-formed frames with arbitrary link numbers.
func FuzzLink(f *testing.F) {
	f.Add([]byte{1, 0, 2, 0, 3, 0, 2, 1, 9, 9})
	f.Fuzz(func(t *testing.T, in []byte) {
		l := New(Options{Peer: "x"})
		defer l.Close()
		_, g := l.Reset()
		fd, x := sockets(t)
		defer unix.Close(x)
		if err := l.Attach(fd, 0, g); err != nil {
			t.Fatal(err)
		}
		_ = l.Send(data(0, 10))
		_ = l.Send(data(1, 10))
		want := uint64(1)
		for i := 0; i+1 < len(in) && i < 200; i += 2 {
			h := wire.Header{Kind: wire.KindControl, LinkSeq: uint64(in[i]), LinkAck: uint64(in[i+1])}
			var b [wire.Size]byte
			h.Put(b[:], nil, false)
			_, _ = send(x, b[:])
			if _, err := l.Poll(func(f *device.Frame) {
				if f.LinkSeq != want {
					t.Errorf("frame %d, want %d", f.LinkSeq, want)
				}
				want++
			}); err != nil {
				t.Error(err)
			}
		}
	})
}

func BenchmarkPingPong(b *testing.B) {
	x, y := two(b, false)
	join(b, x, y)
	f := data(1, 64)
	got := func(*device.Frame) {}
	b.ReportAllocs()
	for b.Loop() {
		_ = x.Send(f)
		_, _ = y.Poll(got)
		_ = y.Send(f)
		_, _ = x.Poll(got)
	}
}

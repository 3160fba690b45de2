package mesh

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

func benchLinks(b *testing.B, f func(b *testing.B, change func(*Config))) {
	quiet := func(c *Config) { c.Log = nil }
	b.Run("shm", func(b *testing.B) { f(b, quiet) })
	b.Run("tcp", func(b *testing.B) { f(b, func(c *Config) { quiet(c); c.Links = "tcp" }) })
	b.Run("tcp without checksum", func(b *testing.B) {
		f(b, func(c *Config) { quiet(c); c.Links = "tcp"; c.NoChecksum = true })
	})
}

// BenchmarkPingPong is a round trip between two loops.
func BenchmarkPingPong(b *testing.B) {
	benchLinks(b, func(b *testing.B, change func(*Config)) {
		ra, rb := newRec(), newRec()
		back := make(chan struct{}, 1)
		n := 0
		f := frame(1, make([]byte, 64))
		rb.frame = func(p *Peer, f *device.Frame) { _ = p.Send(f) }
		ra.frame = func(p *Peer, _ *device.Frame) {
			if n--; n > 0 {
				_ = p.Send(f)
			} else {
				back <- struct{}{}
			}
		}
		_, _, ab, _ := pair(b, ra, rb, change)
		b.ResetTimer()
		n = b.N
		_ = ab.Send(f)
		<-back
	})
}

// BenchmarkStream sends the largest frames one way.
func BenchmarkStream(b *testing.B) {
	benchLinks(b, func(b *testing.B, change func(*Config)) {
		rb := newRec()
		done := make(chan struct{})
		rb.frame = func(_ *Peer, f *device.Frame) {
			if f.Seq == uint64(b.N)-1 {
				close(done)
			}
		}
		_, _, ab, _ := pair(b, newRec(), rb, change)
		p := make([]byte, wire.MaxPayload)
		f := frame(0, p)
		b.SetBytes(wire.MaxPayload)
		done = make(chan struct{})
		b.ResetTimer()
		for i := range uint64(b.N) {
			binary.LittleEndian.PutUint64(p, i)
			f.Seq = i
			for ab.Send(f) == device.ErrFull {
				time.Sleep(50 * time.Microsecond)
			}
		}
		<-done
	})
}

package devicetest

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// stream is a sequence of frames that follows from its seed: the sender makes frame n, the receiver makes it too and
// compares.
type stream struct {
	seed  uint64
	tag   uint32
	world [16]byte
	size  func(n uint64) int
	kind  wire.Kind // 0: all kinds that the users of a link send
	n     uint64    // frames sent, or received
	f     device.Frame
	buf   []byte
}

var kinds = [...]wire.Kind{
	wire.KindData, wire.KindControl, wire.KindData, wire.KindHold, wire.KindAgent, wire.KindNeed, wire.KindForward,
	wire.KindDone, wire.KindP2P,
}

// mix is a hash of x (splitmix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// small sizes: mostly a few bytes, now and then some thousand.
func small(n uint64) int {
	r := mix(n)
	if r%16 == 0 {
		return int(r >> 8 % 6000)
	}
	return int(r >> 8 % 200)
}

// large sizes: up to the largest.
func large(n uint64) int { return int(mix(n) % (wire.MaxPayload + 1)) }

// noise is what payloads are cut out of: fast also under the race detector.
var noise = func() []byte {
	b := make([]byte, 0, wire.MaxPayload+noiseExtra)
	for i := uint64(0); len(b) < cap(b); i++ {
		b = binary.LittleEndian.AppendUint64(b, mix(i))
	}
	return b
}()

const noiseExtra = 64 << 10

// frame is frame n. It is valid until the next call.
func (s *stream) frame() *device.Frame {
	r := mix(s.seed<<32 + s.n)
	size := s.size(s.n)
	kind := s.kind
	if kind == 0 {
		kind = kinds[r%uint64(len(kinds))]
	}
	if cap(s.buf) < size {
		s.buf = make([]byte, max(size, 8192))
	}
	s.buf = s.buf[:size]
	copy(s.buf, noise[mix(r)%noiseExtra:])
	s.f.Header = wire.Header{
		Length: uint32(size), Kind: kind, Op: uint8(r), Phase: uint8(r >> 8), Flags: uint8(r >> 16), World: s.world,
		Group: mix(r + 1), Version: mix(r + 2), Seq: s.n, Completed: mix(r + 3), Slot: uint16(r >> 24), To: uint16(r >> 40),
		Inc: uint32(r >> 32), SetDigest: mix(r + 4), CallDigest: mix(r + 5), Offset: r >> 40, Total: r>>40 + uint64(size),
		Tag: s.tag, ToInc: uint32(r >> 20),
	}
	s.f.Payload = s.buf
	return &s.f
}

// check compares a received frame with the one that is expected next.
func (s *stream) check(f *device.Frame) error {
	want := s.frame()
	h := f.Header
	h.LinkSeq, h.LinkAck = 0, 0
	if h.Seq != s.n {
		return fmt.Errorf("frame %d of stream %d, want frame %d: lost, doubled or out of order", h.Seq, s.tag, s.n)
	}
	if h != want.Header {
		return fmt.Errorf("frame %d of stream %d has header\n%+v, want\n%+v", s.n, s.tag, h, want.Header)
	}
	if len(f.Payload) != int(f.Length) {
		return fmt.Errorf("frame %d of stream %d has a payload of %d bytes, its header says %d", s.n, s.tag, len(f.Payload), f.Length)
	}
	if !bytes.Equal(f.Payload, want.Payload) {
		i := 0
		for f.Payload[i] == want.Payload[i] {
			i++
		}
		return fmt.Errorf("frame %d of stream %d: byte %d of %d is %#x, want %#x", s.n, s.tag, i, f.Length, f.Payload[i], want.Payload[i])
	}
	s.n++
	return nil
}

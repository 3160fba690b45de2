// Package wire is the frame header that every link carries, and the digests in it.
package wire

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Header precedes every frame between processes; a slot in shared memory carries the same facts in its own layout
// (collectives). Little endian, 128 bytes:
//
//	 0  magic 'S' 'Y'          2  version major  3  minor
//	 4  crc32c over bytes 8.. of the header and the payload (0: not checked)
//	 8  length of the payload (19 bits) and a check of it (13)  12 kind  13 operation  14 phase  15 flags
//	16  world id (16 bytes)
//	32  group id               40 group version
//	48  sequence               56 completed-through
//	64  slot (2)  66 to slot (2)  68 incarnation (4)
//	72  digest of the set      80 digest of the call
//	88  offset of this payload in the whole  96 length of the whole
//	104 tag (4)  108 to incarnation (4)
//	112 link sequence          120 link acknowledgement (both the link's own)
//
// The length has a check of its own: the checksum is looked at when the payload is there, and with a wrong bit in the length
// that may be never.
//
// What a field says is the kind's business. Data, hold, need, forward and done: sequence and phase are the operation's,
// version is the group's, completed-through is the sender's. Need and forward: tag is the rank in the group (not the slot)
// of who contributed. P2P (pg) is outside of the group's sequence, and uses these fields in its own way; its counts are of
// bytes, 256 more for each message, of one process to another in a group, from the first message on:
//
//	flags 0  a part of a message: tag is the caller's, version the group's when it was sent, offset and length of the whole
//	         the message's; sequence is the count of what was sent, this message with it
//	flags 1  (credit) completed-through: the count of what the receiver does not hold any more
//	flags 2  (ask) the sender waits for credit: sequence is the count sent, completed-through the credit that it knows of
//	flags 3  (cancel) the rest of the last message does not come: sequence is the count sent
//
// Flags are 0 in all other kinds.
type Header struct {
	Length     uint32
	Kind       Kind
	Op, Phase  uint8
	Flags      uint8
	World      [16]byte
	Group      uint64
	Version    uint64
	Seq        uint64
	Completed  uint64
	Slot, To   uint16
	Inc        uint32
	SetDigest  uint64
	CallDigest uint64
	Offset     uint64
	Total      uint64
	Tag        uint32
	ToInc      uint32
	LinkSeq    uint64
	LinkAck    uint64
}

// Kind says whom a frame is for.
type Kind uint8

// The kinds. Below KindControl a frame is the link's own business.
const (
	KindHello     Kind = 1  // the handshake of a link
	KindAck       Kind = 2  // nothing but the link acknowledgement
	KindHeartbeat Kind = 3  // liveness, with a counter in Seq
	KindControl   Kind = 16 // payload: a message of package fault
	KindAgent     Kind = 17 // reserved: nobody sends it, and who gets it drops it
	KindData      Kind = 32 // a part of a contribution to an operation
	KindHold      Kind = 33 // "I hold all of Seq"
	KindNeed      Kind = 34 // asks for the contribution of rank Tag of the group to Seq
	KindForward   Kind = 35 // answers it: the contribution of rank Tag
	KindDone      Kind = 36 // nothing but completed-through
	KindP2P       Kind = 37 // send/recv, and its window: see Flags in Header
)

// Size of an encoded Header in bytes.
const Size = 128

// The version that this code speaks. The same major and minor interoperate.
const (
	Major = 1
	Minor = 0
)

// MaxPayload bounds the payload of one frame.
const MaxPayload = 256 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Put writes h and, if sum, the checksum over it and the payload into b, which has at least Size bytes.
func (h *Header) Put(b []byte, payload []byte, sum bool) {
	_ = b[Size-1]
	le := binary.LittleEndian
	b[0], b[1], b[2], b[3] = 'S', 'Y', Major, Minor
	le.PutUint32(b[8:], h.Length|checkOf(h.Length)<<lengthBits)
	b[12], b[13], b[14], b[15] = byte(h.Kind), h.Op, h.Phase, h.Flags
	copy(b[16:32], h.World[:])
	le.PutUint64(b[32:], h.Group)
	le.PutUint64(b[40:], h.Version)
	le.PutUint64(b[48:], h.Seq)
	le.PutUint64(b[56:], h.Completed)
	le.PutUint16(b[64:], h.Slot)
	le.PutUint16(b[66:], h.To)
	le.PutUint32(b[68:], h.Inc)
	le.PutUint64(b[72:], h.SetDigest)
	le.PutUint64(b[80:], h.CallDigest)
	le.PutUint64(b[88:], h.Offset)
	le.PutUint64(b[96:], h.Total)
	le.PutUint32(b[104:], h.Tag)
	le.PutUint32(b[108:], h.ToInc)
	le.PutUint64(b[112:], h.LinkSeq)
	le.PutUint64(b[120:], h.LinkAck)
	var c uint32
	if sum {
		c = crc32.Update(crc32.Update(0, castagnoli, b[8:Size]), castagnoli, payload)
		if c == 0 {
			c = 1
		}
	}
	le.PutUint32(b[4:], c)
}

const lengthBits = 19

func checkOf(length uint32) uint32 { return length * 0x9e3779b1 >> lengthBits }

// LengthOf is the payload's length in an encoded header that is known to be whole.
func LengthOf(b []byte) int { return int(binary.LittleEndian.Uint32(b[8:]) & (1<<lengthBits - 1)) }

// Parse reads the header at the start of b and checks all that can be known before the payload is there.
func (h *Header) Parse(b []byte) error {
	if len(b) < Size {
		return fmt.Errorf("wire: header of %d bytes, want %d", len(b), Size)
	}
	if b[0] != 'S' || b[1] != 'Y' {
		return fmt.Errorf("wire: not a serry peer: starts with % x", b[:4])
	}
	if b[2] != Major || b[3] != Minor {
		return fmt.Errorf("wire: peer speaks version %d.%d, this is %d.%d: run the same serry on all ranks", b[2], b[3], Major, Minor)
	}
	le := binary.LittleEndian
	x := le.Uint32(b[8:])
	if h.Length = x & (1<<lengthBits - 1); x>>lengthBits != checkOf(h.Length) {
		return fmt.Errorf("wire: the length of a frame is damaged (%08x)", x)
	}
	if h.Length > MaxPayload {
		return fmt.Errorf("wire: frame of %d bytes, at most %d are allowed", h.Length, MaxPayload)
	}
	h.Kind, h.Op, h.Phase, h.Flags = Kind(b[12]), b[13], b[14], b[15]
	copy(h.World[:], b[16:32])
	h.Group, h.Version = le.Uint64(b[32:]), le.Uint64(b[40:])
	h.Seq, h.Completed = le.Uint64(b[48:]), le.Uint64(b[56:])
	h.Slot, h.To, h.Inc = le.Uint16(b[64:]), le.Uint16(b[66:]), le.Uint32(b[68:])
	h.SetDigest, h.CallDigest = le.Uint64(b[72:]), le.Uint64(b[80:])
	h.Offset, h.Total = le.Uint64(b[88:]), le.Uint64(b[96:])
	h.Tag, h.ToInc = le.Uint32(b[104:]), le.Uint32(b[108:])
	h.LinkSeq, h.LinkAck = le.Uint64(b[112:]), le.Uint64(b[120:])
	if h.Kind >= KindData && (h.Offset > h.Total || uint64(h.Length) > h.Total-h.Offset) {
		return fmt.Errorf("wire: fragment %d+%d of slot %d lies outside of its %d bytes", h.Offset, h.Length, h.Slot, h.Total)
	}
	return nil
}

// Check verifies the checksum of an encoded header and its payload; a frame sent without one passes.
func Check(b, payload []byte) error {
	want := binary.LittleEndian.Uint32(b[4:])
	if want == 0 {
		return nil
	}
	c := crc32.Update(crc32.Update(0, castagnoli, b[8:Size]), castagnoli, payload)
	if c == 0 {
		c = 1
	}
	if c != want {
		return fmt.Errorf("wire: checksum %08x, header says %08x", c, want)
	}
	return nil
}

// Hash continues an FNV-1a digest h (0 to start) with x.
func Hash(h, x uint64) uint64 {
	if h == 0 {
		h = 14695981039346656037
	}
	for range 8 {
		h = (h ^ x&255) * 1099511628211
		x >>= 8
	}
	return h
}

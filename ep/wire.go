package ep

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// A part, what one rank gives another in one half, is a header and, unless it is poisoned, what the half carries.
// Little endian. Parts are rounded up to a multiple of 16 bytes.
//
//	 0             4      5       6        7       8          12         16       20
//	+-------------+------+-------+--------+-------+----------+----------+--------+-----------+
//	| 'S' 'E' 'P' | half | flags | reason | dtype | tokens   | hidden   | topk   | experts   |
//	| version     |      |       |        |       |          |          |        |           |
//	+-------------+------+-------+--------+-------+----------+----------+--------+-----------+
//	24                    32                        40                            48
//	+---------------------+-------------------------+-----------------------------+
//	| config digest       | placement digest        | version of the group        |
//	+---------------------+-------------------------+-----------------------------+
//	48           52         56           60           64
//	+------------+----------+------------+------------+
//	| entries    | rows     | detail     | crc32c of  |
//	| or A       | or blame | B          | bytes 0-59 |
//	+------------+----------+------------+------------+
//
// flags: 1 = poison; then A and B are details of the reason, blame is the rank that gave the step up first as far as the
// sender knows (itself, mostly), and nothing follows.
//
// Dispatch: entries of 8 bytes, ascending by (token, k):
//
//	+------------+--------+---------+
//	| token u32  | k u16  | expert  |
//	+------------+--------+---------+
//
// then one row for each distinct token among them, in order: a token that goes to a rank for several of its experts is
// sent there once. Combine: one row for each entry that was received from that rank, in the entries' order. Open: the
// values of Config.fields, 8 bytes each.
const (
	headerBytes = 64
	entryBytes  = 8
	partAlign   = 16
	wireVersion = 1
	flagPoison  = 1
)

type half uint8

const (
	halfOpen half = 1 + iota
	halfDispatch
	halfCombine
)

type header struct {
	half      half
	flags     uint8
	reason    Reason
	dtype     DType
	tokens    uint32
	hidden    uint32
	topK      uint32
	experts   uint32
	config    uint64
	placement uint64
	version   uint64
	entries   uint32 // or A
	rows      uint32 // or blame
	detail    uint32 // B
}

func (h *header) poisoned() bool { return h.flags&flagPoison != 0 }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (h *header) put(b []byte) {
	_ = b[headerBytes-1]
	le := binary.LittleEndian
	b[0], b[1], b[2], b[3] = 'S', 'E', 'P', wireVersion
	b[4], b[5], b[6], b[7] = byte(h.half), h.flags, byte(h.reason), byte(h.dtype)
	le.PutUint32(b[8:], h.tokens)
	le.PutUint32(b[12:], h.hidden)
	le.PutUint32(b[16:], h.topK)
	le.PutUint32(b[20:], h.experts)
	le.PutUint64(b[24:], h.config)
	le.PutUint64(b[32:], h.placement)
	le.PutUint64(b[40:], h.version)
	le.PutUint32(b[48:], h.entries)
	le.PutUint32(b[52:], h.rows)
	le.PutUint32(b[56:], h.detail)
	le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
}

// parse reads the header at the start of a part. The part may change under our hands (it is another process's memory),
// so the bytes are copied to raw first.
func (h *header) parse(part []byte, raw *[headerBytes]byte) error {
	if len(part) < headerBytes {
		return fmt.Errorf("%d bytes, a header has %d", len(part), headerBytes)
	}
	b := raw[:]
	copy(b, part)
	if b[0] != 'S' || b[1] != 'E' || b[2] != 'P' {
		return fmt.Errorf("starts with % x", b[:4])
	}
	if b[3] != wireVersion {
		return fmt.Errorf("wire version %d, this is %d: run the same serry on all ranks", b[3], wireVersion)
	}
	le := binary.LittleEndian
	if got, want := crc32.Checksum(b[:60], castagnoli), le.Uint32(b[60:]); got != want {
		return fmt.Errorf("header checksum %08x, want %08x", got, want)
	}
	*h = header{
		half: half(b[4]), flags: b[5], reason: Reason(b[6]), dtype: DType(b[7]),
		tokens: le.Uint32(b[8:]), hidden: le.Uint32(b[12:]), topK: le.Uint32(b[16:]), experts: le.Uint32(b[20:]),
		config: le.Uint64(b[24:]), placement: le.Uint64(b[32:]), version: le.Uint64(b[40:]),
		entries: le.Uint32(b[48:]), rows: le.Uint32(b[52:]), detail: le.Uint32(b[56:]),
	}
	if h.poisoned() && (h.reason == ReasonNone || h.reason >= reasons) {
		return fmt.Errorf("poison of %v", h.reason)
	}
	return nil
}

// entry is one element of the index of a dispatch part.
type entry struct {
	token uint32
	k     uint16
	exp   uint16
}

func (e entry) put(b []byte) {
	_ = b[entryBytes-1]
	binary.LittleEndian.PutUint32(b, e.token)
	binary.LittleEndian.PutUint16(b[4:], e.k)
	binary.LittleEndian.PutUint16(b[6:], e.exp)
}

func getEntry(b []byte) entry {
	v := binary.LittleEndian.Uint64(b)
	return entry{token: uint32(v), k: uint16(v >> 32), exp: uint16(v >> 48)}
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// dispatchPart is the size of a dispatch part.
func dispatchPart(entries, rows, rowBytes int) int {
	return roundUp(headerBytes+entries*entryBytes+rows*rowBytes, partAlign)
}

// combinePart is the size of a combine part.
func combinePart(rows, rowBytes int) int { return roundUp(headerBytes+rows*rowBytes, partAlign) }

// openBytes is the size of all parts that Open sends.
func openBytes(ranks int) int { return ranks * roundUp(headerBytes+8*nFields, partAlign) }

// fits checks the size of a dispatch part with a well-formed header.
func (h *header) fits(part []byte, rowBytes int) error {
	if want := dispatchPart(int(h.entries), int(h.rows), rowBytes); len(part) != want {
		return fmt.Errorf("%d bytes, want %d for %d entries and %d rows", len(part), want, h.entries, h.rows)
	}
	if uint64(h.entries) > uint64(h.tokens)*uint64(h.topK) {
		return fmt.Errorf("%d entries of %d tokens", h.entries, h.tokens)
	}
	return nil
}

// parseEntries reads the index of a part that fits into dst, which has h.entries elements, and checks all of it: the
// order, the ranges, the number of rows. local[e] >= 0 says that this rank holds expert e.
func (h *header) parseEntries(part []byte, local []int32, dst []entry) error {
	b := part[headerBytes:]
	rows, lastToken, lastK := uint32(0), uint32(0), -1
	for i := range dst {
		e := getEntry(b[i*entryBytes:])
		dst[i] = e
		if e.token >= h.tokens || uint32(e.k) >= h.topK {
			return fmt.Errorf("entry %d is of token %d, choice %d: there are %d, %d", i, e.token, e.k, h.tokens, h.topK)
		}
		switch {
		case i == 0 || e.token > lastToken:
			rows++
		case e.token < lastToken || int(e.k) <= lastK:
			return fmt.Errorf("entry %d is out of order", i)
		}
		lastToken, lastK = e.token, int(e.k)
		if int(e.exp) >= len(local) || local[e.exp] < 0 {
			return fmt.Errorf("entry %d is for expert %d, which is not here", i, e.exp)
		}
	}
	if rows != h.rows {
		return fmt.Errorf("%d rows for %d distinct tokens", h.rows, rows)
	}
	return nil
}

// parseCombine checks the size of a combine part: rows is what this rank gave that one to compute.
func (h *header) parseCombine(part []byte, rowBytes, rows int) error {
	if int(h.rows) != rows {
		return fmt.Errorf("%d rows came back, %d went there", h.rows, rows)
	}
	if want := combinePart(rows, rowBytes); len(part) != want {
		return fmt.Errorf("%d bytes, want %d for %d rows", len(part), want, rows)
	}
	return nil
}

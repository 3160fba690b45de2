package agent

import (
	"encoding/binary"

	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/fault"
)

// board is the vote of this process in its own shared memory, two copies deep, and the reading of others':
//
//	0    which: sequence of the last published record; record (which & 1) is whole
//	128  record 0, and at half of the board record 1:
//	     {sequence (8), length (4), slot (4), inc (4), ..., from 32: epoch (8), promised (8), accepted (8),
//	     then the value and each of the past values: length (4), bytes}
//
// A reader copies the record and believes it if its sequence and the word still agree.
type board struct {
	own  []byte
	self fault.ID
	seq  uint64
	of   func(fault.ID) []byte
}

func newBoard(m Mesh, self fault.ID, of func(fault.ID) []byte) *board {
	b := &board{own: m.Board(), self: self, of: of}
	if len(b.own) > 0 {
		b.seq = host.Word64(b.own, 0).Load()
	}
	return b
}

const recHead = 32

func recAt(b []byte, seq uint64) []byte {
	if seq&1 == 0 {
		return b[128 : len(b)/2]
	}
	return b[len(b)/2:]
}

func putBallot(p []byte, b fault.Ballot) {
	binary.LittleEndian.PutUint64(p, uint64(b.Num)<<16|uint64(b.Slot))
}

func getBallot(p []byte) fault.Ballot {
	x := binary.LittleEndian.Uint64(p)
	return fault.Ballot{Num: uint32(x >> 16), Slot: uint16(x)}
}

func sizeOf(parts [][]byte) (n int) {
	for _, x := range parts {
		n += 4 + len(x)
	}
	return n
}

// Publish implements fault.Board.
func (b *board) Publish(r fault.Record) {
	if len(b.own) == 0 {
		return
	}
	b.seq++
	p := recAt(b.own, b.seq)
	parts := append([][]byte{r.Value}, r.Past...)
	for len(parts) > 1 && recHead+24+sizeOf(parts) > len(p) {
		parts = append(parts[:1], parts[2:]...)
	}
	if recHead+24+sizeOf(parts) > len(p) {
		parts[0] = nil // too many members for the board: who reads it sees an acceptance without its value, and then claims no dead
	}
	host.Begin(host.Word64(p, 0), 0)
	binary.LittleEndian.PutUint32(p[8:], uint32(24+sizeOf(parts)))
	binary.LittleEndian.PutUint32(p[12:], uint32(b.self.Slot))
	binary.LittleEndian.PutUint32(p[16:], b.self.Inc)
	binary.LittleEndian.PutUint64(p[recHead:], r.Epoch)
	putBallot(p[recHead+8:], r.Promised)
	putBallot(p[recHead+16:], r.Accepted)
	at := p[recHead+24:]
	for _, x := range parts {
		binary.LittleEndian.PutUint32(at, uint32(len(x)))
		at = at[4+copy(at[4:], x):]
	}
	host.Word64(p, 0).Store(b.seq)
	host.Word64(b.own, 0).Store(b.seq)
}

// Read implements fault.Board.
func (b *board) Read(id fault.ID) (r fault.Record, ok bool) {
	m := b.own
	if id != b.self {
		m = b.of(id)
	}
	if len(m) == 0 {
		return r, false
	}
	for range 1000 { // a writer that keeps overtaking us is alive and will answer itself
		seq := host.Word64(m, 0).Load()
		if seq == 0 {
			return r, false
		}
		p := recAt(m, seq)
		n := int(binary.LittleEndian.Uint32(p[8:]))
		if n < 24 || recHead+n > len(p) {
			if host.Recheck(host.Word64(p, 0)) == seq {
				return r, false
			}
			continue
		}
		c := append([]byte(nil), p[:recHead+n]...)
		if host.Recheck(host.Word64(p, 0)) != seq {
			continue
		}
		if (fault.ID{Slot: int(binary.LittleEndian.Uint32(c[12:])), Inc: binary.LittleEndian.Uint32(c[16:])}) != id {
			return r, false
		}
		r.Epoch = binary.LittleEndian.Uint64(c[recHead:])
		r.Promised, r.Accepted = getBallot(c[recHead+8:]), getBallot(c[recHead+16:])
		for i, at := 0, c[recHead+24:]; len(at) >= 4; i++ {
			n := binary.LittleEndian.Uint32(at)
			if at = at[4:]; uint64(n) > uint64(len(at)) {
				return r, false
			}
			if i == 0 {
				r.Value = at[:n:n]
			} else {
				r.Past = append(r.Past, at[:n:n])
			}
			at = at[n:]
		}
		return r, true
	}
	return r, false
}

// stepped is a board on which others may run between any two accesses.
type stepped struct {
	*board
	Stepper
}

// Publish implements fault.Board.
func (b stepped) Publish(r fault.Record) {
	b.Step()
	b.board.Publish(r)
	b.Step()
}

// Read implements fault.Board.
func (b stepped) Read(id fault.ID) (fault.Record, bool) {
	b.Step()
	return b.board.Read(id)
}

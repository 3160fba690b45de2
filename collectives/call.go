package collectives

import (
	"fmt"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/internal/wire"
)

// Kind is an operation.
type Kind uint8

// The operations. Their classes decide what a rank waits for before it returns when members are on several hosts.
const (
	Barrier Kind = iota + 1
	AllReduce
	AllGather
	AllToAll
	Broadcast
	Exchange // dispatch and combine, and anything whose parts only the sender can size
)

func (k Kind) String() string {
	switch k {
	case Barrier:
		return "barrier"
	case AllReduce:
		return "all_reduce"
	case AllGather:
		return "all_gather"
	case AllToAll:
		return "all_to_all"
	case Broadcast:
		return "broadcast"
	case Exchange:
		return "exchange"
	}
	return fmt.Sprintf("operation %d", uint8(k))
}

// allHoldTheSame says that who has finished holds what any other lacks (class a); otherwise a rank returns only when
// every member has said that it holds all (class b).
func (k Kind) allHoldTheSame() bool { return k == Barrier || k == AllReduce || k == AllGather }

// Call is one operation as its caller asked for it. All lengths are bytes.
type Call struct {
	Kind   Kind
	DType  dtype.DType
	Reduce dtype.ReduceOp
	Root   int // rank, for Broadcast

	// In is this rank's contribution, Out the result; they may be the same memory (in place), else must not overlap.
	// AllReduce, Broadcast: equal lengths. AllGather: Out has all contributions in rank order. AllToAll: In and Out are
	// the parts in rank order, sized by InParts and OutParts.
	In, Out []byte
	// InParts[r], OutParts[r]: AllToAll, bytes for and from rank r. AllGather: OutParts[r], bytes of rank r, equal on all.
	InParts, OutParts []int

	Deadline time.Duration // equal on all ranks; 0: the group's
	Digest   uint64        // Exchange: the caller's own digest

	// Exchange only. See pg.Exchange.
	Fill func(r int, dst []byte)
	Take func(parts [][]byte) error
}

// ErrBadCall is a call that no peer has to see to know that it is wrong.
type ErrBadCall struct {
	Kind Kind
	Why  string
}

func (e *ErrBadCall) Error() string { return "serry: " + e.Kind.String() + ": " + e.Why }

// check finds what is wrong with a call in a group of size ranks.
func (c *Call) check(size, rank int) error {
	bad := func(f string, a ...any) error { return &ErrBadCall{c.Kind, fmt.Sprintf(f, a...)} }
	sum := func(p []int) (n int, err error) {
		if len(p) != size {
			return 0, bad("%d part sizes given, the group has %d ranks", len(p), size)
		}
		for r, x := range p {
			if x < 0 {
				return 0, bad("part of rank %d has %d bytes", r, x)
			}
			n += x
		}
		return n, nil
	}
	switch c.Kind {
	case Barrier:
		return nil
	case Exchange:
		if c.Fill == nil || c.Take == nil {
			return bad("Fill and Take must be given")
		}
		_, err := sum(c.InParts)
		return err
	case AllReduce, Broadcast, AllGather, AllToAll:
	default:
		return bad("unknown operation")
	}
	es := c.DType.Size()
	if es <= 0 {
		return bad("unknown dtype %v", c.DType)
	}
	if len(c.In)%es != 0 || len(c.Out)%es != 0 {
		return bad("%d bytes in and %d out are not whole elements of %v", len(c.In), len(c.Out), c.DType)
	}
	if c.Kind == AllReduce && c.Reduce != dtype.Sum && c.Reduce != dtype.Avg && c.Reduce != dtype.Max {
		return bad("unknown reduction %v: want sum, avg or max", c.Reduce)
	}
	switch c.Kind {
	case Broadcast:
		if c.Root < 0 || c.Root >= size {
			return bad("root is rank %d, the group has %d ranks", c.Root, size)
		}
		if c.Root != rank {
			return nil
		}
		fallthrough
	case AllReduce:
		if len(c.In) != len(c.Out) {
			return bad("input has %d bytes, output %d", len(c.In), len(c.Out))
		}
	case AllGather:
		n, err := sum(c.OutParts)
		if err != nil {
			return err
		}
		if n != len(c.Out) {
			return bad("parts have %d bytes, the output %d", n, len(c.Out))
		}
		if c.OutParts[rank] != len(c.In) {
			return bad("input has %d bytes, the part of rank %d is %d", len(c.In), rank, c.OutParts[rank])
		}
	case AllToAll:
		ni, err := sum(c.InParts)
		if err != nil {
			return err
		}
		no, err := sum(c.OutParts)
		if err != nil {
			return err
		}
		if ni != len(c.In) || no != len(c.Out) {
			return bad("parts have %d bytes in and %d out, the buffers %d and %d", ni, no, len(c.In), len(c.Out))
		}
	}
	return nil
}

// length is the bytes of this rank's contribution.
func (c *Call) length(rank int) int {
	switch c.Kind {
	case AllReduce, AllGather, AllToAll:
		return len(c.In)
	case Broadcast:
		if c.Root == rank {
			return len(c.In)
		}
	case Exchange:
		n := 0
		for _, x := range c.InParts {
			n += x
		}
		return n
	}
	return 0
}

// header is the part of a call that must be equal on all ranks. In a slot, and at the head of the first frame:
//
//	0 operation  1 dtype  2 reduce  3 phase  4 root (4)
//	8 digest of the rest   16 bytes that must agree   24 deadline (ns)   32 caller's digest   40 digest of the part sizes
//	48 length of this rank's contribution (may differ)   56 AllToAll: what it gives less what it takes (balance)
type header struct {
	kind, dt, red, phase uint8
	root                 uint32
	digest               uint64
	bytes                uint64
	deadline             int64
	caller               uint64
	parts                uint64
	length               uint64
	balance              uint64
}

// balanceOf hashes what a rank gives to the ranks of a version, less what it takes from them. Over all ranks the sum is
// zero if each takes what the other gives, so that whoever decides knows that all sizes fit, also those between others.
func (c *Call) balanceOf(rank int, ranks *slots.Set) (b uint64) {
	pair := func(from, to, n int) uint64 {
		x := (uint64(from)<<42 ^ uint64(to)<<52 ^ uint64(n) + 1) * 0x9e3779b97f4a7c15
		x = (x ^ x>>29) * 0xbf58476d1ce4e5b9
		return x ^ x>>32
	}
	for r := ranks.Next(0); r >= 0; r = ranks.Next(r + 1) {
		b += pair(rank, r, c.InParts[r]) - pair(r, rank, c.OutParts[r])
	}
	return b
}

func (c *Call) header(rank int, phase uint8) (h header) {
	h = header{kind: uint8(c.Kind), phase: phase, deadline: int64(c.Deadline), length: uint64(c.length(rank))}
	switch c.Kind {
	case AllReduce:
		h.dt, h.red, h.bytes = uint8(c.DType), uint8(c.Reduce), uint64(len(c.In))
	case Broadcast:
		h.dt, h.root, h.bytes = uint8(c.DType), uint32(c.Root), uint64(len(c.Out))
	case AllGather:
		h.dt, h.bytes = uint8(c.DType), uint64(len(c.Out))
		for _, p := range c.OutParts {
			h.parts = wire.Hash(h.parts, uint64(p))
		}
	case AllToAll:
		h.dt = uint8(c.DType)
	case Exchange:
		h.caller = c.Digest
	}
	d := uint64(h.kind) | uint64(h.dt)<<8 | uint64(h.red)<<16 | uint64(h.phase)<<24 | uint64(h.root)<<32
	for _, x := range [...]uint64{h.bytes, uint64(h.deadline), h.caller, h.parts} {
		d = (d ^ x) * 0x9e3779b97f4a7c15
		d ^= d >> 29
	}
	h.digest = d
	return h
}

func (h *header) put(b []byte) {
	b[0], b[1], b[2], b[3] = h.kind, h.dt, h.red, h.phase
	le.PutUint32(b[4:], h.root)
	le.PutUint64(b[8:], h.digest)
	le.PutUint64(b[16:], h.bytes)
	le.PutUint64(b[24:], uint64(h.deadline))
	le.PutUint64(b[32:], h.caller)
	le.PutUint64(b[40:], h.parts)
	le.PutUint64(b[48:], h.length)
	le.PutUint64(b[56:], h.balance)
}

func (h *header) get(b []byte) {
	h.kind, h.dt, h.red, h.phase = b[0], b[1], b[2], b[3]
	h.root = le.Uint32(b[4:])
	h.digest, h.bytes, h.deadline = le.Uint64(b[8:]), le.Uint64(b[16:]), int64(le.Uint64(b[24:]))
	h.caller, h.parts, h.length, h.balance = le.Uint64(b[32:]), le.Uint64(b[40:]), le.Uint64(b[48:]), le.Uint64(b[56:])
}

// differs names the first field in which two ranks' calls disagree.
func (h *header) differs(o *header, mine, theirs int) string {
	f := func(field string, a, b any) string {
		return fmt.Sprintf("%s: rank %d has %v, rank %d has %v", field, mine, a, theirs, b)
	}
	switch {
	case h.kind != o.kind:
		return f("operation", Kind(h.kind), Kind(o.kind))
	case h.phase != o.phase:
		return f("phase", h.phase, o.phase)
	case h.dt != o.dt:
		return f("dtype", dtype.DType(h.dt), dtype.DType(o.dt))
	case h.red != o.red:
		return f("reduce op", dtype.ReduceOp(h.red), dtype.ReduceOp(o.red))
	case h.root != o.root:
		return f("root", h.root, o.root)
	case h.bytes != o.bytes:
		return f("length", fmt.Sprint(h.bytes, " bytes"), fmt.Sprint(o.bytes, " bytes"))
	case h.deadline != o.deadline:
		return f("deadline", time.Duration(h.deadline), time.Duration(o.deadline))
	case h.caller != o.caller:
		return f("digest", fmt.Sprintf("%x", h.caller), fmt.Sprintf("%x", o.caller))
	case h.parts != o.parts:
		return f("part sizes", "others", "others")
	}
	return f("call digest", fmt.Sprintf("%x", h.digest), fmt.Sprintf("%x", o.digest))
}

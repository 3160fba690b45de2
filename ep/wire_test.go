package ep

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/serry-project/serry/internal/dtype"
)

func TestHeaderRoundTrip(t *testing.T) {
	h := header{half: halfCombine, flags: flagPoison, reason: ReasonOverflow, dtype: BF16, tokens: 1, hidden: 2, topK: 3, experts: 4,
		config: 5, placement: 6, version: 7, entries: 8, rows: 9, detail: 10}
	b := make([]byte, headerBytes)
	h.put(b)
	var g header
	if err := g.parse(b, new([headerBytes]byte)); err != nil || g != h {
		t.Fatalf("%+v, %v", g, err)
	}
	for i := range headerBytes { // no byte can change unseen
		c := bytes.Clone(b)
		c[i] ^= 0x10
		if err := g.parse(c, new([headerBytes]byte)); err == nil {
			t.Errorf("byte %d may change", i)
		}
	}
	for n := range headerBytes {
		if g.parse(b[:n], new([headerBytes]byte)) == nil {
			t.Errorf("%d bytes are a header", n)
		}
	}
	b[3] = wireVersion + 1
	if err := g.parse(b, new([headerBytes]byte)); err == nil || !strings.Contains(err.Error(), "wire version 2, this is 1") {
		t.Error(err)
	}
}

// part makes a dispatch part of these entries, and its header.
func part(h header, es []entry, rowBytes int) []byte {
	h.half, h.entries = halfDispatch, uint32(len(es))
	b := make([]byte, dispatchPart(len(es), int(h.rows), rowBytes))
	h.put(b)
	for i, e := range es {
		e.put(b[headerBytes+i*entryBytes:])
	}
	return b
}

func TestPartsAreChecked(t *testing.T) {
	local := []int32{0, -1, 1}
	base := header{tokens: 3, topK: 2, experts: 3, rows: 2}
	good := []entry{{0, 0, 0}, {0, 1, 2}, {2, 1, 0}}
	try := func(h header, es []entry, change func(b []byte) []byte) error {
		b := part(h, es, 12)
		if change != nil {
			b = change(b)
		}
		var g header
		if err := g.parse(b, new([headerBytes]byte)); err != nil {
			return err
		}
		if err := g.fits(b, 12); err != nil {
			return err
		}
		return g.parseEntries(b, local, make([]entry, g.entries))
	}
	if err := try(base, good, nil); err != nil {
		t.Fatal(err)
	}
	with := func(i int, e entry) []entry {
		c := append([]entry(nil), good...)
		c[i] = e
		return c
	}
	rows := func(n uint32) header { h := base; h.rows = n; return h }
	for _, c := range []struct {
		want   string
		h      header
		es     []entry
		change func(b []byte) []byte
	}{
		{"want 112", base, good, func(b []byte) []byte { return b[:len(b)-16] }},
		{"want 112", base, good, func(b []byte) []byte { return append(b, make([]byte, 16)...) }},
		{"7 entries of 3 tokens", rows(3), make([]entry, 7), nil},
		{"of token 3", base, with(2, entry{3, 0, 0}), nil},
		{"choice 2", base, with(1, entry{0, 2, 0}), nil},
		{"out of order", base, with(1, entry{0, 0, 0}), nil},
		{"out of order", base, with(2, entry{0, 0, 0}), nil},
		{"expert 1, which is not here", base, with(1, entry{0, 1, 1}), nil},
		{"expert 3, which is not here", base, with(1, entry{0, 1, 3}), nil},
		{"3 rows for 2 distinct", rows(3), good, nil},
		{"1 rows for 2 distinct", rows(1), good, nil},
	} {
		if err := try(c.h, c.es, c.change); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	var h header
	h.rows = 2
	if h.parseCombine(make([]byte, combinePart(2, 12)), 12, 2) != nil {
		t.Error("a good combine part")
	}
	if h.parseCombine(make([]byte, combinePart(2, 12)), 12, 3) == nil || h.parseCombine(make([]byte, 16), 12, 2) == nil {
		t.Error("a bad combine part")
	}
}

// Whatever bytes come as parts: no panic, nothing out of bounds, and no rows from what is not well formed.
func FuzzParts(f *testing.F) {
	cfg := config(f, 4, 2, 3, 8, 2, 2)
	sum := func(b []byte) []byte { // a right checksum lets the fuzzer past it
		if len(b) >= headerBytes {
			c := crc32.Checksum(b[:60], castagnoli)
			b[60], b[61], b[62], b[63] = byte(c), byte(c>>8), byte(c>>16), byte(c>>24)
		}
		return b
	}
	newTarget := func() *slot {
		g := newWorld(2, cfg.SlotBytes(2)).group(0)
		b, err := newBuffer(g, cfg)
		if err != nil {
			f.Fatal(err)
		}
		s := b.slots[0]
		s.active, s.version = g.Active()
		b.retable(s.active, s.version)
		s.x, s.experts = bytesOf(make([]float32, 12)), []int32{0, 1, 2, 3, -1, 0, 1, 1}
		s.route(12, make([]float32, 8))
		s.account(make([]float32, 8))
		s.sizeDispatch()
		return s
	}
	s := newTarget()
	seed := make([]byte, s.disp.Sizes[0])
	s.fillDispatch(0, seed)
	f.Add(seed, seed, false)
	f.Add(seed[:64], seed[:10], true)
	f.Add([]byte{}, []byte(nil), false)
	f.Fuzz(func(t *testing.T, a, b []byte, fix bool) {
		s := newTarget()
		if fix {
			a, b = sum(bytes.Clone(a)), sum(bytes.Clone(b))
		}
		parts := [][]byte{a, b}
		for r := range parts {
			if parts[r] == nil {
				parts[r] = []byte{}
			}
		}
		s.takeDispatch(parts)
		if s.bad() && s.rows != 0 {
			t.Error("rows from a bad part")
		}
		for i, e := range s.rowExp {
			if e < -1 || e >= 4 || s.rowSrc[i] > 1 {
				t.Errorf("row %d is of expert %d from rank %d", i, e, s.rowSrc[i])
			}
		}
		s.takeCombine(parts)
	})
}

// A part that one rank receives broken: an error there, poison of that rank on the others, nobody hangs.
func TestCorruptDispatchPart(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 1)
	w := newWorld(3, cfg.SlotBytes(3))
	hits := 0
	w.corrupt = func(from, to int, half string, part []byte) []byte {
		if from == 0 && to == 1 && half == "dispatch" && part[4] == byte(halfDispatch) && hits == 0 {
			hits++
			part[headerBytes+4] ^= 0xff // the choice of the first entry
		}
		return part
	}
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		copy(b.experts, []int32{0, 1, 2, 3})
		for i := range b.weights {
			b.weights[i] = 1
		}
		r := step(ctx, buf, b)
		wantPoison(t, buf, r.err, 1, ReasonCorrupt)
		var c *ErrCorrupt
		if errors.As(r.err, &c) != (buf.rank == 1) || c != nil && c.Rank != 0 {
			t.Errorf("rank %d: %v", buf.rank, r.err)
		}
		untouched(t, r)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
}

// A combine part that is broken: an error on the rank that has it, out untouched.
func TestCorruptCombinePart(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 1)
	w := newWorld(3, cfg.SlotBytes(3))
	w.corrupt = func(from, to int, half string, part []byte) []byte {
		if from == 0 && to == 1 && half == "combine" && len(part) > 0 && part[4] == byte(halfCombine) {
			part[50] ^= 1
		}
		return part
	}
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		r := step(ctx, buf, b)
		var c *ErrCorrupt
		if errors.As(r.err, &c) != (buf.rank == 1) || c != nil && c.Rank != 0 {
			t.Errorf("rank %d: %v", buf.rank, r.err)
		}
		if buf.rank == 1 {
			untouched(t, r)
		}
	})
}

// Late data: a part that was made for another version is not taken for this one's.
func TestPartOfAnotherVersion(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 2)
	w := newWorld(2, cfg.SlotBytes(2))
	w.corrupt = func(from, to int, half string, part []byte) []byte {
		var h header
		if from == 1 && half == "dispatch" && h.parse(part, new([headerBytes]byte)) == nil && h.half == halfDispatch {
			h.version--
			h.put(part)
		}
		return part
	}
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		r := step(ctx, buf, randomBatch(8, uint64(buf.rank), 0, &cfg, 4))
		var m *ErrMismatch
		if !errors.As(r.err, &m) || *m != (ErrMismatch{Rank: 1, Field: "version", Theirs: 0, Want: 1}) {
			t.Errorf("rank %d: %v", buf.rank, r.err)
		}
		untouched(t, r)
	})
}

// BF16: the same sums in f32, rounded once, to nearest even.
func TestBF16(t *testing.T) {
	cfg := config(t, 5, 3, 7, 6, 3, 2)
	cfg.DType = BF16
	for _, unaligned := range []bool{false, true} {
		w := newWorld(3, cfg.SlotBytes(3))
		w.unaligned = unaligned
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			r := rand.New(rand.NewPCG(3, uint64(buf.rank)))
			x, ids, ws := make([]uint16, 6*7), make([]int32, 6*3), make([]float32, 6*3)
			for i := range x {
				x[i] = dtype.ToBF16(float32(r.NormFloat64()))
			}
			for i := range ids {
				ids[i], ws[i] = int32(r.IntN(6)-1), r.Float32()
			}
			twice := func(e int, v uint16) uint16 { return dtype.ToBF16(math.Float32frombits(uint32(v)<<16) * float32(e+2)) }
			out := make([]uint16, len(x))
			_, err := StepBF16(ctx, buf, x, ids, ws, func(h Handle, y []uint16) error {
				for i, e := range h.RowExpert() {
					for j := range 7 {
						y[i*7+j] = twice(int(e), h.XBF16()[i*7+j])
					}
				}
				return nil
			}, &Output{YBF16: out})
			if err != nil {
				panic(err)
			}
			for tok := range 6 {
				for j := range 7 {
					var acc float32
					for k := range 3 {
						if e := ids[tok*3+k]; e >= 0 {
							p := float32(ws[tok*3+k] * math.Float32frombits(uint32(twice(int(e), x[tok*7+j]))<<16))
							acc += p
						}
					}
					if out[tok*7+j] != dtype.ToBF16(acc) {
						t.Fatalf("token %d, %d: %04x, want %04x", tok, j, out[tok*7+j], dtype.ToBF16(acc))
					}
				}
			}
			broken := errors.New("broken")
			_, err = StepBF16(ctx, buf, x, ids, ws, func(h Handle, y []uint16) error { return broken }, &Output{YBF16: out})
			var p *ErrPoisoned
			if !errors.Is(err, broken) || !errors.As(err, &p) || p.Rank != 0 {
				t.Error(err)
			}
		})
	}
}

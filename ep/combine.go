package ep

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
)

// Combine is StartCombine and Result.
func (b *Buffer) Combine(ctx context.Context, h Handle, y []float32, out *Output) (Report, error) {
	if err := h.StartCombine(ctx, y); err != nil {
		return Report{}, err
	}
	return h.Result(ctx, out)
}

// CombineBF16 is Combine for BF16 rows.
func (b *Buffer) CombineBF16(ctx context.Context, h Handle, y []uint16, out *Output) (Report, error) {
	if err := h.StartCombineBF16(ctx, y); err != nil {
		return Report{}, err
	}
	return h.Result(ctx, out)
}

func (s *slot) sizeCombine() {
	rb := s.b.cfg.rowBytes()
	for r := range s.comb.Sizes {
		switch {
		case !s.active.Has(r):
			s.comb.Sizes[r] = 0
		case s.bad():
			s.comb.Sizes[r] = headerBytes
		default:
			s.comb.Sizes[r] = combinePart(s.from[r+1]-s.from[r], rb)
		}
	}
	s.comb.Version = s.version
}

// fillCombine writes back the rows of the entries that rank r sent, in their order.
func (s *slot) fillCombine(r int, dst []byte) {
	faultpoint.Hit(faultpoint.EPCombineEncode)
	h := s.header(halfCombine)
	if s.bad() {
		s.poison(&h)
		h.put(dst)
		return
	}
	pos := s.pos[s.from[r]:s.from[r+1]]
	h.entries, h.rows = uint32(len(pos)), uint32(len(pos))
	h.put(dst)
	rb := s.b.cfg.rowBytes()
	rows := dst[headerBytes:]
	for i, p := range pos {
		copy(rows[i*rb:(i+1)*rb], s.y[int(p)*rb:])
	}
	clear(rows[len(pos)*rb:])
}

// takeCombine sums the experts' rows, straight from the parts: those of rank r lie in r's in the order of (token, k), so
// that one walk over the tokens needs only a cursor for each part.
func (s *slot) takeCombine(parts [][]byte) {
	if s.known {
		return
	}
	s.retake()
	parts = s.ours(parts)
	rb := s.b.cfg.rowBytes()
	for r, part := range parts {
		if !s.active.Has(r) {
			continue
		}
		var h header
		err := h.parse(part, &s.raw)
		switch {
		case err != nil:
		case h.half != halfCombine || h.version != s.version:
			err = fmt.Errorf("half %d of version %d, want %d of %d", h.half, h.version, halfCombine, s.version)
		case h.poisoned():
			s.verdict = &ErrPoisoned{Rank: int(h.rows), Reason: h.reason, A: h.entries, B: h.detail}
			return
		case s.own == nil:
			err = h.parseCombine(part, rb, s.plan.Count(r))
		}
		if err != nil {
			s.mistrust(&ErrCorrupt{Rank: r, Why: err.Error()}, ReasonCorrupt, 0, 0)
		}
		s.cursor[r] = headerBytes
	}
	if s.own == nil {
		s.sum(parts, rb)
	}
}

func (s *slot) sum(parts [][]byte, rb int) {
	hidden, topK := s.b.cfg.Hidden, s.b.cfg.TopK
	s.acc = grow(s.acc, s.tokens*hidden)
	bf16 := s.b.cfg.DType == BF16
	i := 0
	for t := range s.tokens {
		acc := s.acc[t*hidden : (t+1)*hidden]
		clear(acc)
		for range topK {
			o := s.plan.Owner[i]
			w := s.weights[i]
			i++
			if o < 0 {
				continue
			}
			at := s.cursor[o]
			s.cursor[o] = at + rb
			y := parts[o][at : at+rb]
			if bf16 {
				addBF16(acc, w, y)
			} else {
				addF32(acc, w, y)
			}
		}
	}
}

// addF32 adds w*y to acc. The conversion forbids the compiler to fuse the product into the sum: two roundings, always.
func addF32(acc []float32, w float32, y []byte) {
	v, ok := floats(y)
	if !ok {
		for i := range acc {
			acc[i] += float32(w * math.Float32frombits(binary.LittleEndian.Uint32(y[4*i:])))
		}
		return
	}
	v = v[:len(acc)]
	for i := range acc {
		acc[i] += float32(w * v[i])
	}
}

// addBF16 is addF32 for rows of bf16.
func addBF16(acc []float32, w float32, y []byte) {
	v, ok := halves(y)
	if !ok {
		for i := range acc {
			acc[i] += float32(w * dtype.FromBF16(binary.LittleEndian.Uint16(y[2*i:])))
		}
		return
	}
	v = v[:len(acc)]
	for i := range acc {
		acc[i] += float32(w * dtype.FromBF16(v[i]))
	}
}

// checkOutput says whether out fits the batch.
func (s *slot) checkOutput(out *Output) error {
	if s.bad() {
		return nil // nothing will be written
	}
	n := s.tokens * s.b.cfg.Hidden
	if out == nil {
		out = &Output{}
	}
	yf, yh := n, 0
	if s.b.cfg.DType == BF16 {
		yf, yh = 0, n
	}
	switch {
	case len(out.Y) != yf:
		return &ErrShape{Arg: "out.Y", Len: len(out.Y), Want: yf}
	case len(out.YBF16) != yh:
		return &ErrShape{Arg: "out.YBF16", Len: len(out.YBF16), Want: yh}
	case out.Missing != nil && len(out.Missing) != s.tokens:
		return &ErrShape{Arg: "out.Missing", Len: len(out.Missing), Want: s.tokens}
	case out.LostMass != nil && len(out.LostMass) != s.tokens:
		return &ErrShape{Arg: "out.LostMass", Len: len(out.LostMass), Want: s.tokens}
	}
	return nil
}

// write puts the sums out, after the outcome is known.
func (s *slot) write(out *Output) {
	if out == nil {
		return
	}
	copy(out.Y, s.acc)
	for i := range out.YBF16 {
		out.YBF16[i] = dtype.ToBF16(s.acc[i])
	}
	copy(out.Missing, s.missing)
	copy(out.LostMass, s.mass)
}

package chaos

import (
	"encoding/binary"
	"math"

	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/internal/slots"
	"github.com/serry-project/serry/pg"
)

// The steps of package ep: every rank holds every expert, so no loss changes a bit.
const (
	epExperts = 8
	epTopK    = 2
	epHidden  = 8
	epTokens  = 24
	epSlot    = 64 << 10
)

// layer is what a rank needs for them.
type layer struct {
	buf  *ep.Buffer
	mass []float32
}

// openEP opens the Buffer of group E.
func (r *rank) openEP(joining bool) error {
	g := r.groups["E"]
	if g == nil {
		return nil
	}
	place, err := route.Contiguous(epExperts, r.Ranks, r.Ranks)
	if err != nil {
		return err
	}
	cfg := ep.Config{Experts: epExperts, TopK: epTopK, Hidden: epHidden, MaxTokens: epTokens, Placement: place, Policy: ep.Rerun, Joining: joining}
	r.ep = &layer{mass: make([]float32, epTokens)}
	r.ep.buf, err = ep.Open(r.ctx, ep.FromGroup(g), cfg)
	return err
}

// batch is what a rank gives to a step: rows, experts, weights.
func (o *op) batch(rank int) (x []float32, experts []int32, w []float32) {
	h := mix(uint64(o.Step)<<32 | uint64(o.At)<<16 | uint64(rank))
	draw := func() uint64 { h = mix(h); return h }
	tokens := 1 + (o.N+rank)%epTokens
	x, experts, w = make([]float32, tokens*epHidden), make([]int32, tokens*epTopK), make([]float32, tokens*epTopK)
	for i := range x {
		x[i] = float32(int32(draw())) / (1 << 29)
	}
	for t := range tokens {
		at := draw()
		for k := range epTopK {
			experts[t*epTopK+k] = int32((at + uint64(3*k)) % epExperts)
			w[t*epTopK+k] = 1 / float32(2+draw()%5)
		}
	}
	return x, experts, w
}

// factor is by how much an expert scales: no two alike.
func factor(e int32) float32 { return 1 + float32(e)/8 }

// stepped is what a rank gets back.
func (o *op) stepped(rank int) []byte {
	x, experts, w := o.batch(rank)
	var out []byte
	for t := range len(x) / epHidden {
		for i := range epHidden {
			y := float32(0)
			for k := range epTopK {
				y += float32(w[t*epTopK+k] * float32(factor(experts[t*epTopK+k])*x[t*epHidden+i]))
			}
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(y))
		}
	}
	return out
}

func (r *rank) epStep(o *op) error {
	if r.ep == nil {
		return nil
	}
	x, experts, w := o.batch(r.w.Rank())
	y := make([]float32, len(x))
	e := r.event(o)
	r.issue(e)
	rep, err := ep.Step(r.ctx, r.ep.buf, x, experts, w, func(h ep.Handle, y []float32) error {
		x := h.X()
		for _, b := range h.Blocks() {
			f := factor(int32(b.Expert))
			for i := b.Offset * epHidden; i < (b.Offset+b.Count)*epHidden; i++ {
				y[i] = f * x[i]
			}
		}
		return nil
	}, &ep.Output{Y: y, LostMass: r.ep.mass[:len(x)/epHidden]})
	var b []byte
	for _, v := range y {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return r.end(&e, pg.Result{Seq: rep.Seq, Epoch: rep.Epoch, Active: slots.Set(rep.Active)}, err, sum(b))
}

package ep

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/serry-project/serry/ep/route"
)

// batch is one rank's input of one step.
type batch struct {
	x       []float32
	experts []int32
	weights []float32
}

func (b batch) tokens(hidden int) int { return len(b.x) / hidden }

// randomBatch makes a batch that no two (seed, rank, step) share. Some choices are -1 (with a NaN as weight), some
// experts come twice.
func randomBatch(seed, rank, step uint64, c *Config, tokens int) batch {
	r := rand.New(rand.NewPCG(seed, rank<<32|step))
	b := batch{x: make([]float32, tokens*c.Hidden), experts: make([]int32, tokens*c.TopK), weights: make([]float32, tokens*c.TopK)}
	for i := range b.x {
		b.x[i] = float32(r.NormFloat64())
	}
	for i := range b.experts {
		b.experts[i] = int32(r.IntN(c.Experts))
		b.weights[i] = r.Float32() + 1./1024
		if r.IntN(8) == 0 {
			b.experts[i], b.weights[i] = -1, float32(math.NaN())
		}
	}
	return b
}

// expert is what expert e makes of a row: every element of the output depends on the whole row, in a fixed order.
//
//go:noinline
func expert(e int, x, y []float32) {
	s := float32(e) * 0.125
	for i, v := range x {
		s = float32(s*0.75) + float32(v*float32(i%7+1))
	}
	for i, v := range x {
		y[i] = float32(v*float32(e+1)) + float32(s*0.0625)
	}
}

// compute runs the experts over all received rows, and fills the padding with NaN.
func compute(hidden int) func(h Handle, y []float32) error {
	return func(h Handle, y []float32) error {
		for i := range y {
			y[i] = float32(math.NaN())
		}
		for _, b := range h.Blocks() {
			for r := b.Offset; r < b.Offset+b.Count; r++ {
				expert(b.Expert, h.X()[r*hidden:][:hidden], y[r*hidden:][:hidden])
			}
		}
		return nil
	}
}

// oracle is the layer in one process: no ranks, no placement, a loop.
func oracle(c *Config, b batch, lost []int) (out []float32, missing []uint8, mass []float32) {
	tokens := b.tokens(c.Hidden)
	out, missing, mass = make([]float32, len(b.x)), make([]uint8, tokens), make([]float32, tokens)
	y := make([]float32, c.Hidden)
	for t := range tokens {
		var all, live float32
		for k := range c.TopK {
			e, w := b.experts[t*c.TopK+k], b.weights[t*c.TopK+k]
			if e < 0 {
				continue
			}
			all += w
			if slices.Contains(lost, int(e)) {
				missing[t]++
				mass[t] += w
			} else {
				live += w
			}
		}
		acc := out[t*c.Hidden : (t+1)*c.Hidden]
		for k := range c.TopK {
			e, w := b.experts[t*c.TopK+k], b.weights[t*c.TopK+k]
			if e < 0 || slices.Contains(lost, int(e)) {
				continue
			}
			if c.Renormalise && missing[t] > 0 && live != 0 {
				w = float32(w*all) / live
			}
			expert(int(e), b.x[t*c.Hidden:(t+1)*c.Hidden], y)
			for i := range acc {
				p := float32(w * y[i])
				acc[i] = acc[i] + p
			}
		}
	}
	return out, missing, mass
}

func sameBits(a, b []float32) error {
	if len(a) != len(b) {
		return fmt.Errorf("%d elements, want %d", len(a), len(b))
	}
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			return fmt.Errorf("element %d is %v (%08x), want %v (%08x)", i, a[i], math.Float32bits(a[i]), b[i], math.Float32bits(b[i]))
		}
	}
	return nil
}

// result of one step on one rank.
type result struct {
	out     []float32
	missing []uint8
	mass    []float32
	rep     Report
	err     error
}

func newOutput(c *Config, tokens int) (*Output, *result) {
	r := &result{out: make([]float32, tokens*c.Hidden), missing: make([]uint8, tokens), mass: make([]float32, tokens)}
	for i := range r.out {
		r.out[i] = float32(math.NaN())
	}
	return &Output{Y: r.out, Missing: r.missing, LostMass: r.mass}, r
}

// checkResult compares a step's result with the oracle, given who took part.
func checkResult(c *Config, b batch, r *result) error {
	if r.err != nil {
		return r.err
	}
	lost := c.Placement.Lost(r.rep.Active)
	out, missing, mass := oracle(c, b, lost)
	if err := sameBits(r.out, out); err != nil {
		return fmt.Errorf("out: %w", err)
	}
	if !slices.Equal(r.missing, missing) {
		return fmt.Errorf("missing %v, want %v", r.missing, missing)
	}
	if err := sameBits(r.mass, mass); err != nil {
		return fmt.Errorf("lost mass: %w", err)
	}
	tainted := 0
	for _, m := range missing {
		if m > 0 {
			tainted++
		}
	}
	if r.rep.Tainted != tainted || r.rep.Tokens != b.tokens(c.Hidden) {
		return fmt.Errorf("report %+v, want %d tainted of %d", r.rep, tainted, b.tokens(c.Hidden))
	}
	return nil
}

func step(ctx context.Context, buf *Buffer, b batch) *result {
	c := buf.cfg
	out, r := newOutput(&c, b.tokens(c.Hidden))
	r.rep, r.err = Step(ctx, buf, b.x, b.experts, b.weights, compute(c.Hidden), out)
	return r
}

func mustPlace(t testing.TB, experts, ranks, replicas int) *route.Placement {
	t.Helper()
	p, err := route.Contiguous(experts, ranks, replicas)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// steps runs n steps on all ranks of w with the batches of in, and returns [step][rank] what came out; a killed rank's
// entries from its death on are nil.
func (w *world) steps(t tester, cfg Config, n int, in func(rank, step int) batch) [][]*result {
	res := make([][]*result, n)
	for i := range res {
		res[i] = make([]*result, w.n)
	}
	view := w.views[w.version]
	w.each(t, view.Slots(), func(ctx context.Context, g *fakeGroup) {
		buf, err := Open(ctx, g, cfg)
		if err != nil {
			panic(err)
		}
		for i := range n {
			res[i][g.rank] = step(ctx, buf, in(g.rank, i))
		}
		if err := buf.Close(ctx); err != nil {
			panic(err)
		}
	})
	return res
}

// agree checks that all ranks that returned from a step report the same, and that epochs grow.
func agree(t tester, res [][]*result) {
	var last Report
	for i, rs := range res {
		var first *result
		for r, v := range rs {
			if v == nil || v.err != nil {
				continue
			}
			if first == nil {
				first = v
			}
			if v.rep.Epoch != first.rep.Epoch || v.rep.Seq != first.rep.Seq || v.rep.Active != first.rep.Active {
				t.Errorf("step %d: rank %d reports %+v, another %+v", i, r, v.rep, first.rep)
			}
			if !v.rep.Active.Has(r) {
				t.Errorf("step %d: rank %d is not in its own set", i, r)
			}
		}
		if first == nil {
			continue
		}
		if i > 0 && (first.rep.Epoch < last.Epoch || first.rep.Active != last.Active && first.rep.Epoch == last.Epoch) {
			t.Errorf("step %d: epoch %d with %v after %d with %v", i, first.rep.Epoch, first.rep.Active.Slots(), last.Epoch, last.Active.Slots())
		}
		last = first.rep
	}
}

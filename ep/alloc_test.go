package ep

import (
	"context"
	"testing"

	"github.com/serry-project/serry/ep/route"
)

// loop is a group of one rank that allocates nothing.
type loop struct {
	mem   [2][]byte
	parts [1][]byte
	x     [2]*Exchange
	seq   uint64
}

func newLoop(slot int) *loop {
	return &loop{mem: [2][]byte{make([]byte, slot), make([]byte, slot)}}
}

func (l *loop) Rank() int                     { return 0 }
func (l *loop) Size() int                     { return 1 }
func (l *loop) Depth() int                    { return 1 }
func (l *loop) SlotBytes() int                { return len(l.mem[0]) }
func (l *loop) Active() (route.Ranks, uint64) { return route.All(1), 1 }
func (l *loop) Abandon()                      {}

func (l *loop) half(i int, x *Exchange) {
	l.x[i] = x
	x.Fill(0, l.mem[i][:x.Sizes[0]])
}

func (l *loop) take(i int) {
	l.parts[0] = l.mem[i][:l.x[i].Sizes[0]]
	l.x[i].Take(l.parts[:])
}

func (l *loop) StartPair(_ context.Context, x *Exchange) (Pair, error) { l.half(0, x); return l, nil }
func (l *loop) Dispatched(context.Context) error                       { l.take(0); return nil }
func (l *loop) StartCombine(_ context.Context, x *Exchange) error      { l.half(1, x); return nil }
func (l *loop) Combined(context.Context) (Result, error) {
	l.take(1)
	l.seq++
	return Result{Seq: l.seq, Epoch: 1, Active: route.All(1)}, nil
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	for _, layout := range []Layout{Flat, ExpertMajor} {
		cfg := config(t, 8, 2, 16, 32, 1, 1)
		cfg.Layout, cfg.Align = layout, 8
		buf, err := Open(t.Context(), newLoop(cfg.SlotBytes(1)), cfg)
		if err != nil {
			t.Fatal(err)
		}
		b := randomBatch(1, 0, 0, &cfg, 32)
		out, r := newOutput(&cfg, 32)
		f := compute(16)
		ctx := t.Context()
		run := func() { r.rep, r.err = Step(ctx, buf, b.x, b.experts, b.weights, f, out) }
		run()
		wantReport(t, &cfg, buf, b, r)
		if n := testing.AllocsPerRun(100, run); n != 0 {
			t.Errorf("%v allocations a step", n)
		}
		wantReport(t, &cfg, buf, b, r)
	}
}

func BenchmarkStepAlone(b *testing.B) {
	for _, c := range []struct {
		name             string
		tokens, k, h, ex int
	}{{"decode T=32 K=4 H=1024", 32, 4, 1024, 64}, {"prefill T=1024 K=4 H=1024", 1024, 4, 1024, 64}} {
		b.Run(c.name, func(b *testing.B) {
			cfg := config(b, c.ex, c.k, c.h, c.tokens, 1, 1)
			buf, err := Open(b.Context(), newLoop(cfg.SlotBytes(1)), cfg)
			if err != nil {
				b.Fatal(err)
			}
			in := randomBatch(1, 0, 0, &cfg, c.tokens)
			out := &Output{Y: make([]float32, c.tokens*c.h)}
			b.SetBytes(int64(c.tokens * c.k * c.h * 4))
			for b.Loop() {
				h, err := buf.Dispatch(b.Context(), in.x, in.experts, in.weights)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := buf.Combine(b.Context(), h, h.X(), out); err != nil {
					b.Fatal(err)
				}
				h.Release()
			}
		})
	}
}

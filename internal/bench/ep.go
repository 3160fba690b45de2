package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/pg"
)

// shape is that of the steps that a rank runs.
type shape struct {
	Tokens   int `json:"tokens"`
	Hidden   int `json:"hidden"`
	TopK     int `json:"topk"`
	Experts  int `json:"experts"`
	Replicas int `json:"replicas"`
}

// EPConfig is what to time.
type EPConfig struct {
	Ranks int    `json:"ranks"`
	Links string `json:"links"`
	N     int    `json:"n"`
	Shape shape  `json:"shape"`
}

// EPDefaults is the case that the project has a bar for.
func EPDefaults() EPConfig {
	return EPConfig{Ranks: 4, Links: "auto", N: 20_000, Shape: shape{Tokens: 8, Hidden: 128, TopK: 2, Experts: 16, Replicas: 1}}
}

// The rows of EP.
const (
	rowStep     = "dispatch + combine"
	rowDispatch = "dispatch"
	rowCombine  = "combine"
)

// EP times dispatch and combine with experts that give back what they get.
func EP(ctx context.Context, o Options, cfg EPConfig) (*Result, error) {
	var c checks
	c.ranks(cfg.Ranks, 1)
	c.number("n", cfg.N, 1, most)
	c.links(cfg.Links)
	c.shape(cfg.Shape, cfg.Ranks, 1)
	if err := c.err(); err != nil {
		return nil, err
	}
	s := cfg.Shape
	res := newResult("ep", cfg, "%d ranks, %d tokens each of %d f32, top %d of %d experts, %d replicas, links %s",
		cfg.Ranks, s.Tokens, s.Hidden, s.TopK, s.Experts, s.Replicas, cfg.Links)
	worst, err := timed(ctx, o, res, cfg.Ranks, rankArgs{Program: "ep", Links: cfg.Links, N: cfg.N, Shape: s})
	if err != nil {
		return nil, err
	}
	d := EPDefaults()
	if cfg.Ranks == d.Ranks && s == d.Shape && cfg.Links == "auto" {
		res.bar("p50 of the slowest rank", 100*time.Microsecond, worst[rowStep])
	}
	return res, nil
}

// layer is what a rank needs to run steps of a shape: an ep.Buffer and a batch whose result is known.
type layer struct {
	shape
	rank int
	buf  *ep.Buffer
	x    []float32
	base []float32
	w    []float32
	e    []int32
	y    []float32
	want []float32
	mass []float32
}

// open makes the group of the steps, or takes it over from the members, and the Buffer.
func (r *rank) open(w *pg.World) (*layer, error) {
	s := r.Shape
	place, err := route.Contiguous(s.Experts, r.Size, s.Replicas)
	if err != nil {
		return nil, err
	}
	cfg := ep.Config{Experts: s.Experts, TopK: s.TopK, Hidden: s.Hidden, MaxTokens: s.Tokens, Placement: place, Policy: ep.Rerun}
	var g *pg.Group
	if w.Joined().Replacement {
		cfg.Joining = true
		gs := w.Groups()
		if len(gs) != 2 {
			return nil, fmt.Errorf("joined a world with %d groups, want 2", len(gs))
		}
		g = gs[1]
	} else {
		o := pg.Options{Mode: pg.Raise, Pairs: true, SlotBytes: max(cfg.SlotBytes(r.Size), 64<<10)}
		if g, err = w.Sub(r.ctx, nil, o); err != nil {
			return nil, err
		}
	}
	l := &layer{shape: s, rank: w.Rank()}
	if l.buf, err = ep.Open(r.ctx, ep.FromGroup(g), cfg); err != nil {
		return nil, err
	}
	n := s.Tokens * s.Hidden
	l.x, l.base, l.y, l.want = make([]float32, n), make([]float32, n), make([]float32, n), make([]float32, n)
	l.w, l.e, l.mass = make([]float32, s.Tokens*s.TopK), make([]int32, s.Tokens*s.TopK), make([]float32, s.Tokens)
	for i := range l.base {
		l.base[i] = float32(math.Sin(float64(i*(l.rank+1)))) + float32(l.rank)
	}
	for i := range l.w {
		l.w[i] = 1 / float32(2+i%5)
	}
	return l, nil
}

// fill makes the batch of a step, and what must come out: expert e scales by factor(e).
func (l *layer) fill(step int, factor func(e int32) float32) {
	for t := range l.Tokens {
		at := (step*7 + l.rank*5 + t*3) % l.Experts
		chosen := l.e[t*l.TopK : (t+1)*l.TopK]
		for k := range chosen {
			e := int32((at + k*(1+step%3)) % l.Experts)
			for slices.Contains(chosen[:k], e) {
				e = (e + 1) % int32(l.Experts)
			}
			chosen[k] = e
		}
	}
	add := float32(step & 1023)
	for i, v := range l.base {
		l.x[i] = v + add
	}
	clear(l.want)
	for t := range l.Tokens {
		x, want := l.x[t*l.Hidden:(t+1)*l.Hidden], l.want[t*l.Hidden:(t+1)*l.Hidden]
		for k := range l.TopK {
			w, f := l.w[t*l.TopK+k], factor(l.e[t*l.TopK+k])
			for i, v := range x {
				want[i] += float32(w * float32(f*v))
			}
		}
	}
}

// wrong says how the result differs from what it must be, bit for bit; "" if it does not.
func (l *layer) wrong() string {
	for i, v := range l.y {
		if math.Float32bits(v) != math.Float32bits(l.want[i]) {
			return fmt.Sprintf("token %d: element %d is %v, want %v", i/l.Hidden, i%l.Hidden, v, l.want[i])
		}
	}
	for t, m := range l.mass {
		if m != 0 {
			return fmt.Sprintf("token %d lost weight %v", t, m)
		}
	}
	return ""
}

func one(int32) float32 { return 1 }

// ep is one rank of EP.
func (r *rank) ep() error {
	w, err := r.join()
	if err != nil {
		return err
	}
	l, err := r.open(w)
	if err != nil {
		return err
	}
	ctx, wrong := r.ctx, 0
	total, dispatch, combine := newTimes(), newTimes(), newTimes()
	out := &ep.Output{Y: l.y, LostMass: l.mass}
	warm := min(r.N/10, 500)
	for i := -warm; i < r.N; i++ {
		l.fill(i&1023, one)
		if _, err := w.Barrier(ctx); err != nil {
			return err
		}
		t0 := host.Nanotime()
		h, err := l.buf.Dispatch(ctx, l.x, l.e, l.w)
		if err != nil {
			return err
		}
		t1 := host.Nanotime()
		_, err = l.buf.Combine(ctx, h, h.X(), out)
		t2 := host.Nanotime()
		h.Release()
		if err != nil {
			return err
		}
		if i >= 0 {
			dispatch.add(t1 - t0)
			combine.add(t2 - t1)
			total.add(t2 - t0)
		}
		if s := l.wrong(); s != "" {
			if wrong++; wrong < 4 {
				r.say("violation step %d: %s", i, s)
			}
		}
		if i&1023 == 0 {
			r.say("at %d of %d steps", i, r.N)
		}
	}
	err = errors.Join(r.give(rowStep, total), r.give(rowDispatch, dispatch), r.give(rowCombine, combine))
	if err != nil {
		return err
	}
	r.say("done")
	return w.Leave(ctx)
}

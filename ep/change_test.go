package ep

import (
	"context"
	"errors"
	"testing"

	"github.com/serry-project/serry/ep/route"
)

// Rejoin: a rank dies, steps go on, it comes back at a boundary, and its Buffer needs no Open on the others.
func TestRejoin(t *testing.T) {
	const n = 3
	cfg := config(t, 6, 2, 3, 4, n, 2)
	in := func(rank, step int) batch { return randomBatch(8, uint64(rank), uint64(step), &cfg, 4) }
	w := newWorld(n, cfg.SlotBytes(n))
	bufs := make([]*Buffer, n)
	groups := make([]*fakeGroup, n)
	run := func(ranks []int, first, count int) {
		w.each(t, ranks, func(ctx context.Context, g *fakeGroup) {
			r := g.rank
			if groups[r] == nil {
				groups[r] = g
			}
			if bufs[r] == nil {
				c := cfg
				c.Joining = first > 0
				var err error
				if bufs[r], err = Open(ctx, groups[r], c); err != nil {
					panic(err)
				}
			}
			for i := first; i < first+count; i++ {
				wantReport(t, &cfg, bufs[r], in(r, i), step(ctx, bufs[r], in(r, i)))
			}
		})
	}
	w.killAt(1, 2, "fill.combine")
	run([]int{0, 1, 2}, 0, 4)
	w.at = nil
	if w.views[w.version] != route.All(n).Minus(w.dead) {
		t.Fatal("rank 1 should be out")
	}
	groups[1], bufs[1] = nil, nil
	w.boundary(1, []*fakeGroup{groups[0], groups[2]})
	run([]int{0, 1, 2}, 4, 3)
	if set, _ := bufs[0].Active(); set != route.All(n) {
		t.Errorf("active %v", set.Slots())
	}
}

// A newcomer with another configuration is found out in its first step, alike on all.
func TestJoinWithAnotherConfiguration(t *testing.T) {
	cfg := config(t, 6, 2, 3, 4, 2, 2)
	w := newWorld(2, cfg.SlotBytes(2))
	w.each(t, []int{0, 1}, func(ctx context.Context, g *fakeGroup) {
		c := cfg
		c.Joining = true
		if g.rank == 1 {
			c.Renormalise = true
		}
		buf, err := Open(ctx, g, c)
		if err != nil {
			panic(err)
		}
		r := step(ctx, buf, randomBatch(8, uint64(g.rank), 0, &cfg, 4))
		var m *ErrMismatch
		if !errors.As(r.err, &m) || m.Rank != 1 || m.Field != "Config" {
			t.Errorf("rank %d: %v", g.rank, r.err)
		}
	})
}

// A handle across a boundary is stale.
func TestStaleVersion(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 2)
	w := newWorld(2, cfg.SlotBytes(2))
	var hs [2]Handle
	var bufs [2]*Buffer
	var groups [2]*fakeGroup
	w.each(t, []int{0, 1}, func(ctx context.Context, g *fakeGroup) {
		buf, err := Open(ctx, g, cfg)
		if err != nil {
			panic(err)
		}
		h, err := buf.Dispatch(ctx, nil, nil, nil)
		if err != nil {
			panic(err)
		}
		hs[g.rank], bufs[g.rank], groups[g.rank] = h, buf, g
	})
	w.boundary(0, groups[:])
	w.each(t, []int{0, 1}, func(ctx context.Context, g *fakeGroup) {
		h, buf := hs[g.rank], bufs[g.rank]
		if err := h.StartCombine(ctx, nil); !errors.Is(err, ErrStale) {
			t.Error(err)
		}
		h.Release()
		b := randomBatch(8, uint64(g.rank), 0, &cfg, 4)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
}

// SetPlacement on all ranks: the same bits from other owners. On one alone: a mismatch on all, and it can be put right.
func TestSetPlacement(t *testing.T) {
	const n = 3
	cfg := config(t, 6, 2, 3, 4, n, 1)
	after := cfg
	after.Placement = mustPlace(t, 6, n, 3)
	w := newWorld(n, cfg.SlotBytes(n))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		if len(buf.Experts()) != 2 {
			t.Error(buf.Experts())
		}
		if buf.rank == 1 {
			if err := buf.SetPlacement(after.Placement); err != nil {
				t.Error(err)
			}
		}
		var m *ErrMismatch
		if r := step(ctx, buf, b); !errors.As(r.err, &m) || m.Rank != 1 || m.Field != "Placement" {
			t.Errorf("rank %d: %v", buf.rank, r.err)
		}
		if err := buf.SetPlacement(after.Placement); err != nil {
			t.Error(err)
		}
		wantReport(t, &after, buf, b, step(ctx, buf, b))
		if len(buf.Experts()) != 6 || buf.Config().Placement != after.Placement {
			t.Error(buf.Experts())
		}
		if err := buf.SetPlacement(mustPlace(t, 6, n+1, 1)); err == nil {
			t.Error("a placement over more ranks than there are")
		}
	})
}

// A group that grows: ErrGrown until the placement covers the newcomer.
func TestGroupGrows(t *testing.T) {
	cfg := config(t, 6, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(3))
	var bufs [3]*Buffer
	var groups [3]*fakeGroup
	w.each(t, []int{0, 1}, func(ctx context.Context, g *fakeGroup) {
		buf, err := Open(ctx, g, cfg)
		if err != nil {
			panic(err)
		}
		b := randomBatch(8, uint64(g.rank), 0, &cfg, 4)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		bufs[g.rank], groups[g.rank] = buf, g
	})
	w.n = 3
	w.boundary(2, groups[:2])
	cfg.Placement = mustPlace(t, 6, 3, 1)
	w.each(t, []int{0, 1, 2}, func(ctx context.Context, g *fakeGroup) {
		buf := bufs[g.rank]
		if buf == nil {
			c := cfg
			c.Joining = true
			var err error
			if buf, err = Open(ctx, g, c); err != nil {
				panic(err)
			}
		} else {
			if _, err := buf.StartDispatch(ctx, nil, nil, nil); !errors.Is(err, ErrGrown) {
				t.Error(err)
			}
			if err := buf.SetPlacement(cfg.Placement); err != nil {
				t.Error(err)
			}
		}
		for i := range 2 {
			b := randomBatch(8, uint64(g.rank), uint64(i), &cfg, 4)
			wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		}
	})
}

// The group gets a new version between the routing and the start: the batch is routed again, for that one.
func TestVersionMovesUnderStart(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 1, 1)
	w := newWorld(1, cfg.SlotBytes(1))
	g := w.group(0)
	w.at = func(_ int, seq uint64, point string) {
		if seq == 1 && point == "start.before" && w.version < 3 {
			w.boundary(0, []*fakeGroup{g})
		}
	}
	buf, err := Open(t.Context(), g, cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := randomBatch(8, 0, 0, &cfg, 4)
	r := step(t.Context(), buf, b)
	wantReport(t, &cfg, buf, b, r)
	if r.rep.Epoch != 3 {
		t.Errorf("version %d", r.rep.Epoch)
	}
}

// All slots are with steps that were released before they were received: the next step waits for their outcomes.
func TestAllHandlesReleasedEarly(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		for range 2 {
			for range 4 {
				h, err := buf.StartDispatch(ctx, b.x, b.experts, b.weights)
				if err != nil {
					t.Error(err)
				}
				defer h.Release()
				h.Release()
			}
		}
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
}

package ep

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/serry-project/serry/ep/route"
	"pgregory.net/rapid"
)

func config(t testing.TB, experts, topK, hidden, maxTokens, ranks, replicas int) Config {
	return Config{Experts: experts, TopK: topK, Hidden: hidden, DType: F32, MaxTokens: maxTokens,
		Placement: mustPlace(t, experts, ranks, replicas), Policy: Rerun}
}

func drawConfig(t *rapid.T, n int) Config {
	experts := rapid.IntRange(1, 17).Draw(t, "E")
	p, err := route.Contiguous(experts, n, rapid.IntRange(1, min(n, 3)).Draw(t, "replicas"))
	if err != nil {
		t.Fatal(err)
	}
	return Config{Experts: experts, TopK: rapid.IntRange(1, 4).Draw(t, "K"), Hidden: rapid.IntRange(1, 9).Draw(t, "H"), DType: F32,
		MaxTokens: 12, Placement: p, Policy: Rerun, Renormalise: rapid.Bool().Draw(t, "renormalise"),
		Layout: Layout(rapid.IntRange(0, 1).Draw(t, "layout")), Align: rapid.IntRange(0, 4).Draw(t, "align")}
}

// Whatever the shape: the bits of a loop in one process, and all ranks report alike.
func TestRandomShapesAgainstOracle(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 5).Draw(rt, "R")
		cfg := drawConfig(rt, n)
		seed := rapid.Uint64().Draw(rt, "seed")
		tokens := rapid.SliceOfN(rapid.IntRange(0, cfg.MaxTokens), n, n).Draw(rt, "T")
		w := newWorld(n, cfg.SlotBytes(n))
		w.unaligned = rapid.Bool().Draw(rt, "unaligned")
		in := func(rank, step int) batch { return randomBatch(seed, uint64(rank), uint64(step), &cfg, tokens[rank]) }
		res := w.steps(rt, cfg, 3, in)
		agree(rt, res)
		for i := range res {
			for r, v := range res[i] {
				if err := checkResult(&cfg, in(r, i), v); err != nil {
					rt.Fatalf("step %d, rank %d: %v", i, r, err)
				}
			}
		}
	})
}

var killPoints = []string{"start.before", "fill.dispatch", "start.after", "dispatched.before", "dispatched.after",
	"combine.before", "fill.combine", "combine.after", "combined.before", "combined.after"}

// killAt makes rank die at a point of operation seq.
func (w *world) killAt(rank int, seq uint64, point string) {
	w.at = func(r int, s uint64, p string) {
		if r == rank && s == seq && p == point {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.kill(r)
		}
	}
}

// Invariants (e) and (g): with two replicas, whoever dies where, no bit changes and nobody disagrees; with one, what is
// lost is told.
func TestKillAtEachPoint(t *testing.T) {
	const n, steps = 4, 3
	for _, replicas := range []int{1, 2} {
		for victim := range n {
			for _, point := range killPoints {
				t.Run(fmt.Sprintf("replicas=%d/rank=%d/%s", replicas, victim, point), func(t *testing.T) {
					cfg := config(t, 9, 3, 5, 6, n, replicas)
					in := func(rank, step int) batch { return randomBatch(7, uint64(rank), uint64(step), &cfg, 6) }
					w := newWorld(n, cfg.SlotBytes(n))
					w.killAt(victim, 2, point) // 0 is Open, so the second step
					res := w.steps(t, cfg, steps, in)
					agree(t, res)
					tainted := 0
					for i := range res {
						for r, v := range res[i] {
							if r == victim {
								continue
							}
							if err := checkResult(&cfg, in(r, i), v); err != nil {
								t.Errorf("step %d, rank %d: %v", i, r, err)
							}
							undisturbed, _, _ := oracle(&cfg, in(r, i), nil)
							if err := sameBits(v.out, undisturbed); replicas == 2 && err != nil {
								t.Errorf("step %d, rank %d: a covered failure changed a bit: %v", i, r, err)
							}
							for _, m := range v.mass {
								if m > 0 {
									tainted++
								}
							}
						}
					}
					if (replicas == 1) != (tainted > 0) {
						t.Errorf("%d tokens have lost mass", tainted)
					}
					if last := res[steps-1][(victim+1)%n].rep; last.Active.Has(victim) || last.Active.Len() != n-1 {
						t.Errorf("last step ran with %v", last.Active.Slots())
					}
				})
			}
		}
	}
}

// Random deaths, several at once or one after the other, also in Open.
func TestRandomKillsAgainstOracle(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(rt, "R")
		cfg := drawConfig(rt, n)
		seed := rapid.Uint64().Draw(rt, "seed")
		type death struct {
			rank  int
			seq   uint64
			point string
		}
		deaths := map[death]bool{}
		for range rapid.IntRange(1, n-1).Draw(rt, "deaths") {
			deaths[death{rapid.IntRange(1, n-1).Draw(rt, "rank"), rapid.Uint64Range(0, 4).Draw(rt, "seq"),
				rapid.SampledFrom(killPoints).Draw(rt, "point")}] = true
		}
		in := func(rank, step int) batch {
			return randomBatch(seed, uint64(rank), uint64(step), &cfg, (rank*5+step)%8)
		}
		w := newWorld(n, cfg.SlotBytes(n))
		w.at = func(r int, s uint64, p string) {
			if deaths[death{r, s, p}] {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.kill(r)
			}
		}
		res := w.steps(rt, cfg, 4, in)
		agree(rt, res)
		for i := range res {
			for r, v := range res[i] {
				if v == nil || w.dead.Has(r) {
					continue
				}
				if err := checkResult(&cfg, in(r, i), v); err != nil {
					rt.Fatalf("step %d, rank %d: %v", i, r, err)
				}
			}
		}
	})
}

// Invariant (a): what is received is what names a live expert.
func TestReceivedRowsAreThoseSent(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 5).Draw(rt, "R")
		cfg := drawConfig(rt, n)
		seed := rapid.Uint64().Draw(rt, "seed")
		w := newWorld(n, cfg.SlotBytes(n))
		if n > 1 && rapid.Bool().Draw(rt, "dead") {
			w.kill(rapid.IntRange(1, n-1).Draw(rt, "who"))
		}
		view := w.views[w.version]
		lost := cfg.Placement.Lost(view)
		in := func(rank int) batch { return randomBatch(seed, uint64(rank), 0, &cfg, rank*3%7) }
		want := 0
		for r := range n {
			if !view.Has(r) {
				continue
			}
			for _, e := range in(r).experts {
				if e >= 0 && !contains(lost, int(e)) {
					want++
				}
			}
		}
		var mu sync.Mutex
		got := 0
		w.each(rt, view.Slots(), func(ctx context.Context, g *fakeGroup) {
			buf, err := Open(ctx, g, cfg)
			if err != nil {
				panic(err)
			}
			b := in(g.rank)
			h, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
			if err != nil {
				panic(err)
			}
			defer h.Release()
			if err := checkRows(&cfg, buf, h, in, view); err != nil {
				rt.Errorf("rank %d: %v", g.rank, err)
			}
			y := make([]float32, h.Rows()*cfg.Hidden)
			if _, err := buf.Combine(ctx, h, y, &Output{Y: make([]float32, len(b.x))}); err != nil {
				panic(err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, bl := range h.Blocks() {
				got += bl.Count
			}
		})
		if got != want {
			rt.Fatalf("%d rows received, %d sent", got, want)
		}
	})
}

func contains(s []int, v int) bool {
	for _, x := range s {
		if x == v {
			return true
		}
	}
	return false
}

// checkRows lists the rows that this rank must have received, in order, and compares: the order (expert, source rank,
// token, k), the bits, the blocks, the padding.
func checkRows(cfg *Config, buf *Buffer, h Handle, in func(rank int) batch, view route.Ranks) error {
	at := 0
	align := cfg.align()
	blocks := h.Blocks()
	if len(blocks) != len(buf.Experts()) {
		return fmt.Errorf("%d blocks, %d experts", len(blocks), len(buf.Experts()))
	}
	for i, e := range buf.Experts() {
		if at%align != 0 || blocks[i].Expert != e || blocks[i].Offset != at {
			return fmt.Errorf("block %d is %+v, want expert %d at %d", i, blocks[i], e, at)
		}
		begin := at
		for src := view.Next(0); src >= 0; src = view.Next(src + 1) {
			b := in(src)
			for j, id := range b.experts {
				if int(id) != e || cfg.Placement.Owner(e, view, src) != buf.rank {
					continue
				}
				tok := j / cfg.TopK
				if h.RowExpert()[at] != id || h.RowSource()[at] != int32(src) || h.RowToken()[at] != int32(tok) {
					return fmt.Errorf("row %d is (%d, %d, %d), want (%d, %d, %d)", at,
						h.RowExpert()[at], h.RowSource()[at], h.RowToken()[at], id, src, tok)
				}
				if err := sameBits(h.X()[at*cfg.Hidden:][:cfg.Hidden], b.x[tok*cfg.Hidden:][:cfg.Hidden]); err != nil {
					return fmt.Errorf("row %d: %w", at, err)
				}
				at++
			}
		}
		if blocks[i].Count != at-begin {
			return fmt.Errorf("block %+v, want %d rows", blocks[i], at-begin)
		}
		for ; at%align != 0; at++ {
			if h.RowExpert()[at] != -1 || h.RowSource()[at] != -1 || h.RowToken()[at] != -1 {
				return fmt.Errorf("row %d should be padding", at)
			}
		}
	}
	if h.Rows() != at || len(h.X()) != at*cfg.Hidden || len(h.RowExpert()) != at {
		return fmt.Errorf("%d rows, want %d", h.Rows(), at)
	}
	return nil
}

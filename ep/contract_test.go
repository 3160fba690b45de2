package ep

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/ep/route"
)

// The rows of the contract, one by one. all runs f on every rank with an open Buffer.
func all(t testing.TB, w *world, cfg Config, f func(ctx context.Context, buf *Buffer)) {
	t.Helper()
	view := w.views[w.version]
	w.each(t, view.Slots(), func(ctx context.Context, g *fakeGroup) {
		buf, err := Open(ctx, g, cfg)
		if err != nil {
			panic(err)
		}
		f(ctx, buf)
		if err := buf.Close(ctx); err != nil {
			panic(err)
		}
	})
}

func wantReport(t testing.TB, cfg *Config, buf *Buffer, b batch, r *result) {
	if err := checkResult(cfg, b, r); err != nil {
		t.Errorf("rank %d: %v", buf.rank, err)
	}
}

// -1 ids: no row, and the weight is not read.
func TestMinusOneIsNoExpert(t *testing.T) {
	cfg := config(t, 4, 3, 2, 4, 2, 1)
	nan := float32(math.NaN())
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		// The row of the token without an expert is not read either: it is NaN.
		b := batch{x: []float32{1, 2, nan, nan}, experts: []int32{-1, 3, -1, -1, -1, -1}, weights: []float32{nan, .5, nan, nan, nan, nan}}
		r := step(ctx, buf, b)
		wantReport(t, &cfg, buf, b, r)
		if r.out[2] != 0 || r.out[3] != 0 {
			t.Errorf("a token without experts gives %v", r.out[2:])
		}
	})
}

// Other ids below 0 or from E on: an error with token and choice on the rank, poison on the others, and nobody hangs.
func TestInvalidExpertFailsTheStepOnAll(t *testing.T) {
	cfg := config(t, 4, 2, 2, 4, 3, 1)
	for _, id := range []int32{4, -2, math.MaxInt32} {
		w := newWorld(3, cfg.SlotBytes(3))
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			b := randomBatch(1, uint64(buf.rank), 0, &cfg, 3)
			if buf.rank == 1 {
				b.experts[3] = id
			}
			out, r := newOutput(&cfg, 3)
			_, err := Step(ctx, buf, b.x, b.experts, b.weights, compute(cfg.Hidden), out)
			wantPoison(t, buf, err, 1, ReasonInvalidExpert)
			var ie *ErrInvalidExpert
			if got := errors.As(err, &ie); got != (buf.rank == 1) || got && *ie != (ErrInvalidExpert{Token: 1, K: 1, ID: id, Experts: 4}) {
				t.Errorf("rank %d: %v", buf.rank, err)
			}
			untouched(t, r)
			good := randomBatch(1, uint64(buf.rank), 1, &cfg, 3)
			wantReport(t, &cfg, buf, good, step(ctx, buf, good)) // the group goes on
		})
	}
}

func wantPoison(t testing.TB, buf *Buffer, err error, rank int, reason Reason) {
	var p *ErrPoisoned
	if !errors.As(err, &p) || p.Rank != rank || p.Reason != reason {
		t.Errorf("rank %d: %v, want poison of rank %d: %v", buf.rank, err, rank, reason)
	} else if (p.Err != nil) != (buf.rank == rank) {
		t.Errorf("rank %d: its own complaint is %v", buf.rank, p.Err)
	}
}

// untouched checks that nothing was written to an output made by newOutput.
func untouched(t tester, r *result) {
	for _, v := range r.out {
		if v == v {
			t.Errorf("out was written: %v", r.out)
			return
		}
	}
}

// A duplicate expert in one token: both weights count.
func TestDuplicateExpertInOneToken(t *testing.T) {
	cfg := config(t, 4, 3, 2, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := batch{x: []float32{1, 2}, experts: []int32{2, 2, 2}, weights: []float32{.5, .25, 2}}
		r := step(ctx, buf, b)
		wantReport(t, &cfg, buf, b, r)
		y := make([]float32, 2)
		expert(2, b.x, y)
		if want := 2.75 * y[0]; math.Abs(float64(r.out[0]-want)) > 1e-4 {
			t.Errorf("%v, want %v", r.out[0], want)
		}
	})
}

// A token is sent once to a rank that holds several of its experts, and comes out once for each.
func TestDedupIsOnlyAnEncoding(t *testing.T) {
	cfg := config(t, 4, 4, 64, 2, 1, 1)
	w := newWorld(1, cfg.SlotBytes(1))
	sizes := map[string]int{}
	w.corrupt = func(from, to int, half string, part []byte) []byte { sizes[half] = len(part); return part }
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(3, 0, 0, &cfg, 2)
		copy(b.experts, []int32{0, 1, 2, 3, 0, 1, 2, 3})
		for i := range b.weights {
			b.weights[i] = 1
		}
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
	if want := dispatchPart(8, 2, 256); sizes["dispatch"] != want {
		t.Errorf("dispatch part of %d bytes, want %d", sizes["dispatch"], want)
	}
}

// Loss report and renormalisation: none, drop; with it, the live weights take the lost ones' place; all lost: a zero row.
func TestLossReportAndRenormalise(t *testing.T) {
	for _, renorm := range []bool{false, true} {
		cfg := config(t, 4, 2, 2, 4, 2, 1)
		cfg.Renormalise = renorm
		w := newWorld(2, cfg.SlotBytes(2))
		w.kill(1) // experts 2 and 3
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			if l := buf.Lost(); !slices.Equal(l, []int{2, 3}) {
				t.Errorf("lost %v", l)
			}
			b := batch{x: []float32{1, 2, 3, 4, 5, 6}, experts: []int32{0, 1, 0, 2, 3, 2}, weights: []float32{.5, .5, .25, .75, .5, .5}}
			r := step(ctx, buf, b)
			wantReport(t, &cfg, buf, b, r)
			if !slices.Equal(r.missing, []uint8{0, 1, 2}) || !slices.Equal(r.mass, []float32{0, .75, 1}) || r.rep.Tainted != 2 {
				t.Errorf("missing %v, mass %v, %+v", r.missing, r.mass, r.rep)
			}
			y := make([]float32, 2)
			expert(0, b.x[2:4], y)
			if renorm && r.out[2] != y[0] || !renorm && r.out[2] != .25*y[0] {
				t.Errorf("renormalise %v: %v of %v", renorm, r.out[2], y[0])
			}
			if r.out[4] != 0 || r.out[5] != 0 {
				t.Errorf("all lost: %v", r.out[4:])
			}
		})
	}
}

// Uncovered = Error: what names a lost expert fails, with its name; what does not, does not.
func TestUncoveredError(t *testing.T) {
	cfg := config(t, 4, 2, 2, 4, 3, 1)
	cfg.Uncovered = Error
	w := newWorld(3, cfg.SlotBytes(3))
	w.kill(2) // expert 3
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := batch{x: []float32{1, 2}, experts: []int32{0, 1}, weights: []float32{.5, .5}}
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		if buf.rank == 0 {
			b.experts[1] = 3
		}
		r := step(ctx, buf, b)
		wantPoison(t, buf, r.err, 0, ReasonUncovered)
		var u *ErrUncovered
		if errors.As(r.err, &u) != (buf.rank == 0) || u != nil && *u != (ErrUncovered{Token: 0, K: 1, Expert: 3}) {
			t.Errorf("rank %d: %v", buf.rank, r.err)
		}
	})
}

// Accumulation in the order of choices, rounded after each product and sum: a token whose sum depends on both.
func TestAccumulationInChoiceOrder(t *testing.T) {
	cfg := config(t, 3, 3, 1, 4, 3, 1)
	w := newWorld(3, cfg.SlotBytes(3))
	big := float32(1 << 24)
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		for _, c := range []struct {
			w    [3]float32
			want float32
		}{
			{[3]float32{big, 1, -big}, 0}, // (2^24 + 1) - 2^24
			{[3]float32{big, -big, 1}, 1},
			{[3]float32{1 + 1./4096, 0, 0}, 1 + 1./4096 + 1./4096}, // x is the same: the product is rounded
		} {
			x := float32(1)
			if c.w[1] == 0 {
				x = 1 + 1./4096 // x*w = 1 + 2/4096 + 1/2^24: the last bit goes, unless it is fused
			}
			out := &Output{Y: make([]float32, 1)}
			_, err := Step(ctx, buf, []float32{x}, []int32{2, 0, 1}, c.w[:], func(h Handle, y []float32) error { copy(y, h.X()); return nil }, out)
			if err != nil || out.Y[0] != c.want {
				t.Errorf("%v gives %v, want %v (%v)", c.w, out.Y[0], c.want, err)
			}
		}
	})
}

// Invariant (c): the world's size and the placement change no bit, nor does a repetition.
func TestSameBitsForAnyWorldSize(t *testing.T) {
	const tokens = 24
	cfg := config(t, 7, 3, 5, tokens, 1, 1)
	whole := randomBatch(11, 0, 0, &cfg, tokens)
	want, _, _ := oracle(&cfg, whole, nil)
	for n := 1; n <= 5; n++ {
		for replicas := 1; replicas <= min(n, 3); replicas++ {
			c := config(t, 7, 3, 5, tokens, n, replicas)
			perm := rand.New(rand.NewPCG(uint64(n), uint64(replicas))).Perm(n)
			for _, l := range c.Placement.Replicas { // any other placement does as well
				for i := range l {
					l[i] = perm[l[i]]
				}
			}
			got := make([]float32, tokens*5)
			w := newWorld(n, c.SlotBytes(n))
			all(t, w, c, func(ctx context.Context, buf *Buffer) {
				from, to := tokens*buf.rank/n, tokens*(buf.rank+1)/n
				b := batch{whole.x[from*5 : to*5], whole.experts[from*3 : to*3], whole.weights[from*3 : to*3]}
				for range 2 {
					if _, err := Step(ctx, buf, b.x, b.experts, b.weights, compute(5), &Output{Y: got[from*5 : to*5]}); err != nil {
						panic(err)
					}
				}
			})
			if err := sameBits(got, want); err != nil {
				t.Errorf("%d ranks, %d replicas: %v", n, replicas, err)
			}
		}
	}
}

// Invariant (b): the identity, with weights that sum to 1, gives small whole numbers back.
func TestIdentityGivesTheInputBack(t *testing.T) {
	for n := 1; n <= 5; n++ {
		cfg := config(t, 8, 4, 6, 9, n, min(2, n))
		w := newWorld(n, cfg.SlotBytes(n))
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			r := rand.New(rand.NewPCG(5, uint64(buf.rank)))
			x, ids, ws := make([]float32, 9*6), make([]int32, 9*4), make([]float32, 9*4)
			for i := range x {
				x[i] = float32(r.IntN(2001) - 1000)
			}
			for i := range ids {
				ids[i], ws[i] = int32(r.IntN(8)), [...]float32{.5, .25, .125, .125}[i%4]
			}
			out := &Output{Y: make([]float32, len(x))}
			if _, err := Step(ctx, buf, x, ids, ws, func(h Handle, y []float32) error { copy(y, h.X()); return nil }, out); err != nil {
				panic(err)
			}
			if err := sameBits(out.Y, x); err != nil {
				t.Errorf("rank %d: %v", buf.rank, err)
			}
		})
	}
}

// Invariant (d): the loss of a rank that has neither tokens nor experts changes nothing.
func TestLossOfAnIdleRankChangesNothing(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	cfg.Placement = &route.Placement{Experts: 4, Ranks: 3, Replicas: cfg.Placement.Replicas}
	in := func(rank, step int) batch { return randomBatch(9, uint64(rank), 0, &cfg, (2-rank)*2) }
	w := newWorld(3, cfg.SlotBytes(3))
	w.killAt(2, 2, "combine.before")
	res := w.steps(t, cfg, 3, in)
	for i := range res {
		for r := range 2 {
			if err := checkResult(&cfg, in(r, i), res[i][r]); err != nil {
				t.Error(err)
			}
			if err := sameBits(res[i][r].out, res[0][r].out); err != nil || res[i][r].rep.Tainted != 0 {
				t.Errorf("step %d: %v", i, err)
			}
		}
	}
}

// Zero tokens on a rank, and on all.
func TestZeroTokens(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 2)
	w := newWorld(3, cfg.SlotBytes(3))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		for i, tokens := range [][3]int{{0, 4, 2}, {0, 0, 0}, {1, 0, 0}} {
			b := randomBatch(2, uint64(buf.rank), uint64(i), &cfg, tokens[buf.rank])
			wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		}
		if _, err := Step(ctx, buf, nil, nil, nil, compute(3), nil); err != nil {
			t.Error(err)
		}
	})
}

// T > N: an error on the rank, poison on the others, nobody hangs, the next step works.
func TestTooManyTokensFailsTheStepOnAll(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 2)
	w := newWorld(3, cfg.SlotBytes(3))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		n := 4
		if buf.rank != 0 {
			n = 4 + buf.rank // two ranks: the lower one is named by all
		}
		b := randomBatch(2, uint64(buf.rank), 0, &cfg, n)
		_, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
		var tm *ErrTooManyTokens
		if errors.As(err, &tm) != (buf.rank != 0) || tm != nil && *tm != (ErrTooManyTokens{Tokens: n, Max: 4}) {
			t.Errorf("rank %d: %v", buf.rank, err)
		}
		var p *ErrPoisoned
		if !errors.As(err, &p) || p.Rank != 1 || p.Reason != ReasonTooManyTokens || p.A != 5 || p.B != 4 {
			t.Errorf("rank %d: %v", buf.rank, err)
		}
		if !strings.Contains(err.Error(), "rank 1 gave the step up: too many tokens (5, at most 4)") {
			t.Error(err)
		}
		good := randomBatch(2, uint64(buf.rank), 1, &cfg, 4)
		wantReport(t, &cfg, buf, good, step(ctx, buf, good))
	})
}

// No N: any length that the slot holds, by bytes.
func TestRaggedWithoutMaxTokens(t *testing.T) {
	cfg := config(t, 4, 1, 8, 0, 2, 1)
	w := newWorld(2, 4096)
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		for i, n := range []int{3, 40, 0, 90} {
			if buf.rank == 1 {
				n /= 3
			}
			b := randomBatch(4, uint64(buf.rank), uint64(i), &cfg, n)
			wantReport(t, &cfg, buf, b, step(ctx, buf, b))
		}
		b := randomBatch(4, uint64(buf.rank), 9, &cfg, 200)
		r := step(ctx, buf, b)
		var tm *ErrTooManyTokens
		if !errors.As(r.err, &tm) || tm.Bytes <= 4096 || tm.Slot != 4096 {
			t.Error(r.err)
		}
	})
}

// Overflow at a receiver: an error there, poison on the others, never a truncated result.
func TestOverflowAtTheReceiver(t *testing.T) {
	cfg := config(t, 4, 1, 2, 8, 2, 1)
	cfg.MaxRows = 10
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(4, uint64(buf.rank), 0, &cfg, 8)
		for i := range b.experts {
			b.experts[i], b.weights[i] = 3, 1 // all to rank 1
		}
		h, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
		if err != nil || h.Rows() != 0 {
			t.Errorf("%d rows, %v", h.Rows(), err)
		}
		defer h.Release()
		out, r := newOutput(&cfg, 8)
		_, err = buf.Combine(ctx, h, nil, out)
		wantPoison(t, buf, err, 1, ReasonOverflow)
		untouched(t, r)
		var o *ErrOverflow
		if errors.As(err, &o) != (buf.rank == 1) || o != nil && *o != (ErrOverflow{Rows: 16, Max: 10}) {
			t.Errorf("rank %d: %v", buf.rank, err)
		}
	})
}

// Mismatch: every field is compared in Open, and all ranks return the same error.
func TestMismatchNamesRankAndField(t *testing.T) {
	base := config(t, 4, 2, 4, 8, 3, 1)
	for field, change := range map[string]func(c *Config){
		"Experts":     func(c *Config) { c.Experts = 5; c.Placement = mustPlace(t, 5, 3, 1) },
		"TopK":        func(c *Config) { c.TopK = 1 },
		"Hidden":      func(c *Config) { c.Hidden = 2 },
		"DType":       func(c *Config) { c.DType = BF16 },
		"MaxTokens":   func(c *Config) { c.MaxTokens = 7 },
		"Policy":      func(c *Config) { c.Policy = Fail },
		"Uncovered":   func(c *Config) { c.Uncovered = Error },
		"Renormalise": func(c *Config) { c.Renormalise = true },
		"Layout":      func(c *Config) { c.Layout = ExpertMajor },
		"MaxRows":     func(c *Config) { c.MaxRows = 3 },
		"Placement":   func(c *Config) { c.Placement = mustPlace(t, 4, 3, 2) },
	} {
		w := newWorld(3, 2*base.SlotBytes(3))
		var mu sync.Mutex
		var errs []string
		w.each(t, []int{0, 1, 2}, func(ctx context.Context, g *fakeGroup) {
			c := base
			if g.rank == 1 {
				change(&c)
			}
			_, err := Open(ctx, g, c)
			var m *ErrMismatch
			if !errors.As(err, &m) || m.Rank != 1 || m.Field != field {
				t.Errorf("%s: rank %d: %v", field, g.rank, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err.Error())
		})
		if len(slices.Compact(errs)) != 1 {
			t.Errorf("not alike: %q", errs)
		}
	}
}

// An invalid configuration on one rank: it says what is wrong, the others who it is.
func TestInvalidConfigurationOnOneRank(t *testing.T) {
	base := config(t, 4, 2, 4, 8, 3, 1)
	w := newWorld(3, base.SlotBytes(3))
	w.each(t, []int{0, 1, 2}, func(ctx context.Context, g *fakeGroup) {
		c := base
		if g.rank == 2 {
			c.Hidden, c.TopK, c.Placement, c.DType = 0, 0, nil, 77
		}
		_, err := Open(ctx, g, c)
		if g.rank == 2 {
			for _, s := range []string{"Hidden is 0", "TopK is 0", "no placement", "DType"} {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%q misses %q", err, s)
				}
			}
			return
		}
		var p *ErrPoisoned
		if !errors.As(err, &p) || p.Rank != 2 || p.Reason != ReasonConfig {
			t.Error(err)
		}
	})
}

// Open refuses a slot that cannot hold a dispatch, or an even load; and more handles than the group's depth.
func TestOpenNeedsRoom(t *testing.T) {
	cfg := config(t, 4, 2, 64, 64, 2, 1)
	for _, c := range []struct {
		slot, handles int
		want          string
	}{
		{100, 0, "Open alone needs"}, {4096, 0, "DispatchBytes"}, {cfg.DispatchBytes(2) - 16, 0, "DispatchBytes"},
		{cfg.SlotBytes(2), 5, "Handles is 5, the group's depth is 4"},
	} {
		w := newWorld(2, c.slot)
		w.each(t, []int{0, 1}, func(ctx context.Context, g *fakeGroup) {
			bad := cfg
			bad.Handles = c.handles
			if _, err := Open(ctx, g, bad); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("slot of %d: %v, want %q", c.slot, err, c.want)
			}
		})
	}
}

// Timeouts and cancellation: a context that ends makes each waiting call return promptly.
func TestCancellation(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	gate := make(chan struct{})
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(4, uint64(buf.rank), 0, &cfg, 4)
		out, r := newOutput(&cfg, 4)
		if buf.rank == 1 { // is late twice
			<-gate
			h, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
			if err != nil {
				panic(err)
			}
			<-gate
			y := make([]float32, h.Rows()*3)
			if err := compute(3)(h, y); err != nil {
				panic(err)
			}
			if r.rep, r.err = buf.Combine(ctx, h, y, out); r.err != nil {
				panic(r.err)
			}
			h.Release()
			return
		}
		h, err := buf.StartDispatch(ctx, b.x, b.experts, b.weights)
		if err != nil {
			panic(err)
		}
		late := func(what string, f func(ctx context.Context) error) {
			begin := time.Now()
			short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
			defer cancel()
			if err := f(short); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", what, err)
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("%s took %v", what, d)
			}
			gate <- struct{}{}
			if err := f(ctx); err != nil { // the fake's context ends only the waiting
				t.Errorf("%s, again: %v", what, err)
			}
		}
		late("Recv", h.Recv)
		y := make([]float32, h.Rows()*3)
		if err := compute(3)(h, y); err != nil {
			panic(err)
		}
		if err := h.StartCombine(ctx, y); err != nil {
			panic(err)
		}
		late("Result", func(ctx context.Context) (err error) { r.rep, err = h.Result(ctx, out); return err })
		h.Release()
		wantReport(t, &cfg, buf, b, r)
	})
}

// Padding rows are never read: they are NaN here (compute fills y with it), as are rows of tokens without an expert.
func TestPaddingIsNeverRead(t *testing.T) {
	cfg := config(t, 6, 2, 3, 5, 2, 1)
	cfg.Layout, cfg.Align = ExpertMajor, 16
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 5)
		b.experts[4], b.experts[5] = -1, -1
		for i := range 3 {
			b.x[2*3+i] = float32(math.NaN())
		}
		padded := 0
		out, r := newOutput(&cfg, 5)
		r.rep, r.err = Step(ctx, buf, b.x, b.experts, b.weights, func(h Handle, y []float32) error {
			if h.Rows()%16 != 0 {
				t.Errorf("%d rows", h.Rows())
			}
			for _, e := range h.RowExpert() {
				if e < 0 {
					padded++
				}
			}
			return compute(3)(h, y)
		}, out)
		wantReport(t, &cfg, buf, b, r)
		if padded == 0 {
			t.Error("no padding")
		}
		for _, v := range r.out {
			if v != v {
				t.Fatal("NaN got out")
			}
		}
	})
}

package ep

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/ep/route"
)

// Call order and handle reuse.
func TestHandleOrder(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		is := func(what string, err, want error) {
			if !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", what, err, want)
			}
		}
		result := func(h Handle) error {
			_, err := h.Result(ctx, &Output{Y: make([]float32, 12)})
			return err
		}
		b := randomBatch(4, uint64(buf.rank), 0, &cfg, 4)
		h, err := buf.StartDispatch(ctx, b.x, b.experts, b.weights)
		is("start", err, nil)
		is("combine before received", h.StartCombine(ctx, nil), ErrOutOfStep)
		is("result before combine", result(h), ErrOutOfStep)
		if h.Rows() != 0 || h.X() != nil && len(h.X()) != 0 || len(h.Blocks()) != 0 {
			t.Error("rows before Recv")
		}
		is("recv", h.Recv(ctx), nil)
		is("recv again", h.Recv(ctx), nil)
		is("result before combine", result(h), ErrOutOfStep)
		is("SetPlacement with a live handle", buf.SetPlacement(cfg.Placement), ErrOutOfStep)
		var shape *ErrShape
		if err := h.StartCombine(ctx, make([]float32, h.Rows()*3+1)); !errors.As(err, &shape) || shape.Arg != "y" || shape.Want != h.Rows()*3 {
			t.Errorf("y: %v", err)
		}
		is("bf16", h.StartCombineBF16(ctx, make([]uint16, h.Rows()*3)), ErrDType)
		y := make([]float32, h.Rows()*3)
		is("combine", h.StartCombine(ctx, y), nil)
		is("combine again", h.StartCombine(ctx, y), ErrOutOfStep)
		is("fail after combine", h.Fail(ctx, errors.New("x")), ErrOutOfStep)
		for _, out := range []*Output{nil, {}, {Y: make([]float32, 11)}, {Y: make([]float32, 12), YBF16: make([]uint16, 12)},
			{Y: make([]float32, 12), Missing: make([]uint8, 3)}, {Y: make([]float32, 12), LostMass: make([]float32, 5)}} {
			if _, err := h.Result(ctx, out); !errors.As(err, &shape) {
				t.Errorf("%+v: %v", out, err)
			}
		}
		is("result", result(h), nil)
		is("result again", result(h), ErrUsed)
		is("recv after result", h.Recv(ctx), ErrUsed)
		is("combine after result", h.StartCombine(ctx, y), ErrUsed)
		rows := h.Rows()
		if len(h.X()) != rows*3 {
			t.Error("rows are the handle's until Release")
		}
		h.Release()
		h.Release()
		is("released", result(h), ErrStale)
		is("released", h.Recv(ctx), ErrStale)
		is("zero handle", Handle{}.Recv(ctx), ErrStale)
		Handle{}.Release()
		if h.Rows() != 0 || h.X() != nil || h.Blocks() != nil {
			t.Error("rows after Release")
		}
		g, err := buf.Dispatch(ctx, b.x, b.experts, b.weights) // the same memory
		is("again", err, nil)
		is("the old handle", h.Recv(ctx), ErrStale)
		h.Release()
		is("combine", g.StartCombine(ctx, make([]float32, g.Rows()*3)), nil)
		is("result", result(g), nil)
		g.Release()
	})
}

// Lifetime: as many handles as agreed, each with memory of its own, then ErrNoBuffer.
func TestTooManyLiveHandles(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	cfg.Handles = 3
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		var hs []Handle
		var bs []batch
		for i := range 3 {
			b := randomBatch(6, uint64(buf.rank), uint64(i), &cfg, 4)
			h, err := buf.Dispatch(ctx, b.x, b.experts, b.weights)
			if err != nil {
				panic(err)
			}
			hs, bs = append(hs, h), append(bs, b)
		}
		if _, err := buf.StartDispatch(ctx, nil, nil, nil); !errors.Is(err, ErrNoBuffer) {
			t.Errorf("rank %d: %v", buf.rank, err)
		}
		for _, i := range []int{1, 0, 2} { // combined in another order, taken in a third
			y := make([]float32, hs[i].Rows()*3)
			if err := compute(3)(hs[i], y); err != nil {
				panic(err)
			}
			if err := hs[i].StartCombine(ctx, y); err != nil {
				panic(err)
			}
		}
		for _, i := range []int{2, 0, 1} {
			out, r := newOutput(&cfg, 4)
			r.rep, r.err = hs[i].Result(ctx, out)
			wantReport(t, &cfg, buf, bs[i], r)
			hs[i].Release()
		}
		b := randomBatch(6, uint64(buf.rank), 9, &cfg, 4)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
}

// Result of a step before an earlier one was combined: told, not done.
func TestResultOutOfOrder(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		var h [2]Handle
		for i := range h {
			var err error
			if h[i], err = buf.Dispatch(ctx, nil, nil, nil); err != nil {
				panic(err)
			}
		}
		if err := h[1].StartCombine(ctx, make([]float32, h[1].Rows()*3)); err != nil {
			panic(err)
		}
		if _, err := h[1].Result(ctx, nil); !errors.Is(err, ErrOutOfStep) {
			t.Error(err)
		}
		for _, i := range []int{0, 1} {
			if i == 0 {
				if err := h[i].StartCombine(ctx, make([]float32, h[i].Rows()*3)); err != nil {
					panic(err)
				}
			}
			if _, err := h[i].Result(ctx, nil); err != nil {
				t.Error(err)
			}
			h[i].Release()
		}
	})
}

// pipeline runs steps two at a time, as micro-batches overlap, with Rerun: a pair that fails is repeated whole.
func pipeline(ctx context.Context, buf *Buffer, cfg *Config, n int, in func(rank, step int) batch) []*result {
	res := make([]*result, n)
	for i := 0; i < n; i += 2 {
		for {
			var h [2]Handle
			err := func() (err error) {
				for j := range h {
					b := in(buf.rank, i+j)
					if h[j], err = buf.StartDispatch(ctx, b.x, b.experts, b.weights); err != nil {
						return err
					}
				}
				for j := range h {
					if err = h[j].Recv(ctx); err != nil {
						return err
					}
					y := make([]float32, h[j].Rows()*cfg.Hidden)
					if err = compute(cfg.Hidden)(h[j], y); err != nil {
						return err
					}
					if err = h[j].StartCombine(ctx, y); err != nil {
						return err
					}
				}
				return nil
			}()
			again := false
			for j := range h {
				var out *Output
				out, res[i+j] = newOutput(cfg, in(buf.rank, i+j).tokens(cfg.Hidden))
				if err == nil {
					res[i+j].rep, res[i+j].err = h[j].Result(ctx, out)
				} else {
					res[i+j].err = err
				}
				var rr *ErrRerun
				again = again || errors.As(res[i+j].err, &rr)
			}
			for j := range h {
				h[j].Release()
			}
			if !again {
				break
			}
		}
	}
	return res
}

// Overlapped steps with a death at each point.
func TestOverlapWithKill(t *testing.T) {
	const n = 3
	for _, seq := range []uint64{1, 2, 3, 4} {
		for _, point := range killPoints {
			t.Run(fmt.Sprintf("%d/%s", seq, point), func(t *testing.T) {
				cfg := config(t, 6, 2, 3, 4, n, 2)
				in := func(rank, step int) batch { return randomBatch(8, uint64(rank), uint64(step), &cfg, 4) }
				w := newWorld(n, cfg.SlotBytes(n))
				w.killAt(1, seq, point)
				all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
					for i, r := range pipeline(ctx, buf, &cfg, 6, in) {
						if err := checkResult(&cfg, in(buf.rank, i), r); err != nil {
							t.Errorf("rank %d, step %d: %v", buf.rank, i, err)
						}
					}
				})
			})
		}
	}
}

// Overlapped steps of which one is poisoned: the error comes with its Result, on all alike; the other is not touched.
func TestOverlapWithPoison(t *testing.T) {
	cfg := config(t, 6, 2, 3, 4, 3, 1)
	in := func(rank, step int) batch {
		b := randomBatch(8, uint64(rank), uint64(step), &cfg, 4)
		if rank == 2 && step == 2 {
			b.experts[0] = 99
		}
		return b
	}
	w := newWorld(3, cfg.SlotBytes(3))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		for i, r := range pipeline(ctx, buf, &cfg, 6, in) {
			if i == 2 {
				wantPoison(t, buf, r.err, 2, ReasonInvalidExpert)
				untouched(t, r)
				continue
			}
			wantReport(t, &cfg, buf, in(buf.rank, i), r)
		}
	})
}

// Policy Fail: *RankLost as it is, alike; out is untouched; the next step goes on with the rest.
func TestPolicyFail(t *testing.T) {
	for _, point := range killPoints {
		cfg := config(t, 4, 2, 3, 4, 3, 1)
		cfg.Policy = Fail
		w := newWorld(3, cfg.SlotBytes(3))
		w.killAt(1, 1, point)
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			lost := 0
			for i := range 3 {
				b := randomBatch(8, uint64(buf.rank), uint64(i), &cfg, 4)
				r := step(ctx, buf, b)
				var rl *RankLost
				if errors.As(r.err, &rl) {
					lost++
					if !slices.Equal(rl.Lost, []int{1}) || rl.Epoch != 2 {
						t.Errorf("%s: rank %d: %v", point, buf.rank, r.err)
					}
					var rr *ErrRerun
					if errors.As(r.err, &rr) {
						t.Error("Fail gives ErrRerun")
					}
					untouched(t, r)
					continue
				}
				wantReport(t, &cfg, buf, b, r)
			}
			if lost != 1 {
				t.Errorf("%s: rank %d was told %d times", point, buf.rank, lost)
			}
		})
	}
}

// One snapshot per step: a death in the step does not change what the step's handle routes by.
func TestSnapshotPerStep(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 2)
	w := newWorld(3, cfg.SlotBytes(3))
	w.killAt(2, 1, "combine.before")
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		h, err := buf.StartDispatch(ctx, b.x, b.experts, b.weights)
		if err != nil {
			panic(err)
		}
		defer h.Release()
		if err := h.Recv(ctx); err == nil {
			if err = h.StartCombine(ctx, make([]float32, h.Rows()*3)); err == nil {
				_, err = h.Result(ctx, &Output{Y: make([]float32, 12)})
			}
			var rr *ErrRerun
			if !errors.As(err, &rr) || rr.Epoch != 2 || !slices.Equal(rr.Lost, []int{2}) {
				t.Errorf("rank %d: %v", buf.rank, err)
			}
		}
		if set, v := h.Active(); set != route.All(3) || v != 1 {
			t.Errorf("rank %d: %v of version %d", buf.rank, set.Slots(), v)
		}
		if h.Rows() != 0 {
			t.Error("rows of a step that is lost")
		}
		if err := h.Recv(ctx); err == nil {
			t.Error("the handle goes on")
		}
		if set, v := buf.Active(); set != route.All(2) || v != 2 {
			t.Errorf("rank %d: now %v of version %d", buf.rank, set.Slots(), v)
		}
	})
}

// A compute error on one rank fails the step on all, and the group goes on.
func TestComputeError(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 3, 2)
	broken := errors.New("out of tiles")
	w := newWorld(3, cfg.SlotBytes(3))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		out, r := newOutput(&cfg, 4)
		_, err := Step(ctx, buf, b.x, b.experts, b.weights, func(h Handle, y []float32) error {
			if buf.rank == 1 {
				return broken
			}
			return compute(3)(h, y)
		}, out)
		wantPoison(t, buf, err, 1, ReasonFailed)
		if errors.Is(err, broken) != (buf.rank == 1) {
			t.Error(err)
		}
		untouched(t, r)
		wantReport(t, &cfg, buf, b, step(ctx, buf, b))
	})
}

// Release before the end, in each state: the others are told, the group goes on.
func TestReleaseEarly(t *testing.T) {
	for _, state := range []string{"started", "received", "combining"} {
		cfg := config(t, 4, 2, 3, 4, 3, 2)
		w := newWorld(3, cfg.SlotBytes(3))
		told := make(chan struct{}, 2)
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
			if buf.rank == 2 {
				h, err := buf.StartDispatch(ctx, b.x, b.experts, b.weights)
				if err == nil && state != "started" {
					err = h.Recv(ctx)
				}
				if err == nil && state == "combining" {
					y := make([]float32, h.Rows()*3)
					if err = compute(3)(h, y); err == nil {
						err = h.StartCombine(ctx, y)
					}
				}
				if err != nil {
					panic(err)
				}
				h.Release()
				if err := h.Recv(ctx); !errors.Is(err, ErrStale) {
					t.Error(err)
				}
				if state != "started" { // then they need no further call of ours
					<-told
					<-told
				}
			} else {
				r := step(ctx, buf, b)
				told <- struct{}{}
				if state == "combining" {
					wantReport(t, &cfg, buf, b, r) // it had given all that the others needed
				} else {
					wantPoison(t, buf, r.err, 2, ReasonReleased)
				}
			}
			for i := range 6 { // more than there are slots
				b := randomBatch(8, uint64(buf.rank), uint64(i), &cfg, 4)
				wantReport(t, &cfg, buf, b, step(ctx, buf, b))
			}
		})
	}
}

// A loss that only a released handle meets is told by the next StartDispatch, one that was told before is not told again,
// and it does not end the steps of the next version.
func TestLossMetByAReleasedHandle(t *testing.T) {
	for _, asked := range []bool{false, true} {
		cfg := config(t, 4, 2, 3, 4, 3, 2)
		w := newWorld(3, cfg.SlotBytes(3))
		w.killAt(2, 1, "combine.before")
		all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
			b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
			start := func() (Handle, error) { return buf.StartDispatch(ctx, b.x, b.experts, b.weights) }
			h, err := start()
			if err != nil {
				panic(err)
			}
			told := false
			if asked || buf.rank == 2 {
				if err = h.Recv(ctx); err == nil {
					err = h.StartCombine(ctx, make([]float32, h.Rows()*3))
				}
				told = isRerun(err)
			}
			for set := w.last(); set.Has(2); set = w.last() {
				time.Sleep(time.Millisecond)
			}
			if asked && !told {
				if _, err := start(); !isRerun(err) {
					t.Errorf("rank %d: %v", buf.rank, err)
				}
			}
			h.Release()
			if !asked {
				if _, err := start(); !isRerun(err) {
					t.Errorf("rank %d: %v", buf.rank, err)
				}
			}
			for range 6 {
				h, err := start()
				if err == nil {
					err = h.Recv(ctx)
				}
				y := make([]float32, h.Rows()*3)
				if err == nil {
					err = compute(3)(h, y)
				}
				out, r := newOutput(&cfg, 4)
				if err == nil {
					r.rep, err = buf.Combine(ctx, h, y, out)
				}
				r.err = err
				wantReport(t, &cfg, buf, b, r)
				h.Release()
			}
		})
	}
}

// Close with live handles: nobody hangs, and the Buffer is of no use any more.
func TestCloseWithLiveHandles(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		for range 2 {
			if _, err := buf.StartDispatch(ctx, nil, nil, nil); err != nil {
				panic(err)
			}
		}
		if err := buf.Close(ctx); err != nil {
			t.Error(err)
		}
		if _, err := buf.StartDispatch(ctx, nil, nil, nil); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if err := buf.SetPlacement(cfg.Placement); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// Shapes and types: a wrong shape is an outcome like too many tokens; a call for the other type sends nothing.
func TestWrongShapes(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		b := randomBatch(8, uint64(buf.rank), 0, &cfg, 4)
		for _, c := range []struct {
			arg  string
			x    []float32
			ids  []int32
			ws   []float32
			want int
		}{
			{"x", b.x[:11], b.experts, b.weights, 9}, {"experts", b.x, b.experts[:7], b.weights, 8}, {"weights", b.x, b.experts, nil, 8},
		} {
			x, ids, ws := b.x, b.experts, b.weights
			if buf.rank == 1 {
				x, ids, ws = c.x, c.ids, c.ws
			}
			_, err := buf.Dispatch(ctx, x, ids, ws)
			wantPoison(t, buf, err, 1, ReasonShape)
			var s *ErrShape
			if errors.As(err, &s) && (s.Arg != c.arg || s.Want != c.want) {
				t.Errorf("%+v, want %s, %d", s, c.arg, c.want)
			}
		}
		if _, err := buf.DispatchBF16(ctx, nil, nil, nil); !errors.Is(err, ErrDType) {
			t.Error(err)
		}
	})
}

// Self: a rank that its group does not count as active sends nothing.
func TestSelfMustBeActive(t *testing.T) {
	cfg := config(t, 4, 2, 3, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	w.views[1] = route.All(1)
	g := w.group(1)
	if _, err := Open(t.Context(), g, cfg); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
	cfg.Joining = true
	buf, err := Open(t.Context(), g, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := buf.StartDispatch(t.Context(), nil, nil, nil); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
}

// NaN and infinities pass, bit by bit.
func TestNaNAndInfPass(t *testing.T) {
	cfg := config(t, 2, 1, 4, 4, 2, 1)
	w := newWorld(2, cfg.SlotBytes(2))
	special := []float32{math.Float32frombits(0x7fc12345), float32(math.Inf(1)), float32(math.Inf(-1)), math.Float32frombits(0x80000001)}
	all(t, w, cfg, func(ctx context.Context, buf *Buffer) {
		h, err := buf.Dispatch(ctx, special, []int32{int32(1 - buf.rank)}, []float32{1})
		if err != nil {
			panic(err)
		}
		defer h.Release()
		if err := sameBits(h.X(), special); err != nil {
			t.Errorf("received: %v", err)
		}
		out := make([]float32, 4)
		if _, err := buf.Combine(ctx, h, h.X(), &Output{Y: out}); err != nil {
			panic(err)
		}
		if err := sameBits(out, special); err != nil {
			t.Errorf("combined: %v", err)
		}
	})
}

// Errors read well.
func TestErrorTexts(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&ErrPoisoned{Rank: 3, Reason: ReasonOverflow, A: 9, B: 8}, "ep: rank 3 gave the step up: overflow (9, at most 8)"},
		{&ErrMismatch{Rank: 1, Field: "TopK", Theirs: 2, Want: 4}, "ep: rank 1 has TopK 2, the lowest rank has 4"},
		{&ErrRerun{Epoch: 5, Lost: []int{2}}, "ep: ranks [2] lost, repeat the step in version 5"},
		{&RankLost{Lost: []int{2}, Epoch: 5}, "ep: ranks [2] lost, version 5 goes on without them"},
		{&RankLost{Err: errors.New("why")}, "why"},
		{&ErrUncovered{Token: 1, K: 2, Expert: 3}, "ep: token 1, choice 2: no active rank holds expert 3"},
		{&ErrTooManyTokens{Tokens: 7, Bytes: 100, Slot: 64}, "ep: 7 tokens need 100 bytes, the group's slot has 64"},
	} {
		if c.err.Error() != c.want {
			t.Errorf("%q, want %q", c.err, c.want)
		}
	}
	for r := ReasonNone; r <= reasons; r++ {
		if s := r.String(); strings.HasPrefix(s, "reason ") != (r == ReasonNone || r == reasons) {
			t.Errorf("%d is %q", r, s)
		}
	}
}

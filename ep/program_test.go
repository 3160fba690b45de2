package ep

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/serry-project/serry/ep/route"
	"pgregory.net/rapid"
)

// What a rank does in a step of a random program.
const (
	actOK          = iota
	actTooMany     // its batch is too long
	actBadExpert   // names an expert that does not exist
	actFail        // its computation fails
	actDropStarted // releases the handle before Recv
	actDropReceived
	actions
)

// program is a sequence of windows of overlapping steps. All ranks run it, each with its own actions.
type program struct {
	windows []int
	act     func(rank, step int) int
	in      func(rank, step int) batch
}

// outcome is how a step ended, as far as all ranks must agree about it.
func outcome(r *result) string {
	var p *ErrPoisoned
	switch {
	case r.err == nil:
		return fmt.Sprintf("ok in %d with %v", r.rep.Epoch, r.rep.Active.Slots())
	case errors.As(r.err, &p):
		return fmt.Sprintf("poison of %d: %v (%d, %d)", p.Rank, p.Reason, p.A, p.B)
	}
	return r.err.Error()
}

// run is the recipe for overlapped steps with Rerun: after a loss start nothing new, ask every handle, oldest first, and
// repeat those that are lost.
func (pr program) run(ctx context.Context, t tester, buf *Buffer) (res []*result) {
	first := 0
	for _, n := range pr.windows {
		res = append(res, make([]*result, n)...)
		for from := first; from < first+n; {
			from += pr.window(ctx, t, buf, from, res[from:first+n])
		}
		first += n
	}
	return res
}

func isRerun(err error) bool {
	var rr *ErrRerun
	return errors.As(err, &rr)
}

var errDropped = errors.New("dropped")

// window runs steps from.. and returns how many of them are over.
func (pr program) window(ctx context.Context, t tester, buf *Buffer, from int, res []*result) int {
	cfg := buf.cfg
	hs := make([]Handle, len(res))
	outs := make([]*Output, len(res))
	for i := range res {
		b := pr.in(buf.rank, from+i)
		outs[i], res[i] = newOutput(&cfg, b.tokens(cfg.Hidden))
		if i > 0 && isRerun(res[i-1].err) {
			res[i].err = res[i-1].err
			continue
		}
		switch pr.act(buf.rank, from+i) {
		case actTooMany:
			b = randomBatch(1, 1, 1, &cfg, cfg.MaxTokens+1)
		case actBadExpert:
			b.experts = append([]int32{}, b.experts...)
			if len(b.experts) > 0 {
				b.experts[0] = -7
			}
		}
		hs[i], res[i].err = buf.StartDispatch(ctx, b.x, b.experts, b.weights)
	}
	for i, h := range hs {
		if res[i].err != nil {
			continue
		}
		res[i].err = func() error {
			act := pr.act(buf.rank, from+i)
			if act == actDropStarted {
				h.Release()
				return errDropped
			}
			if err := h.Recv(ctx); err != nil {
				return err
			}
			if act == actDropReceived {
				h.Release()
				return errDropped
			}
			if act == actFail {
				return h.Fail(ctx, errors.New("cannot"))
			}
			y := make([]float32, h.Rows()*cfg.Hidden)
			if err := compute(cfg.Hidden)(h, y); err != nil {
				return err
			}
			return h.StartCombine(ctx, y)
		}()
	}
	done := len(res)
	for i, h := range hs {
		if res[i].err == nil {
			res[i].rep, res[i].err = h.Result(ctx, outs[i])
		}
		if isRerun(res[i].err) {
			done = min(done, i)
		} else if done < i {
			t.Errorf("rank %d: step %d is lost, the later step %d is not: %v", buf.rank, from+done, from+i, res[i].err)
		}
	}
	for _, h := range hs {
		h.Release()
	}
	return done
}

// Random programs, with deaths or with handles that are dropped: nobody hangs, all ranks agree about every step, and
// what succeeds has the bits of the oracle.
func TestRandomPrograms(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(rt, "R")
		cfg := drawConfig(rt, n)
		cfg.MaxTokens = 6
		seed := rapid.Uint64().Draw(rt, "seed")
		pr := program{windows: rapid.SliceOfN(rapid.IntRange(1, 4), 1, 4).Draw(rt, "windows")}
		pr.in = func(rank, step int) batch {
			return randomBatch(seed, uint64(rank), uint64(step), &cfg, (rank*5+step)%6+1)
		}
		die := rapid.Bool().Draw(rt, "die")
		bad := rapid.Float64Range(0, 0.5).Draw(rt, "bad")
		pr.act = func(rank, step int) int {
			r := rand.New(rand.NewPCG(seed^0x9e37, uint64(rank)<<32|uint64(step)))
			if r.Float64() >= bad {
				return actOK
			}
			if die {
				return r.IntN(actDropStarted)
			}
			return r.IntN(actions)
		}
		w := newWorld(n, cfg.SlotBytes(n))
		if die && n > 1 {
			type death struct {
				rank  int
				seq   uint64
				point string
			}
			deaths := map[death]bool{}
			for range rapid.IntRange(1, n-1).Draw(rt, "deaths") {
				deaths[death{rapid.IntRange(0, n-2).Draw(rt, "rank"), rapid.Uint64Range(0, 6).Draw(rt, "seq"),
					rapid.SampledFrom(killPoints).Draw(rt, "point")}] = true
			}
			w.at = func(r int, s uint64, p string) {
				if deaths[death{r, s, p}] {
					w.mu.Lock()
					defer w.mu.Unlock()
					w.kill(r)
				}
			}
		}
		all := make([][]*result, n)
		every := route.All(n)
		w.each(rt, every.Slots(), func(ctx context.Context, g *fakeGroup) {
			buf, err := Open(ctx, g, cfg)
			if err != nil {
				panic(err)
			}
			all[g.rank] = pr.run(ctx, rt, buf)
			if err := buf.Close(ctx); err != nil {
				panic(err)
			}
		})
		var want []*result
		for r, res := range all {
			if res == nil {
				continue
			}
			for i, v := range res {
				if v.err == nil {
					if err := checkResult(&cfg, pr.in(r, i), v); err != nil {
						rt.Fatalf("rank %d, step %d: %v", r, i, err)
					}
				} else {
					untouched(rt, v)
				}
				if want != nil && want[i].err != errDropped && v.err != errDropped && outcome(v) != outcome(want[i]) {
					rt.Fatalf("step %d: rank %d says %q, another %q", i, r, outcome(v), outcome(want[i]))
				}
			}
			if want == nil {
				want = res
			}
		}
	})
}

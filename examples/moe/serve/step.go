package serve

import (
	"context"
	"fmt"
	"time"

	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/examples/moe/model"
)

// idleStep is how long a step takes in which nothing is left to answer, until a replacement has entered.
const idleStep = 2 * time.Millisecond

// step runs one pass of the model over the rows of all ranks, and agrees on the bytes that come out.
func (s *server) step(ctx context.Context) error {
	if s.st.answered() { // alike on all ranks
		s.last = s.last[:0]
		time.Sleep(idleStep)
		return s.agree(ctx, nil)
	}
	s.choose()
	m, n := s.m, len(s.rows)
	if err := s.batch.Begin(s.rows); err != nil {
		return err
	}
	x, xn, y := grow(&s.x, n*m.Hidden), grow(&s.xn, n*m.Hidden), grow(&s.y, n*m.Hidden)
	wts, experts, mass := grow(&s.wts, n*m.TopK), grow(&s.experts, n*m.TopK), grow(&s.mass, n)
	m.Embed(s.rows, x)
	for l := range m.Layers {
		m.Attend(s.batch, l, x)
		m.Route(s.batch, l, x, xn, experts, wts)
		compute := func(h ep.Handle, y []float32) error { return s.compute(l, h, y) }
		rep, err := ep.Step(ctx, s.buf, xn, experts, wts, compute, &ep.Output{Y: y, LostMass: mass})
		if err != nil {
			return fmt.Errorf("layer %d: %w", l, err)
		}
		if err := s.count(rep, experts); err != nil {
			return err
		}
		for i := range x {
			x[i] += y[i]
		}
		s.owe(mass)
	}
	logits := grow(&s.logits, n*m.Vocab)
	m.Head(s.batch, x, logits)
	s.batch.Commit()
	s.stats.Steps++
	return s.agree(ctx, logits)
}

// choose fills s.rows with what this rank feeds in this step: first the newest byte of each of its requests that lacks
// only that, then of the others (new here, or taken over) as much as the rows hold.
func (s *server) choose() {
	s.rows, s.last = s.rows[:0], s.last[:0]
	var long []int
	for i := range s.st.requests {
		r := &s.st.requests[i]
		if r.Owner != s.w.Rank() || r.Done {
			s.caches[i], s.owed[i] = nil, 0 // who loses a request forgets it
			continue
		}
		if s.caches[i] == nil {
			s.caches[i] = s.m.NewCache()
		}
		if s.caches[i].Len()+1 < len(s.cfg.Prompts[i])+1+len(r.Text) {
			long = append(long, i)
		} else {
			s.feed(i)
		}
	}
	for _, i := range long {
		s.feed(i)
	}
}

// feed appends the rows that a request's cache lacks, as far as there is room.
func (s *server) feed(req int) {
	c, toks := s.caches[req], append(model.Prompt(s.cfg.Prompts[req]), s.st.requests[req].Text...)
	for p := c.Len(); p < len(toks) && len(s.rows) < s.cfg.Rows; p++ {
		if p == len(toks)-1 {
			s.last = append(s.last, lastRow{len(s.rows), req})
		}
		s.rows = append(s.rows, model.Row{Cache: c, Pos: p, Token: toks[p]})
	}
}

// compute runs the experts that live here on the rows that came.
func (s *server) compute(layer int, h ep.Handle, y []float32) error {
	x, w := h.X(), s.m.Hidden
	for _, b := range h.Blocks() {
		if b.Count == 0 {
			continue
		}
		lo, hi := b.Offset*w, (b.Offset+b.Count)*w
		if err := s.m.Expert(s.batch, layer, b.Expert, x[lo:hi], y[lo:hi]); err != nil {
			return err
		}
	}
	return nil
}

// owe adds the rows' lost mass to that of their requests.
func (s *server) owe(mass []float32) {
	for i, lost := range mass {
		if lost == 0 {
			continue
		}
		for req, c := range s.caches {
			if c == s.rows[i].Cache {
				s.owed[req] += float64(lost)
			}
		}
	}
}

// count keeps the books of one layer.
func (s *server) count(rep ep.Report, experts []int32) error {
	s.stats.Reruns += int64(rep.Reruns)
	s.stats.Computed += int64(rep.Rows)
	me, row := s.w.Rank(), int64(4*s.m.Hidden)
	s.table.Reset(s.place, rep.Active, me)
	if err := s.plan.Build(&s.table, len(experts)/s.m.TopK, s.m.TopK, experts); err != nil {
		return err
	}
	for r := range s.place.Ranks {
		s.stats.Rows += int64(s.plan.Count(r))
		if r != me {
			s.stats.RemoteRows += int64(s.plan.Count(r))
			s.stats.LinkBytes += row * int64(s.plan.TokenCount(r)) // a token goes to a rank once
		}
	}
	s.stats.LinkBytes += row * int64(rep.Rows-s.plan.Count(me)) // results for the rows of others
	return nil
}

// grow returns s with length n, its contents undefined.
func grow[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n+n/2)
	}
	*s = (*s)[:n]
	return *s
}

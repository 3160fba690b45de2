package ep

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/pg"
)

// FromGroup makes a Group of a process group, which has Options{Mode: pg.Raise, Pairs: true}.
func FromGroup(g *pg.Group) Group { return &pgGroup{g: g} }

type pgGroup struct {
	g     *pg.Group
	mu    sync.Mutex
	spare []*pgPair
}

func (p *pgGroup) Rank() int      { return p.g.Rank() }
func (p *pgGroup) Size() int      { return p.g.Size() }
func (p *pgGroup) Depth() int     { return p.g.Options().Depth }
func (p *pgGroup) SlotBytes() int { return p.g.Options().SlotBytes }

func (p *pgGroup) Active() (route.Ranks, uint64) {
	set, version := p.g.Active()
	return p.ranks(set), version
}

// ranks turns slots of the world into ranks of the group.
func (p *pgGroup) ranks(set pg.Set) (r route.Ranks) {
	for i, s := range p.g.Slots() {
		if set.Has(s) {
			r.Add(i)
		}
	}
	return r
}

func (p *pgGroup) StartPair(ctx context.Context, x *Exchange) (Pair, error) {
	q := p.pair()
	pp, err := p.g.StartPair(ctx, q.half(0, x))
	if err != nil {
		p.free(q)
		return nil, translate(err)
	}
	q.p = pp
	return q, nil
}

// translate makes pg's errors ours, with pg's inside.
func translate(err error) error {
	if err == nil {
		return nil
	}
	var l *pg.RankLost
	switch {
	case errors.As(err, &l):
		return &RankLost{Lost: l.Lost, Epoch: l.Epoch, Err: err}
	case errors.Is(err, pg.ErrMoved):
		return fmt.Errorf("%w: %w", ErrMoved, err)
	}
	return err
}

// pgPair is used again when it is over, so that a step allocates nothing.
type pgPair struct {
	g    *pgGroup
	p    *pg.Pair
	give [2]pg.Exchange
	take [2]func(parts [][]byte)
}

func (p *pgGroup) pair() *pgPair {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.spare); n > 0 {
		q := p.spare[n-1]
		p.spare = p.spare[:n-1]
		return q
	}
	q := &pgPair{g: p}
	for i := range q.give {
		q.give[i].Take = func(parts [][]byte) error { q.take[i](parts); return nil }
	}
	return q
}

func (p *pgGroup) free(q *pgPair) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q.p, q.take = nil, [2]func([][]byte){}
	p.spare = append(p.spare, q)
}

// half is one half as pg wants it.
func (q *pgPair) half(i int, x *Exchange) *pg.Exchange {
	e := &q.give[i]
	e.Version, e.Sizes, e.Fill, e.Digest = x.Version, x.Sizes, x.Fill, x.Digest
	q.take[i] = x.Take
	return e
}

func (q *pgPair) Dispatched(ctx context.Context) error { return translate(q.p.Dispatched(ctx)) }

func (q *pgPair) StartCombine(ctx context.Context, x *Exchange) error {
	return translate(q.p.StartCombine(ctx, q.half(1, x)))
}

func (q *pgPair) Combined(ctx context.Context) (Result, error) {
	r, err := q.p.Combined(ctx)
	if err != nil {
		return Result{}, translate(err)
	}
	res := Result{Seq: r.Seq, Epoch: r.Epoch, Active: q.g.ranks(r.Active)}
	q.g.free(q)
	return res, nil
}

// Abandon has nothing to do: after a RankLost pg has dropped the pair.
func (q *pgPair) Abandon() {}

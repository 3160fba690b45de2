package ep

import (
	"context"
	"errors"
	"fmt"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/pg"
)

// FromGroup makes a Group of a process group, which has Options{Mode: pg.Raise, Pairs: true}.
func FromGroup(g *pg.Group) Group { return &pgGroup{g: g} }

type pgGroup struct{ g *pg.Group }

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
	q := &pgPair{g: p}
	var err error
	q.p, err = p.g.StartPair(ctx, pgHalf(x))
	if err != nil {
		return nil, translate(err)
	}
	return q, nil
}

// pgHalf is one half as pg wants it.
func pgHalf(x *Exchange) *pg.Exchange {
	return &pg.Exchange{
		Version: x.Version, Sizes: x.Sizes, Fill: x.Fill, Digest: x.Digest,
		Take: func(parts [][]byte) error { x.Take(parts); return nil },
	}
}

// translate makes pg's errors ours, with pg's inside.
func translate(err error) error {
	var l *pg.RankLost
	switch {
	case errors.As(err, &l):
		return &RankLost{Lost: l.Lost, Epoch: l.Epoch, Err: err}
	case errors.Is(err, pg.ErrMoved):
		return fmt.Errorf("%w: %w", ErrMoved, err)
	}
	return err
}

type pgPair struct {
	g *pgGroup
	p *pg.Pair
}

func (q *pgPair) Dispatched(ctx context.Context) error { return translate(q.p.Dispatched(ctx)) }

func (q *pgPair) StartCombine(ctx context.Context, x *Exchange) error {
	return translate(q.p.StartCombine(ctx, pgHalf(x)))
}

func (q *pgPair) Combined(ctx context.Context) (Result, error) {
	r, err := q.p.Combined(ctx)
	if err != nil {
		return Result{}, translate(err)
	}
	return Result{Seq: r.Seq, Epoch: r.Epoch, Active: q.g.ranks(r.Active)}, nil
}

// Abandon has nothing to do: after a RankLost pg has dropped the pair.
func (q *pgPair) Abandon() {}

package pg

import (
	"context"
	"fmt"
	"slices"

	"github.com/serry-project/serry/collectives"
)

// note is what a group keeps of a version: that itself holds the memory of its members, alive or dead.
type note struct {
	epoch, from uint64
	active      Set
	fail        string
	loss        *RankLost // Raise: what is to be reported
}

func noteOf(v *collectives.Version) note {
	return note{epoch: v.Epoch, from: v.From, active: v.Active, fail: v.Fail}
}

func (g *Group) note(v *collectives.Version) note {
	t := noteOf(v)
	if len(v.Lost) > 0 && g.opts.Mode == Raise {
		t.loss = g.rankLost(v)
	}
	return t
}

// settle takes notice of new versions, and returns what stands in the way of a new operation.
func (g *Group) settle() error {
	if err := g.notice(); err != nil {
		return err
	}
	if e := g.lost(); e != nil {
		if !g.opts.ManualResume {
			g.resume(func(x *RankLost) bool { return x == e })
		}
		return e
	}
	return g.ended
}

// lost is the oldest loss that was not returned to anybody.
func (g *Group) lost() *RankLost {
	if len(g.pending) == 0 {
		return nil
	}
	return g.pending[0]
}

// notice takes notice of new versions and of the end.
//
// A version that lost members is taken notice of only once the loss before it has been returned to somebody, or if an
// operation of the queue needs it: so every survivor returns the same losses at the same places of its program, however
// many versions it finds at once. Where operations begin, none is left in news.
func (g *Group) notice() error {
	if err := g.w.overErr(); err != nil {
		g.failed = err
	}
	if g.closed.Load() && g.failed == nil {
		g.failed = fmt.Errorf("%w: group %x", ErrClosed, g.id)
	}
	if g.failed == nil {
		for v := g.last.Next(); v != nil; v = v.Next() {
			g.last = v
			g.news = append(g.news, g.note(v))
		}
		for len(g.news) > 0 && (len(g.pending) == 0 || g.retracted()) {
			t := g.news[0]
			g.news = slices.Delete(g.news, 0, 1)
			g.moved(t)
		}
	}
	if g.failed != nil {
		g.drop(g.failed)
		return g.failed
	}
	return nil
}

// retracted says that the news cut an operation of the queue off.
func (g *Group) retracted() bool {
	if len(g.queue) == 0 {
		return false
	}
	last := g.queue[len(g.queue)-1].op.Seq
	return slices.ContainsFunc(g.news, func(t note) bool { return last > t.from })
}

// moved is one new version.
func (g *Group) moved(t note) {
	if g.ended != nil {
		return // only members of a group that is over were lost
	}
	g.seen = t
	if t.fail != "" {
		g.ended = &GroupFailed{g.id, t.epoch, t.fail}
		g.cutOff(t.from, g.ended)
		return
	}
	if t.loss == nil {
		return
	}
	g.pending = append(g.pending, t.loss)
	g.cutOff(t.from, t.loss)
	g.seq = t.from
	g.issued.Store(g.seq)
}

func (g *Group) rankLost(v *collectives.Version) *RankLost {
	e := &RankLost{Lost: v.Lost, Epoch: v.Epoch, Why: g.w.why(v.Epoch)}
	for _, r := range e.Lost {
		e.Slots = append(e.Slots, g.slots[r])
	}
	return e
}

// resume goes on after the losses for which gone is true.
func (g *Group) resume(gone func(*RankLost) bool) {
	if len(g.pending) == 0 {
		return
	}
	if g.pending = slices.DeleteFunc(g.pending, gone); len(g.pending) == 0 {
		g.p2p.resume(g.seen.epoch, g.place())
		g.creditAll()
	}
}

// place is where sends and receives stand after what was taken notice of.
func (g *Group) place() *p2pPlace {
	p := &p2pPlace{epoch: g.seen.epoch, ver: g.last}
	for _, t := range g.news {
		if !p.pass(g, t) {
			break
		}
	}
	return p
}

// report returns w's error to the caller; a loss is reported by that.
func (g *Group) report(w *Work) error {
	if e, ok := w.err.(*RankLost); ok && !g.opts.ManualResume {
		g.resume(func(x *RankLost) bool { return x == e })
	}
	return w.err
}

// Resume lets a Raise group with ManualResume go on after a RankLost, and returns the new set and its version. Where
// nothing was lost, or the loss was taken notice of already, it changes nothing.
func (g *Group) Resume(ctx context.Context) (Set, uint64, error) {
	if err := g.acquire(ctx); err != nil {
		return Set{}, 0, err
	}
	defer g.release()
	if err := g.notice(); err != nil {
		return Set{}, 0, err
	}
	g.resume(func(*RankLost) bool { return true }) // what came after these is another loss
	return g.seen.active, g.seen.epoch, g.ended
}

// idle lets go of the versions that nobody is in any more. It changes nothing that a call would not find by itself: the
// losses stay to be reported. It runs on the loop.
func (g *Group) idle() {
	_, _ = g.p2pEpoch()
	if g.try() {
		_ = g.notice()
		g.release()
	}
}

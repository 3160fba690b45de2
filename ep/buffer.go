// Package ep moves the rows of a mixture-of-experts layer: dispatch takes every token to the ranks that hold its
// experts, combine brings the experts' rows back and sums them, weighted, at the token's source.
//
// The sum is made in f32, in the order of a token's choices, one rounding for each product and each sum: it is the one
// that a loop in a single process makes. So the bits of the output depend neither on the number of ranks, nor on the
// placement of the experts, nor on the transport, nor on which replica of an expert computed a row, as long as that
// computation depends on the row alone.
//
// A step is one operation of a process group: dispatch and combine have one outcome, which is combine's and the same on
// all ranks. Who is a member, and who learns of a death when, is the group's business; ep routes around the dead, tells
// which tokens miss an expert, and adds no failure policy of its own but those in Config.
//
//	buf, err := ep.Open(ctx, group, ep.Config{Experts: 64, TopK: 4, Hidden: 1024, MaxTokens: 512, Placement: p, Policy: ep.Rerun})
//	report, err := ep.Step(ctx, buf, x, experts, weights, func(h ep.Handle, y []float32) error {
//		for _, b := range h.Blocks() { // the rows of one local expert
//			ffn(b.Expert, h.X()[b.Offset*1024:][:b.Count*1024], y[b.Offset*1024:][:b.Count*1024])
//		}
//		return nil
//	}, &ep.Output{Y: out})
package ep

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/serry-project/serry/ep/route"
)

// Buffer runs the steps of one layer shape over a group. All ranks call it in the same order. It is for one goroutine at
// a time, and it owns its memory: that grows to what steps really receive, then nothing is allocated any more.
type Buffer struct {
	g          Group
	cfg        Config
	rank, size int
	slotBytes  int
	maxRows    int
	cfgDigest  uint64
	plDigest   uint64
	residents  []int   // experts here, ascending
	local      []int32 // [Experts] index into residents, or -1

	table   route.Table // for (version, active, rank)
	tabled  bool
	version uint64
	active  route.Ranks

	slots   []*slot
	live    []*slot // from StartDispatch to Release, oldest first
	pending error   // a loss that nobody was told of yet
	told    uint64  // the version of the last one that somebody was
	closed  bool
}

func newBuffer(g Group, cfg Config) (*Buffer, error) {
	b := &Buffer{g: g, cfg: cfg, rank: g.Rank(), slotBytes: g.SlotBytes()}
	if err := cfg.Validate(g.Size()); err != nil {
		return nil, err
	}
	n := g.Depth()
	if cfg.Handles > n {
		return nil, fmt.Errorf("ep: Handles is %d, the group's depth is %d", cfg.Handles, n)
	}
	if cfg.Handles > 0 {
		n = cfg.Handles
	}
	b.cfgDigest = cfg.digest()
	b.slots = make([]*slot, n)
	b.live = make([]*slot, 0, n)
	return b, b.place(cfg.Placement)
}

// place makes p the placement.
func (b *Buffer) place(p *route.Placement) error {
	size := b.g.Size()
	if err := b.cfg.checkPlacement(p, size); err != nil {
		return err
	}
	if need := b.cfg.DispatchBytes(size); need > b.slotBytes {
		return fmt.Errorf("ep: the group's slot has %d bytes, a dispatch of %d tokens needs %d (Config.DispatchBytes)",
			b.slotBytes, b.cfg.MaxTokens, need)
	}
	maxRows := b.cfg.maxRows(size, b.slotBytes)
	if want := b.cfg.MaxTokens * b.cfg.TopK; maxRows < want && b.cfg.MaxRows == 0 {
		return fmt.Errorf("ep: the group's slot has %d bytes, enough for %d rows in combine, not for the %d of an even load"+
			" (Config.SlotBytes; MaxRows allows it)", b.slotBytes, maxRows, want)
	}
	b.maxRows = maxRows
	if b.size != size {
		b.size = size
		for i := range b.slots {
			b.slots[i] = newSlot(b)
		}
	}
	b.cfg.Placement, b.plDigest = p, p.Digest()
	b.residents = p.Resident(b.rank)
	b.local = make([]int32, p.Experts)
	for e := range b.local {
		b.local[e] = -1
	}
	for i, e := range b.residents {
		b.local[e] = int32(i)
	}
	b.tabled = false
	return nil
}

// SetPlacement changes the placement (after a rebalancing, say, or because the group has grown), on all ranks between
// the same two steps, while no handle is live. A rank that does it alone is found out in the next step (*ErrMismatch, on
// all). The placement is over all ranks that the group has now.
func (b *Buffer) SetPlacement(p *route.Placement) error {
	if b.closed {
		return ErrClosed
	}
	if len(b.live) > 0 {
		return fmt.Errorf("ep: SetPlacement with %d live handles: %w", len(b.live), ErrOutOfStep)
	}
	return b.place(p)
}

// Config returns the configuration, with the present placement.
func (b *Buffer) Config() Config { return b.cfg }

// Experts lists the experts whose rows this rank may receive, ascending: the order of Handle.Blocks.
func (b *Buffer) Experts() []int { return slices.Clone(b.residents) }

// Active returns the ranks and the version of the group that the next step will use.
func (b *Buffer) Active() (route.Ranks, uint64) { return b.g.Active() }

// Lost lists the experts that no active rank holds.
func (b *Buffer) Lost() []int {
	active, _ := b.g.Active()
	return b.cfg.Placement.Lost(active)
}

// retable makes the table that of the group's present version.
func (b *Buffer) retable(active route.Ranks, version uint64) {
	if b.tabled && b.version == version && b.active == active {
		return
	}
	b.table.Reset(b.cfg.Placement, active, b.rank)
	b.version, b.active, b.tabled = version, active, true
}

// free finds a slot that no handle uses.
func (b *Buffer) free() *slot {
	for _, s := range b.slots {
		if s.state == stateFree {
			return s
		}
	}
	return nil
}

func (b *Buffer) release(s *slot) {
	if i := slices.Index(b.live, s); i >= 0 {
		b.live = slices.Delete(b.live, i, i+1)
	}
	s.reset()
}

// undecided counts the steps without an outcome.
func (b *Buffer) undecided() (n int) {
	for _, s := range b.live {
		if s.undecided() {
			n++
		}
	}
	return n
}

// reap drives the steps whose handle was released before its end: each still owes its peers a (poisoned) combine half.
// If wait, it drives them to their outcome, as far as their predecessors have one.
func (b *Buffer) reap(ctx context.Context, wait bool) error {
	older := true // all before have an outcome
	for i := 0; i < len(b.live); {
		s := b.live[i]
		if !s.zombie {
			older = older && !s.undecided()
			i++
			continue
		}
		err := s.owe(ctx)
		if err == nil && older && wait {
			err = s.collect(ctx)
		}
		switch {
		case !s.undecided():
			b.bury(s)
		case err != nil:
			return err
		default:
			older = false
			i++
		}
	}
	return nil
}

// bury frees a released step that has its outcome; a loss that it met was not told to anybody yet.
func (b *Buffer) bury(s *slot) {
	if v := lossVersion(s.err); v > b.told {
		b.pending = s.err
	}
	b.release(s)
}

// collect drives all steps up to s, in their order, to their outcome. It fails with ErrOutOfStep if one before s is not
// combining yet.
func (b *Buffer) collect(ctx context.Context, s *slot) error {
	for i := 0; i < len(b.live); {
		l := b.live[i]
		if l == s {
			return s.collect(ctx)
		}
		if l.undecided() {
			if l.zombie {
				if err := l.owe(ctx); err != nil && l.undecided() {
					return err
				}
			}
			if l.undecided() && l.state != stateCombining {
				return fmt.Errorf("%w: an earlier step has not been combined", ErrOutOfStep)
			}
			if err := l.collect(ctx); err != nil && l.undecided() {
				return err
			}
			if s.err != nil { // a loss in an earlier step ends the later ones too
				err := s.err
				if l.zombie {
					b.release(l)
				}
				return err
			}
		}
		if l.zombie {
			b.bury(l)
		} else {
			i++
		}
	}
	return s.collect(ctx) // not reached: s is live
}

// Close ends the use of the Buffer on this rank; the group stays. Steps whose handle is live, or was released before its
// end, are poisoned for the others and driven to their outcome. Its error says that this did not work in ctx.
func (b *Buffer) Close(ctx context.Context) error {
	if b.closed {
		return nil
	}
	for _, s := range slices.Clone(b.live) {
		if !s.zombie {
			Handle{s, s.gen}.Release()
		}
	}
	b.closed = true
	return b.reap(ctx, true)
}

// lossVersion is the version without the lost ranks, if err is what a step returns that lost some; else 0.
func lossVersion(err error) uint64 {
	var rl *RankLost
	if errors.As(err, &rl) { // *ErrRerun wraps one
		return rl.Epoch
	}
	return 0
}

// failed maps an error of the group, met by a call for s (nil: by StartPair), and ends the handles that it ends.
func (b *Buffer) failed(ctx context.Context, s *slot, err error) error {
	var rl *RankLost
	switch {
	case errors.As(err, &rl):
		if b.cfg.Policy == Rerun {
			err = &ErrRerun{Epoch: rl.Epoch, Lost: rl.Lost, Err: err}
		}
		if s == nil || !s.zombie {
			b.pending, b.told = nil, max(b.told, rl.Epoch)
		}
		after := false
		for _, l := range b.live {
			after = after || l == s
			if after && l.version == s.version && l.undecided() { // all after the cut
				l.end(err)
			}
		}
	case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		// Only the waiting ended: the same call may be made again.
	case errors.Is(err, ErrMoved):
		err = fmt.Errorf("%w (%w)", ErrStale, err)
		fallthrough
	default:
		if s != nil {
			s.end(err)
		}
	}
	return err
}

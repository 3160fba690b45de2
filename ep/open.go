package ep

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
)

// Constants of Exchange.Digest: one for each kind of operation, so that a rank that opens never meets one that steps.
const (
	digestOpen     = 0x5e227901_6f70656e
	digestDispatch = 0x5e227901_64697370
	digestCombine  = 0x5e227901_636f6d62
)

// Open makes a Buffer over g. It is collective over the active ranks of g (but see Config.Joining): the configurations
// are compared, and if they differ all ranks return the same *ErrMismatch; if one is invalid, that rank says why and the
// others return *ErrPoisoned. With Policy = Rerun, ranks that die meanwhile do not matter.
//
// The group's slot must hold Config.DispatchBytes, and should hold Config.SlotBytes.
func Open(ctx context.Context, g Group, cfg Config) (*Buffer, error) {
	if need := openBytes(g.Size()); need > g.SlotBytes() {
		return nil, fmt.Errorf("ep: the group's slot has %d bytes, Open alone needs %d (Config.SlotBytes)", g.SlotBytes(), need)
	}
	if cfg.DType == 0 {
		cfg.DType = F32
	}
	b, invalid := newBuffer(g, cfg)
	if cfg.Joining {
		if invalid != nil {
			return nil, invalid
		}
		return b, nil
	}
	o := opening{cfg: cfg, invalid: invalid, rank: g.Rank(), size: g.Size()}
	for {
		err := o.exchange(ctx, g)
		switch {
		case errors.Is(err, ErrMoved) && ctx.Err() == nil:
			continue
		case lossVersion(err) > 0 && cfg.Policy == Rerun && ctx.Err() == nil:
			continue
		case invalid != nil && lossVersion(err) == 0:
			return nil, invalid
		case err != nil:
			return nil, err
		case o.verdict != nil:
			return nil, o.verdict
		}
		return b, nil
	}
}

// opening is one run of Open's operation.
type opening struct {
	cfg        Config
	invalid    error
	rank, size int
	version    uint64
	verdict    error
}

func (o *opening) exchange(ctx context.Context, g Group) error {
	active, version := g.Active()
	if !active.Has(o.rank) {
		return ErrSelf
	}
	o.version, o.verdict = version, nil
	x := Exchange{Version: version, Sizes: make([]int, o.size), Fill: o.fill, Take: o.take, Digest: digestOpen}
	for r := range x.Sizes {
		if active.Has(r) {
			x.Sizes[r] = openBytes(1)
		}
	}
	p, err := g.StartPair(ctx, &x)
	if err != nil {
		return err
	}
	if err := p.Dispatched(ctx); err != nil {
		return quit(p, err)
	}
	y := Exchange{Version: version, Sizes: make([]int, o.size), Digest: digestCombine,
		Fill: func(int, []byte) {}, Take: func([][]byte) {}}
	if err := p.StartCombine(ctx, &y); err != nil {
		return quit(p, err)
	}
	if _, err = p.Combined(ctx); err != nil {
		return quit(p, err)
	}
	return nil
}

func quit(p Pair, err error) error {
	if lossVersion(err) > 0 {
		p.Abandon()
	}
	return err
}

func (o *opening) fill(_ int, dst []byte) {
	f := o.cfg.fields()
	h := header{half: halfOpen, dtype: o.cfg.DType, hidden: uint32(o.cfg.Hidden), topK: uint32(o.cfg.TopK),
		experts: uint32(o.cfg.Experts), config: o.cfg.digest(), placement: f[nFields-1].value, version: o.version}
	if o.invalid != nil {
		h.flags, h.reason, h.rows = flagPoison, ReasonConfig, uint32(o.rank)
	}
	h.put(dst)
	for i, v := range f {
		binary.LittleEndian.PutUint64(dst[headerBytes+8*i:], v.value)
	}
}

// take compares what all ranks sent; the first complaint, in the order of ranks, stands.
func (o *opening) take(parts [][]byte) {
	var want [nFields]field
	first := true
	for r, part := range parts {
		if part == nil {
			continue
		}
		var h header
		if err := h.parse(part, new([headerBytes]byte)); err != nil {
			o.verdict = &ErrCorrupt{Rank: r, Why: err.Error()}
			return
		}
		switch {
		case h.half != halfOpen:
			o.verdict = &ErrMismatch{Rank: r, Field: "half", Theirs: uint64(h.half), Want: uint64(halfOpen)}
			return
		case h.poisoned():
			o.verdict = &ErrPoisoned{Rank: r, Reason: h.reason, Err: o.invalid}
			return
		case len(part) < openBytes(1):
			o.verdict = &ErrCorrupt{Rank: r, Why: fmt.Sprintf("%d bytes, want %d", len(part), openBytes(1))}
			return
		}
		f := o.cfg.fields()
		for i := range f {
			f[i].value = binary.LittleEndian.Uint64(part[headerBytes+8*i:])
			if !first && f[i].value != want[i].value {
				o.verdict = &ErrMismatch{Rank: r, Field: f[i].name, Theirs: f[i].value, Want: want[i].value}
				return
			}
		}
		if first {
			want, first = f, false
		}
	}
}

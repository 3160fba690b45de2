package ep

import (
	"context"
	"errors"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/internal/faultpoint"
)

// StartDispatch sends the rows of a batch to the experts and returns a handle for the rest of the step. x is [T, Hidden]
// float32; experts is [T, TopK], ids in 0..Experts-1 or -1 for none, one expert twice for a token is fine; weights is
// [T, TopK] and stays here (that of a -1 is not read). T may differ between ranks and may be 0. All three are the
// caller's again when it returns. It does not wait for peers but for free slots.
//
// What is wrong with the input does not show here, or the other ranks would wait: it is in the outcome of the step, on
// this rank with its cause (Recv). Errors here: *RankLost or *ErrRerun, ErrNoBuffer, ErrSelf, ErrClosed, ErrDType, ctx.
func (b *Buffer) StartDispatch(ctx context.Context, x []float32, experts []int32, weights []float32) (Handle, error) {
	return b.start(ctx, F32, len(x), bytesOf(x), experts, weights)
}

// StartDispatchBF16 is StartDispatch for BF16 rows.
func (b *Buffer) StartDispatchBF16(ctx context.Context, x []uint16, experts []int32, weights []float32) (Handle, error) {
	return b.start(ctx, BF16, len(x), bytesOf(x), experts, weights)
}

// Dispatch is StartDispatch and Recv. After an error there is no handle to release.
func (b *Buffer) Dispatch(ctx context.Context, x []float32, experts []int32, weights []float32) (Handle, error) {
	h, err := b.StartDispatch(ctx, x, experts, weights)
	return recv(ctx, h, err)
}

// DispatchBF16 is Dispatch for BF16 rows.
func (b *Buffer) DispatchBF16(ctx context.Context, x []uint16, experts []int32, weights []float32) (Handle, error) {
	h, err := b.StartDispatchBF16(ctx, x, experts, weights)
	return recv(ctx, h, err)
}

func recv(ctx context.Context, h Handle, err error) (Handle, error) {
	if err != nil {
		return Handle{}, err
	}
	if err := h.Recv(ctx); err != nil {
		h.Release()
		return Handle{}, err
	}
	return h, nil
}

func (b *Buffer) start(ctx context.Context, dt DType, n int, x []byte, experts []int32, weights []float32) (Handle, error) {
	switch {
	case b.closed:
		return Handle{}, ErrClosed
	case dt != b.cfg.DType:
		return Handle{}, ErrDType
	}
	if err := b.reap(ctx, b.free() == nil); err != nil {
		return Handle{}, err
	}
	if err := b.pending; err != nil {
		b.pending, b.told = nil, lossVersion(err)
		return Handle{}, err
	}
	s := b.free()
	if s == nil {
		return Handle{}, ErrNoBuffer
	}
	s.x, s.experts = x, experts
	err := s.publish(ctx, n, weights)
	s.x, s.experts = nil, nil
	if err != nil {
		s.reset()
		return Handle{}, err
	}
	s.state = stateStarted
	b.live = append(b.live, s)
	return Handle{s, s.gen}, nil
}

// publish routes the batch over the active ranks and starts the pair, again if they changed in between.
func (s *slot) publish(ctx context.Context, n int, weights []float32) error {
	b := s.b
	for {
		active, version := b.g.Active()
		if !active.Has(b.rank) {
			return ErrSelf
		}
		if active.Next(b.size) >= 0 {
			return ErrGrown
		}
		b.retable(active, version)
		s.active, s.version = active, version
		s.own = nil
		s.route(n, weights)
		s.sizeDispatch()
		if total := s.total(s.disp.Sizes); total > b.slotBytes {
			s.complain(&ErrTooManyTokens{Tokens: s.tokens, Bytes: total, Slot: b.slotBytes},
				ReasonTooManyTokens, uint32(s.tokens), uint32(b.cfg.MaxTokens))
			s.sizeDispatch()
		}
		if s.own == nil {
			s.account(weights)
		}
		s.disp.Version = version
		p, err := b.g.StartPair(ctx, &s.disp)
		switch {
		case err == nil:
			s.pair = p
			return nil
		case !errors.Is(err, ErrMoved):
			return b.failed(ctx, nil, err)
		case ctx.Err() != nil:
			return ctx.Err()
		}
	}
}

// route checks the batch and plans it.
func (s *slot) route(n int, weights []float32) {
	c := &s.b.cfg
	s.tokens = n / c.Hidden
	want := s.tokens * c.TopK
	shape := func(arg string, l, want int) {
		s.complain(&ErrShape{Arg: arg, Len: l, Want: want}, ReasonShape, uint32(l), uint32(want))
	}
	if n%c.Hidden != 0 {
		shape("x", n, want/c.TopK*c.Hidden)
		return
	}
	if len(s.experts) != want {
		shape("experts", len(s.experts), want)
		return
	}
	if len(weights) != want {
		shape("weights", len(weights), want)
		return
	}
	limit := c.MaxTokens
	if limit == 0 {
		limit = maxEntries / c.TopK
	}
	if s.tokens > limit {
		s.complain(&ErrTooManyTokens{Tokens: s.tokens, Max: limit}, ReasonTooManyTokens, uint32(s.tokens), uint32(limit))
		return
	}
	if err := s.plan.Build(&s.b.table, s.tokens, c.TopK, s.experts); err != nil {
		var id uint32
		if ie, ok := err.(*ErrInvalidExpert); ok {
			id = uint32(ie.ID)
		}
		s.complain(err, ReasonInvalidExpert, id, uint32(c.Experts-1))
		return
	}
	if c.Uncovered == Error && s.plan.Missing > 0 {
		for i, o := range s.plan.Owner {
			if o == route.Lost {
				e := &ErrUncovered{Token: i / c.TopK, K: i % c.TopK, Expert: int(s.experts[i])}
				s.complain(e, ReasonUncovered, uint32(e.Expert), 0)
				return
			}
		}
	}
}

// account keeps the weights and what the batch misses.
func (s *slot) account(weights []float32) {
	s.weights = grow(s.weights, len(weights))
	copy(s.weights, weights)
	s.missing, s.mass = grow(s.missing, s.tokens), grow(s.mass, s.tokens)
	s.tainted = s.plan.Loss(s.weights, s.missing, s.mass)
	if s.b.cfg.Renormalise {
		s.plan.Renormalise(s.weights)
	}
}

func (s *slot) sizeDispatch() {
	rb := s.b.cfg.rowBytes()
	for r := range s.disp.Sizes {
		switch {
		case !s.active.Has(r):
			s.disp.Sizes[r] = 0
		case s.own != nil:
			s.disp.Sizes[r] = headerBytes
		default:
			s.disp.Sizes[r] = dispatchPart(s.plan.Count(r), s.plan.TokenCount(r), rb)
		}
	}
}

func (s *slot) total(sizes []int) (n int) {
	for _, v := range sizes {
		n += v
	}
	return n
}

// header is that of this rank's parts.
func (s *slot) header(h half) header {
	b := s.b
	return header{half: h, dtype: b.cfg.DType, tokens: uint32(s.tokens), hidden: uint32(b.cfg.Hidden), topK: uint32(b.cfg.TopK),
		experts: uint32(b.cfg.Experts), config: b.cfgDigest, placement: b.plDigest, version: s.version}
}

// fillDispatch writes the part for rank r.
func (s *slot) fillDispatch(r int, dst []byte) {
	faultpoint.Hit(faultpoint.EPDispatchEncode)
	h := s.header(halfDispatch)
	if s.own != nil {
		s.poison(&h)
		h.put(dst)
		return
	}
	ids := s.plan.Rows(r)
	h.entries, h.rows = uint32(len(ids)), uint32(s.plan.TokenCount(r))
	h.put(dst)
	topK, rb := s.b.cfg.TopK, s.b.cfg.rowBytes()
	index, rows := dst[headerBytes:], dst[headerBytes+len(ids)*entryBytes:]
	last, n := -1, 0
	for i, id := range ids {
		t := int(id) / topK
		entry{token: uint32(t), k: uint16(int(id) - t*topK), exp: uint16(s.experts[id])}.put(index[i*entryBytes:])
		if t != last {
			copy(rows[n*rb:(n+1)*rb], s.x[t*rb:])
			last = t
			n++
		}
	}
	clear(rows[n*rb:])
}

// takeDispatch reads what all ranks sent: headers first, then the indexes, then the rows, each to its place.
func (s *slot) takeDispatch(parts [][]byte) {
	s.empty()
	s.retake()
	parts = s.ours(parts)
	s.readHeaders(parts)
	if s.bad() {
		return
	}
	s.layout()
	hidden := s.b.cfg.Hidden
	rb := s.b.cfg.rowBytes()
	var dst []byte
	if s.b.cfg.DType == BF16 {
		s.xh = grow(s.xh, s.rows*hidden)
		dst = bytesOf(s.xh)
	} else {
		s.xf = grow(s.xf, s.rows*hidden)
		dst = bytesOf(s.xf)
	}
	for r, part := range parts {
		es := s.entries[s.from[r]:s.from[r+1]]
		pos := s.pos[s.from[r]:s.from[r+1]]
		if len(es) == 0 {
			continue
		}
		src := part[headerBytes+len(es)*entryBytes:]
		n := -rb
		last := -1
		for i, e := range es {
			if int(e.token) != last {
				last = int(e.token)
				n += rb
			}
			l := s.b.local[e.exp]
			at := int(s.next[l])
			s.next[l]++
			pos[i] = int32(at)
			s.rowSrc[at], s.rowTok[at] = int32(r), int32(e.token)
			copy(dst[at*rb:(at+1)*rb], src[n:n+rb])
		}
	}
}

// readHeaders checks all parts and reads their indexes. It leaves a verdict that all ranks reach alike (from headers,
// which are the same for all receivers), or a complaint of this rank, or s.entries and s.from.
func (s *slot) readHeaders(parts [][]byte) {
	b := s.b
	var want header
	first, total := true, 0
	for r, part := range parts {
		s.from[r] = total
		if !s.active.Has(r) {
			continue
		}
		var h header
		if err := h.parse(part, &s.raw); err != nil {
			s.mistrust(&ErrCorrupt{Rank: r, Why: err.Error()}, ReasonCorrupt, 0, 0)
			continue
		}
		if first {
			want, first = h, false
			want.version, want.half = s.version, halfDispatch
		}
		if v := compare(r, &h, &want); v != nil {
			s.verdict = v
		} else if h.poisoned() {
			s.verdict = &ErrPoisoned{Rank: r, Reason: h.reason, A: h.entries, B: h.detail}
		}
		if s.verdict != nil {
			return
		}
		if s.own != nil {
			continue
		}
		n := int(h.entries)
		err := h.fits(part, b.cfg.rowBytes())
		if err == nil && total+n <= b.maxRows {
			if cap(s.entries) < total+n {
				s.entries = append(make([]entry, 0, (total+n)*5/4), s.entries[:total]...)
			}
			s.entries = s.entries[:total+n]
			err = h.parseEntries(part, b.local, s.entries[total:])
		}
		if err != nil {
			s.mistrust(&ErrCorrupt{Rank: r, Why: err.Error()}, ReasonCorrupt, 0, 0)
			continue
		}
		total += n
	}
	s.from[b.size] = total
	if total > b.maxRows {
		s.mistrust(&ErrOverflow{Rows: total, Max: b.maxRows}, ReasonOverflow, uint32(total), uint32(b.maxRows))
	}
	s.count = total
}

// ours cuts off the parts of ranks that the group may have one day; there are at least as many as it has now.
func (s *slot) ours(parts [][]byte) [][]byte { return parts[:s.b.size] }

// compare says in which field the header of rank r differs from what is wanted.
func compare(r int, h, want *header) error {
	for _, f := range [...]struct {
		name         string
		theirs, want uint64
	}{
		{"half", uint64(h.half), uint64(want.half)},
		{"Experts", uint64(h.experts), uint64(want.experts)},
		{"TopK", uint64(h.topK), uint64(want.topK)},
		{"Hidden", uint64(h.hidden), uint64(want.hidden)},
		{"DType", uint64(h.dtype), uint64(want.dtype)},
		{"Config", h.config, want.config},
		{"Placement", h.placement, want.placement},
		{"version", h.version, want.version},
	} {
		if f.theirs != f.want {
			return &ErrMismatch{Rank: r, Field: f.name, Theirs: f.theirs, Want: f.want}
		}
	}
	return nil
}

// layout counts the rows of each local expert and gives every one its block.
func (s *slot) layout() {
	b := s.b
	s.next = grow(s.next, len(b.residents))
	clear(s.next)
	for _, e := range s.entries[:s.count] {
		s.next[b.local[e.exp]]++
	}
	s.blocks = grow(s.blocks, len(b.residents))
	align, at := b.cfg.align(), 0
	for i, e := range b.residents {
		n := int(s.next[i])
		s.blocks[i] = Block{Expert: e, Offset: at, Count: n}
		s.next[i] = int32(at)
		at = roundUp(at+n, align)
	}
	s.rows = at
	s.pos = grow(s.pos, s.count)
	s.rowExp, s.rowSrc, s.rowTok = grow(s.rowExp, at), grow(s.rowSrc, at), grow(s.rowTok, at)
	for i, bl := range s.blocks {
		end := s.rows
		if i+1 < len(s.blocks) {
			end = s.blocks[i+1].Offset
		}
		for r := bl.Offset; r < bl.Offset+bl.Count; r++ {
			s.rowExp[r] = int32(bl.Expert)
		}
		for r := bl.Offset + bl.Count; r < end; r++ {
			s.rowExp[r], s.rowSrc[r], s.rowTok[r] = -1, -1, -1
		}
	}
}

// grow returns s with length n, its contents undefined.
func grow[T any](s []T, n int) []T {
	if cap(s) >= n {
		return s[:n]
	}
	return make([]T, n, n+n/4)
}

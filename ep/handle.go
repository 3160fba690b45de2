package ep

import (
	"context"
	"errors"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/internal/faultpoint"
)

// Handle is one step: StartDispatch, Recv, StartCombine, Result, Release, in this order. It is a small value; a copy is
// the same handle. The zero Handle and a released one fail with ErrStale.
//
// What Recv hands out is provisional until Result: a rank may still die, and the step is then repeated or has failed.
type Handle struct {
	s   *slot
	gen uint64
}

// Block is where the rows of one expert of this rank lie among the received rows.
type Block struct {
	Expert        int
	Offset, Count int // in rows; the rows from Offset+Count to the next Offset are padding
}

type state uint8

const (
	stateFree      state = iota
	stateStarted         // the dispatch half is published
	stateReceived        // and taken from all
	stateCombining       // the combine half is published
	stateDecided         // and the outcome is known
)

// slot is the memory of a handle.
type slot struct {
	b      *Buffer
	gen    uint64
	state  state
	zombie bool // released before its end
	used   bool // Result has returned
	pair   Pair
	err    error // the group's, ends the handle
	result Result

	version uint64
	active  route.Ranks

	// At the source.
	tokens  int
	plan    route.Plan
	weights []float32 // those to sum with
	missing []uint8
	mass    []float32
	tainted int
	acc     []float32 // [tokens, Hidden] the sums
	cursor  []int     // [ranks] rows of the part that were summed
	x       []byte    // the caller's, during StartDispatch
	experts []int32   // likewise
	y       []byte    // the caller's, during StartCombine

	// At the expert.
	entries []entry // by source rank
	from    []int   // [ranks+1] into entries
	pos     []int32 // row of an entry
	next    []int32 // [residents] scratch
	rows    int     // with padding
	count   int     // without
	xf      []float32
	xh      []uint16
	yf      []float32 // Step's
	yh      []uint16
	blocks  []Block
	rowExp  []int32
	rowSrc  []int32
	rowTok  []int32

	disp, comb Exchange
	raw        [headerBytes]byte // of the header that is being parsed

	// Complaints. verdict is the same on all ranks (all saw it), own is this rank's; reason, a and b go with own.
	verdict error
	known   bool // verdict is from the dispatch half
	own     error
	taken   bool // own is from the Take of the half under way
	reason  Reason
	a, d    uint32
}

func newSlot(b *Buffer) *slot {
	s := &slot{b: b, cursor: make([]int, b.size), from: make([]int, b.size+1)}
	s.disp = Exchange{Sizes: make([]int, b.size), Fill: s.fillDispatch, Take: s.takeDispatch, Digest: digestDispatch}
	s.comb = Exchange{Sizes: make([]int, b.size), Fill: s.fillCombine, Take: s.takeCombine, Digest: digestCombine}
	return s
}

// reset makes the slot free and its handles stale.
func (s *slot) reset() {
	s.gen++
	s.state, s.zombie, s.used, s.known, s.taken = stateFree, false, false, false, false
	s.pair, s.err, s.verdict, s.own, s.reason, s.a, s.d = nil, nil, nil, nil, 0, 0, 0
	s.x, s.experts, s.y = nil, nil, nil
	s.empty()
}

// empty leaves no received rows.
func (s *slot) empty() {
	s.rows, s.count = 0, 0
	s.xf, s.xh = s.xf[:0], s.xh[:0]
	s.blocks, s.rowExp, s.rowSrc, s.rowTok = s.blocks[:0], s.rowExp[:0], s.rowSrc[:0], s.rowTok[:0]
}

func (s *slot) undecided() bool {
	return s.err == nil && s.state > stateFree && s.state < stateDecided
}

// end makes err, which the group gave, what every further call returns.
func (s *slot) end(err error) {
	s.err = err
	if s.pair != nil {
		s.pair.Abandon()
	}
	s.empty()
}

// complain keeps this rank's first complaint; the next part that it sends is poisoned with it.
func (s *slot) complain(err error, reason Reason, a, b uint32) {
	if s.own == nil {
		s.own, s.reason, s.a, s.d = err, reason, a, b
	}
}

// mistrust is complain about a part that was taken.
func (s *slot) mistrust(err error, reason Reason, a, b uint32) {
	if s.own == nil {
		s.complain(err, reason, a, b)
		s.taken = true
	}
}

// retake forgets what the last Take of the same half found.
func (s *slot) retake() {
	s.verdict = nil
	if s.taken {
		s.own, s.reason, s.a, s.d, s.taken = nil, ReasonNone, 0, 0, false
	}
}

// bad says that this rank's parts are to be poison.
func (s *slot) bad() bool { return s.own != nil || s.verdict != nil }

// poison turns h into one.
func (s *slot) poison(h *header) {
	h.flags, h.reason, h.entries, h.rows, h.detail = flagPoison, s.reason, s.a, uint32(s.b.rank), s.d
	switch v := s.verdict.(type) {
	case *ErrPoisoned:
		h.reason, h.entries, h.rows, h.detail = v.Reason, v.A, uint32(v.Rank), v.B
	case *ErrMismatch:
		h.reason, h.entries, h.rows, h.detail = ReasonMismatch, 0, uint32(v.Rank), 0
	}
}

// outcome is the error of a decided step.
func (s *slot) outcome() error {
	if s.verdict == nil {
		return s.own // a corrupt combine part, that only this rank saw
	}
	if p, ok := s.verdict.(*ErrPoisoned); ok && p.Err == nil {
		p.Err = s.own
	}
	return s.verdict
}

func (h Handle) slot() (*slot, error) {
	if h.s == nil || h.s.gen != h.gen || h.s.state == stateFree {
		return nil, ErrStale
	}
	if h.s.err != nil {
		return nil, h.s.err
	}
	if h.s.used {
		return nil, ErrUsed
	}
	return h.s, nil
}

// Recv waits until the rows of all ranks are here. Its errors are the group's (*RankLost or *ErrRerun, alike on all
// survivors; that of ctx, which over pg aborts the group), ErrStale, ErrUsed, and what made the step fail on all ranks,
// if no other handle is under way: *ErrPoisoned (through which errors.As finds this rank's own complaint about its input)
// or *ErrMismatch. If others are under way, Recv then returns nil and no rows, and Result the error, so that the program
// keeps the same order on all ranks.
func (h Handle) Recv(ctx context.Context) error {
	s, err := h.slot()
	if err != nil {
		return err
	}
	if s.state == stateStarted {
		if err := s.receive(ctx); err != nil {
			return err
		}
	}
	if s.verdict == nil {
		return nil
	}
	if s.state != stateDecided && s.b.undecided() > 1 {
		return nil
	}
	// All ranks know that nothing is to be computed.
	if err := s.owe(ctx); err != nil {
		return err
	}
	if err := s.b.collect(ctx, s); err != nil {
		return err
	}
	return s.outcome()
}

// receive goes from stateStarted to stateReceived.
func (s *slot) receive(ctx context.Context) error {
	faultpoint.Hit(faultpoint.EPDispatchWait)
	if err := s.pair.Dispatched(ctx); err != nil {
		return s.b.failed(ctx, s, err)
	}
	s.state = stateReceived
	return nil
}

// owe goes to stateCombining with nothing to give.
func (s *slot) owe(ctx context.Context) error {
	if !s.undecided() {
		return nil
	}
	if s.state == stateStarted {
		if err := s.receive(ctx); err != nil {
			return err
		}
	}
	if s.state == stateReceived {
		return s.combine(ctx, nil)
	}
	return nil
}

// combine goes from stateReceived to stateCombining.
func (s *slot) combine(ctx context.Context, y []byte) error {
	s.y = y
	s.known, s.taken = s.verdict != nil, false
	s.sizeCombine()
	err := s.pair.StartCombine(ctx, &s.comb)
	s.y = nil
	if err != nil {
		return s.b.failed(ctx, s, err)
	}
	s.state = stateCombining
	return nil
}

// collect goes from stateCombining to stateDecided.
func (s *slot) collect(ctx context.Context) error {
	if s.state != stateCombining || s.err != nil {
		return nil
	}
	faultpoint.Hit(faultpoint.EPCombineWait)
	res, err := s.pair.Combined(ctx)
	if err != nil {
		return s.b.failed(ctx, s, err)
	}
	s.result, s.state, s.pair = res, stateDecided, nil
	return nil
}

// StartCombine sends the experts' rows back: y is [Rows, Hidden] in the order of the received rows; padding is not
// read. y is the caller's again when it returns. It does not wait for peers. If the step has failed, y is not read.
func (h Handle) StartCombine(ctx context.Context, y []float32) error {
	return h.startCombine(ctx, F32, len(y), bytesOf(y))
}

// StartCombineBF16 is StartCombine for BF16 rows.
func (h Handle) StartCombineBF16(ctx context.Context, y []uint16) error {
	return h.startCombine(ctx, BF16, len(y), bytesOf(y))
}

func (h Handle) startCombine(ctx context.Context, dt DType, n int, y []byte) error {
	s, err := h.slot()
	switch {
	case err != nil:
		return err
	case dt != s.b.cfg.DType:
		return ErrDType
	case s.state != stateReceived:
		return ErrOutOfStep
	case !s.bad() && n != s.rows*s.b.cfg.Hidden:
		return &ErrShape{Arg: "y", Len: n, Want: s.rows * s.b.cfg.Hidden}
	}
	return s.combine(ctx, y)
}

// Output is where Result writes. Only on success; what is nil is not written.
type Output struct {
	Y        []float32 // [T, Hidden], for F32
	YBF16    []uint16  // [T, Hidden], for BF16
	Missing  []uint8   // [T] number of the token's experts that no active rank holds (255: or more)
	LostMass []float32 // [T] sum of their weights
}

// Report says what a step did. Epoch, Seq and Active are the same on all ranks.
type Report struct {
	Epoch   uint64 // version of the group
	Seq     uint64 // number of the operation in the group
	Active  route.Ranks
	Tokens  int // T
	Rows    int // received and computed here, without padding
	Tainted int // tokens of this rank that miss an expert
	Reruns  int // of Step: how often ranks were lost in it
}

// Result waits for the experts' rows, sums them and writes out. It returns the outcome of the step, which is the same on
// all ranks: nil; *RankLost or *ErrRerun; *ErrPoisoned or *ErrMismatch. On any error out is untouched. *ErrShape: out does
// not fit, nothing happened. ErrOutOfStep: an earlier step was not combined yet. *ErrCorrupt, on this rank alone: what
// came back cannot be read.
func (h Handle) Result(ctx context.Context, out *Output) (Report, error) {
	s, err := h.slot()
	switch {
	case err != nil:
		return Report{}, err
	case s.state < stateCombining:
		return Report{}, ErrOutOfStep
	}
	if err := s.checkOutput(out); err != nil {
		return Report{}, err
	}
	if err := s.b.collect(ctx, s); err != nil {
		return Report{}, err
	}
	s.used = true
	if err := s.outcome(); err != nil {
		return Report{}, err
	}
	s.write(out)
	return Report{Epoch: s.result.Epoch, Seq: s.result.Seq, Active: s.result.Active, Tokens: s.tokens, Rows: s.count,
		Tainted: s.tainted}, nil
}

// Fail gives the step up on all ranks because of cause: the others get *ErrPoisoned. It waits for the outcome and
// returns it: *ErrPoisoned (cause is found through it), or the loss of a rank, which comes first.
func (h Handle) Fail(ctx context.Context, cause error) error {
	s, err := h.slot()
	switch {
	case err != nil:
		return err
	case s.state >= stateCombining && !s.bad():
		return ErrOutOfStep
	}
	s.complain(cause, ReasonFailed, 0, 0)
	if err := s.owe(ctx); err != nil {
		return err
	}
	if err := s.b.collect(ctx, s); err != nil {
		return err
	}
	s.used = true
	return s.outcome()
}

// Release gives the handle's memory back. It may be called more than once, and must be called once. Before Result it
// gives the step up: the others get *ErrPoisoned; Fail does the same and tells this rank the outcome. It waits for no
// peer, but for its turn if another goroutine is in an operation of the group: until that has ended.
func (h Handle) Release() {
	s := h.s
	if s == nil || s.gen != h.gen || s.state == stateFree {
		return
	}
	if !s.undecided() {
		s.b.release(s)
		return
	}
	s.gen++
	s.zombie = true
	s.complain(errReleased, ReasonReleased, 0, 0)
	if s.state == stateReceived {
		// Peers wait for this. What fails here is met again by the next call.
		_ = s.combine(context.Background(), nil)
	}
}

var errReleased = errors.New("ep: handle released before its result")

// The received rows. They are the handle's, valid until Release.

// Rows is the number of received rows, padding included.
func (h Handle) Rows() int {
	if s := h.peek(); s != nil {
		return s.rows
	}
	return 0
}

// X is [Rows, Hidden], for F32. Padding is not initialised.
func (h Handle) X() []float32 {
	if s := h.peek(); s != nil {
		return s.xf
	}
	return nil
}

// XBF16 is [Rows, Hidden], for BF16.
func (h Handle) XBF16() []uint16 {
	if s := h.peek(); s != nil {
		return s.xh
	}
	return nil
}

// Blocks has one element for each expert of this rank (Buffer.Experts), ascending, also where nothing was received.
// It is empty if the step has failed.
func (h Handle) Blocks() []Block {
	if s := h.peek(); s != nil {
		return s.blocks
	}
	return nil
}

// RowExpert is [Rows], the expert of each row; -1 for padding.
func (h Handle) RowExpert() []int32 {
	if s := h.peek(); s != nil {
		return s.rowExp
	}
	return nil
}

// RowSource is [Rows], the rank that each row came from; -1 for padding.
func (h Handle) RowSource() []int32 {
	if s := h.peek(); s != nil {
		return s.rowSrc
	}
	return nil
}

// RowToken is [Rows], the number of the row's token at its source; -1 for padding.
func (h Handle) RowToken() []int32 {
	if s := h.peek(); s != nil {
		return s.rowTok
	}
	return nil
}

// Active returns the ranks and the version that the step runs with: one snapshot for both halves.
func (h Handle) Active() (route.Ranks, uint64) {
	if s := h.peek(); s != nil {
		return s.active, s.version
	}
	return route.Ranks{}, 0
}

func (h Handle) peek() *slot {
	if h.s == nil || h.s.gen != h.gen || h.s.state == stateFree {
		return nil
	}
	return h.s
}

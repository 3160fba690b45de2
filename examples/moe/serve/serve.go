// Package serve answers prompts with the model of examples/moe, expert-parallel over the ranks of a world: each rank runs
// attention for its own requests and holds its share of the experts; every expert has a replica on another rank. When a
// rank dies, the survivors go on with the step they are in, take over its requests and resume them from the bytes that
// were already agreed. A replacement enters at the next step.
package serve

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/examples/moe/model"
	"github.com/serry-project/serry/pg"
)

// Config says what to serve; it is equal on all ranks.
type Config struct {
	Prompts  []string
	Max      int // bytes to generate for each prompt; less where the model's context ends before
	Sampling Sampling
	Replicas int // of each expert (default 2)
	Rows     int // rows of one rank in a step: prompts are read in pieces of what is left (default 32)
}

// fill sets defaults and says what is wrong.
func (c *Config) fill(m *model.Model) error {
	if c.Replicas == 0 {
		c.Replicas = 2
	}
	if c.Rows == 0 {
		c.Rows = 32
	}
	if c.Max < 1 || c.Replicas < 0 || c.Rows < 0 {
		return fmt.Errorf("serve: %d bytes for each prompt, %d replicas, %d rows: want at least 1", c.Max, c.Replicas, c.Rows)
	}
	for i := range c.Prompts {
		if c.most(m, i) < 1 {
			return fmt.Errorf("serve: prompt %d has %d bytes, the model's context is %d", i, len(c.Prompts[i]), m.Context)
		}
	}
	return nil
}

// most is how many bytes a request gets.
func (c *Config) most(m *model.Model, req int) int {
	return min(c.Max, m.Context-len(model.Prompt(c.Prompts[req])))
}

// Event is something that happened, for who watches. Which fields it has beside Rank, Step and Time, by Kind:
//
//	token    Request, Pos, Token (0: the end of the text), Hash, Lost: one agreed byte, from the rank that made it. A
//	         request's next owner gives its last byte again: who made it may have died before it could say so
//	step     Epoch, Active: the first step of an epoch is complete here
//	taken    From, Requests: those of a rank that is gone, alike on all ranks; Epoch of the last step, 0 for a newcomer
//	answer   Request, Answer: all of it, from every rank as soon as everything is answered
//	done     Stats: the last event
type Event struct {
	Kind     string  `json:"kind"`
	Rank     int     `json:"rank"`
	Step     uint64  `json:"step"`
	Time     int64   `json:"time"` // Unix nanoseconds
	Request  int     `json:"request,omitempty"`
	Pos      int     `json:"pos,omitempty"`
	Token    int     `json:"token,omitempty"`
	Hash     uint64  `json:"hash,omitempty"` // of the logits' bits
	Lost     float64 `json:"lost_mass,omitempty"`
	Epoch    uint64  `json:"epoch,omitempty"`
	From     int     `json:"from,omitempty"`
	Active   []int   `json:"active,omitempty"`
	Requests []int   `json:"requests,omitempty"`
	Answer   *Answer `json:"answer,omitempty"`
	Stats    *Stats  `json:"stats,omitempty"`
}

// Stats is what a process has done.
type Stats struct {
	ExpertBytes int64 `json:"resident_expert_bytes"`
	AllExperts  int64 `json:"all_expert_bytes"`
	Rows        int64 `json:"expert_rows"`        // of its own requests
	RemoteRows  int64 `json:"expert_rows_remote"` // of them computed by another rank
	Computed    int64 `json:"expert_rows_here"`   // computed here, for anybody
	LinkBytes   int64 `json:"link_bytes"`         // of rows for other ranks' experts, of results for other ranks' rows
	SocketBytes int64 `json:"socket_bytes"`       // sent over sockets, by this process, for everything
	Steps       int64 `json:"steps"`
	Reruns      int64 `json:"reruns"`
}

// Placement is where the experts of every layer live.
func Placement(experts, ranks, replicas int) (*route.Placement, error) {
	p, err := route.Contiguous(experts, ranks, min(replicas, ranks))
	if err != nil {
		return nil, err
	}
	p.Spread = true // the requests of one rank then load all ranks alike
	return p, nil
}

// Load loads the model with the experts of one rank.
func Load(path string, rank, ranks, replicas, experts int) (*model.Model, error) {
	p, err := Placement(experts, ranks, replicas)
	if err != nil {
		return nil, err
	}
	mine := p.Resident(rank)
	return model.Load(path, func(_, e int) bool { return slices.Contains(mine, e) })
}

// hash of a token's logits: 64-bit FNV-1a over their bits.
func hash(logits []float32) uint64 {
	h := uint64(14695981039346656037)
	for _, x := range logits {
		h = (h ^ uint64(math.Float32bits(x))) * 1099511628211
	}
	return h
}

// server is one rank.
type server struct {
	cfg    Config
	same   [sha256.Size]byte // hash of what must be equal on all ranks: weights and cfg
	w      *pg.World
	m      *model.Model
	buf    *ep.Buffer
	place  *route.Placement
	out    func(Event)
	st     *state
	caches []*model.Cache
	owed   []float64 // lost mass of rows since the request's last byte
	batch  *model.Batch
	stats  Stats
	epoch  uint64 // of the last step
	end    <-chan struct{}
	told   bool // all answers

	rows                  []model.Row
	last                  []lastRow // rows whose logits are wanted
	x, xn, y, wts, logits []float32
	mass                  []float32
	experts               []int32
	gather, mine          []byte
	table                 route.Table
	plan                  route.Plan
}

// lastRow is a row whose logits give a request's next byte.
type lastRow struct{ row, req int }

// Run serves all prompts to their end as one rank of the world. When everything is answered the ranks stay, so that a
// replacement finds them, until end is closed on any of them; nil is closed. out is called on this goroutine.
func Run(ctx context.Context, w *pg.World, m *model.Model, cfg Config, end <-chan struct{}, out func(Event)) error {
	s, err := open(ctx, w, m, cfg, out)
	if err != nil {
		return err
	}
	s.end = end
	for fresh := w.Joined().Replacement; ; fresh = false {
		came := fresh
		if !fresh { // a newcomer stands in the Boundary of its first step already
			p, err := w.Boundary(ctx, s.attach)
			if err != nil {
				return err
			}
			came = len(p.Joined) > 0
		}
		if came {
			if err := s.enter(ctx, fresh); err != nil {
				return err
			}
		}
		s.assign()
		if s.st.answered() {
			s.tell()
			if s.st.ending && !came { // who came makes a step
				break
			}
		}
		if err := s.step(ctx); err != nil {
			return fmt.Errorf("step %d: %w", s.st.step, err)
		}
		s.st.step++
	}
	for _, l := range w.Links() {
		s.stats.SocketBytes += l.Out
	}
	s.emit(Event{Kind: "done", Stats: &s.stats})
	return nil
}

// tell gives all answers, once.
func (s *server) tell() {
	if s.told {
		return
	}
	s.told = true
	for i := range s.st.requests {
		s.emit(Event{Kind: "answer", Request: i, Answer: &s.st.requests[i].Answer})
	}
}

// ended says that this rank is told to end.
func (s *server) ended() bool {
	if s.end == nil {
		return true
	}
	select {
	case <-s.end:
		return true
	default:
		return false
	}
}

// open makes the group of the experts, or finds it, and the state to begin with.
func open(ctx context.Context, w *pg.World, m *model.Model, cfg Config, out func(Event)) (*server, error) {
	if err := cfg.fill(m); err != nil {
		return nil, err
	}
	place, err := Placement(m.Experts, w.Size(), cfg.Replicas)
	if err != nil {
		return nil, err
	}
	s := &server{
		cfg: cfg, w: w, m: m, place: place, out: out, batch: m.NewBatch(),
		caches: make([]*model.Cache, len(cfg.Prompts)), owed: make([]float64, len(cfg.Prompts)),
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	s.same = sha256.Sum256(append(b, m.Digest[:]...))
	ec := ep.Config{Experts: m.Experts, TopK: m.TopK, Hidden: m.Hidden, MaxTokens: cfg.Rows, Placement: place, Policy: ep.Rerun}
	var g *pg.Group
	if j := w.Joined(); j.Replacement {
		gs := w.Groups()
		if len(gs) < 2 || len(j.Attach) < len(s.same) || [sha256.Size]byte(j.Attach[:len(s.same)]) != s.same {
			return nil, fmt.Errorf("serve: the members serve something else than this process: other weights or another configuration")
		}
		if s.st, err = decodeState(j.Attach[len(s.same):]); err != nil {
			return nil, err
		}
		if len(s.st.requests) != len(cfg.Prompts) {
			return nil, fmt.Errorf("serve: the members have %d requests, this process has %d", len(s.st.requests), len(cfg.Prompts))
		}
		g, ec.Joining = gs[1], true
	} else {
		if err := s.compare(ctx); err != nil {
			return nil, err
		}
		slot := max(ec.SlotBytes(w.Size()), 64<<10)
		if g, err = w.Sub(ctx, nil, pg.Options{Mode: pg.Raise, Pairs: true, SlotBytes: slot, Timeout: w.Options().Timeout}); err != nil {
			return nil, err
		}
	}
	if s.buf, err = ep.Open(ctx, ep.FromGroup(g), ec); err != nil {
		return nil, err
	}
	s.stats.ExpertBytes = m.ResidentExpertBytes()
	s.stats.AllExperts = m.ExpertBytes() * int64(m.Experts*m.Layers)
	return s, nil
}

// compare makes sure that the founders serve the same, and begins with who is there.
func (s *server) compare(ctx context.Context) error {
	all := make([]byte, len(s.same)*s.w.Size())
	res, err := s.w.AllGather(ctx, pg.U8(all), pg.U8(s.same[:]), nil)
	if err != nil {
		return err
	}
	for r := range s.w.Size() {
		if b := all[r*len(s.same):]; res.Active.Has(r) && [sha256.Size]byte(b[:len(s.same)]) != s.same {
			return fmt.Errorf("serve: rank %d serves something else than rank %d: other weights or another configuration", r, s.w.Rank())
		}
	}
	s.st = newState(len(s.cfg.Prompts), res.Active.Slots())
	return nil
}

// attach is what a newcomer gets.
func (s *server) attach() []byte { return s.st.encode(slices.Clone(s.same[:])) }

// enter makes the set known to all after a Boundary with newcomers, of which this process is one if it is fresh.
func (s *server) enter(ctx context.Context, fresh bool) error {
	mine, all := []byte{0}, make([]byte, s.w.Size())
	if fresh {
		mine[0] = 1
	}
	res, err := s.w.AllGather(ctx, pg.U8(all), pg.U8(mine), nil)
	if err != nil {
		return err
	}
	var came []int
	for r, b := range all {
		if res.Active.Has(r) && b == 1 {
			came = append(came, r)
		}
	}
	s.st.enter(res.Active.Slots(), came)
	return nil
}

// assign gives requests to ranks.
func (s *server) assign() {
	taken, got := s.st.assign(s.w.Rank())
	for _, from := range slices.Sorted(maps.Keys(taken)) {
		s.emit(Event{Kind: "taken", Epoch: s.epoch, From: from, Requests: taken[from]})
	}
	for _, i := range got {
		if r := &s.st.requests[i]; len(r.Hashes) > 0 {
			pos := len(r.Hashes) - 1
			s.emit(Event{Kind: "token", Request: i, Pos: pos, Token: int(r.Text[pos]), Hash: r.Hashes[pos]})
		}
	}
}

func (s *server) emit(e Event) {
	e.Rank, e.Step, e.Time = s.w.Rank(), s.st.step, time.Now().UnixNano()
	s.out(e)
}

// agree makes the step's bytes known to all and applies them. What a lost rank had is not there; its requests go on with
// another owner from what was agreed before.
//
// A rank contributes the number of its bytes (4) and whether it is told to end (4), then for each byte
// {request (4), byte (4), hash (8), lost mass (8)}.
func (s *server) agree(ctx context.Context, logits []float32) error {
	const head, record = 8, 24
	le, v, n := binary.LittleEndian, s.m.Vocab, len(s.cfg.Prompts)
	each := head + record*n
	mine, all := grow(&s.mine, each), grow(&s.gather, each*s.w.Size())
	clear(mine)
	le.PutUint32(mine, uint32(len(s.last)))
	mine[4] = bit(s.ended())
	for i, l := range s.last {
		lg, b := logits[l.row*v:(l.row+1)*v], mine[head+i*record:]
		le.PutUint32(b, uint32(l.req))
		b[4] = s.cfg.Sampling.pick(lg, l.req, len(s.st.requests[l.req].Text))
		le.PutUint64(b[8:], hash(lg))
		le.PutUint64(b[16:], math.Float64bits(s.owed[l.req]))
		s.owed[l.req] = 0
	}
	res, err := s.w.AllGather(ctx, pg.U8(all), pg.U8(mine), nil)
	if err != nil {
		return err
	}
	s.st.active = res.Active.Slots()
	for r := range s.w.Size() {
		if !res.Active.Has(r) {
			continue
		}
		b := all[r*each : (r+1)*each]
		count := le.Uint32(b)
		if count > uint32(n) {
			return fmt.Errorf("serve: rank %d gives %d bytes for %d requests", r, count, n)
		}
		s.st.ending = s.st.ending || b[4] != 0
		for b = b[head:]; count > 0; count-- {
			t := token{int(le.Uint32(b)), b[4], le.Uint64(b[8:]), math.Float64frombits(le.Uint64(b[16:]))}
			if err := s.applied(r, t); err != nil {
				return err
			}
			b = b[record:]
		}
	}
	if res.Epoch != s.epoch {
		s.epoch = res.Epoch
		s.emit(Event{Kind: "step", Epoch: res.Epoch, Active: s.st.active})
	}
	return nil
}

// applied puts one byte that rank r made into the state.
func (s *server) applied(r int, t token) error {
	if t.request >= len(s.cfg.Prompts) {
		return fmt.Errorf("serve: rank %d gives a byte for request %d of %d", r, t.request, len(s.cfg.Prompts))
	}
	pos := len(s.st.requests[t.request].Text)
	if err := s.st.apply(t, s.cfg.most(s.m, t.request)); err != nil {
		return err
	}
	if r == s.w.Rank() {
		s.emit(Event{Kind: "token", Request: t.request, Pos: pos, Token: int(t.token), Hash: t.hash, Lost: t.lost})
	}
	return nil
}

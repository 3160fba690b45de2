package serve

import (
	"context"
	"encoding/binary"
	"fmt"
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
	Max      int // bytes to generate for each prompt
	Replicas int // of each expert (default 2)
	Rows     int // rows of one rank in a step: prompts are read in pieces of what is left (default 32)
	Policy   ep.Policy
	Dir      string
}

func (c *Config) fill() {
	if c.Replicas == 0 {
		c.Replicas = 2
	}
	if c.Rows == 0 {
		c.Rows = 32
	}
}

// Event is something that happened, for who watches. Kind: "token" (Request, Pos, Token, Hash), "step" (the first one of
// an epoch: Epoch, Active), "taken" (Requests, by this rank or another: Lost), "done".
type Event struct {
	Kind     string  `json:"kind"`
	Rank     int     `json:"rank"`
	Step     uint64  `json:"step"`
	Time     int64   `json:"time"` // Unix nanoseconds
	Request  int     `json:"request,omitempty"`
	Pos      int     `json:"pos,omitempty"`
	Token    int     `json:"token,omitempty"`
	Hash     uint64  `json:"hash,omitempty"` // of the logits' bits
	Lost     float32 `json:"lost_mass,omitempty"`
	Epoch    uint64  `json:"epoch,omitempty"`
	Active   []int   `json:"active,omitempty"`
	Requests []int   `json:"requests,omitempty"`
	Stats    *Stats  `json:"stats,omitempty"`
}

// Stats is what a rank has done.
type Stats struct {
	ExpertBytes int64 `json:"resident_expert_bytes"`
	AllExperts  int64 `json:"all_expert_bytes"`
	Rows        int64 `json:"expert_rows"`        // of this rank's tokens
	RemoteRows  int64 `json:"expert_rows_remote"` // of them computed by another rank
	Computed    int64 `json:"expert_rows_here"`   // computed here, for anybody
	LinkBytes   int64 `json:"link_bytes"`         // given to other ranks: rows there and back, and tokens
	Steps       int64 `json:"steps"`
	Reruns      int64 `json:"reruns"`
}

// Placement is where the experts of every layer live.
func Placement(experts, ranks, replicas int) (*route.Placement, error) {
	return route.Contiguous(experts, ranks, min(replicas, ranks))
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

// Logits of a token: 64-bit FNV-1a over their bits.
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
	w      *pg.World
	m      *model.Model
	buf    *ep.Buffer
	place  *route.Placement
	out    func(Event)
	st     *state
	caches []*model.Cache
	batch  *model.Batch
	stats  Stats
	epoch  uint64

	rows                  []model.Row
	last                  []lastRow // rows whose logits are wanted
	x, xn, y, wts, logits []float32
	lost                  []float32
	experts               []int32
	gather, mine          []byte
	mass                  []float32
	table                 route.Table
}

type lastRow struct{ row, req int }

// record is what a rank contributes to a step's agreement: count (4), then for each byte {request (4), token (4), hash (8),
// lost mass (4), zero (4)}.
const recordBytes = 24

// Run serves all prompts to their end as one rank of the world. out is called on this goroutine.
func Run(ctx context.Context, w *pg.World, m *model.Model, cfg Config, out func(Event)) error {
	cfg.fill()
	size := w.Size()
	place, err := Placement(m.Experts, size, cfg.Replicas)
	if err != nil {
		return err
	}
	s := &server{cfg: cfg, w: w, m: m, place: place, out: out, batch: m.NewBatch(), caches: make([]*model.Cache, len(cfg.Prompts))}
	ec := ep.Config{
		Experts: m.Experts, TopK: m.TopK, Hidden: m.Hidden, MaxTokens: cfg.Rows, Placement: place, Policy: ep.Rerun,
	}
	var g *pg.Group
	j := w.Joined()
	if j.Replacement {
		if s.st, err = decodeState(j.Attach); err != nil {
			return err
		}
		set, _ := w.Active()
		s.st.active = set.Or(slotSet(s.st.active)).Slots()
		gs := w.Groups()
		if len(gs) < 2 || len(s.st.requests) != len(cfg.Prompts) {
			return fmt.Errorf("serve: the members serve something else: %d groups, %d requests", len(gs), len(s.st.requests))
		}
		g = gs[1]
		ec.Joining = true
	} else {
		set, _ := w.Active()
		s.st = newState(len(cfg.Prompts), set.Slots())
		slot := max(ec.SlotBytes(size), 64<<10)
		if g, err = w.Sub(ctx, nil, pg.Options{Mode: pg.Raise, Pairs: true, SlotBytes: slot, Timeout: w.Options().Timeout}); err != nil {
			return err
		}
	}
	if s.buf, err = ep.Open(ctx, ep.FromGroup(g), ec); err != nil {
		return err
	}
	s.stats.ExpertBytes = m.ResidentExpertBytes()
	s.stats.AllExperts = m.ExpertBytes() * int64(m.Experts*m.Layers)
	for fresh := j.Replacement; ; fresh = false {
		if !fresh { // a newcomer stands in the Boundary of its first step already
			p, err := w.Boundary(ctx, s.st.encode)
			if err != nil {
				return err
			}
			if len(p.Joined) > 0 {
				s.st.active = slotSet(append(slices.Clone(s.st.active), p.Joined...)).Slots()
			}
		}
		taken := s.st.assign()
		if len(taken) > 0 {
			s.emit(Event{Kind: "taken", Requests: taken})
		}
		if s.st.finished() {
			break
		}
		if err := s.step(ctx); err != nil {
			return fmt.Errorf("step %d: %w", s.st.step, err)
		}
		s.st.step++
	}
	st := s.stats
	s.emit(Event{Kind: "done", Stats: &st})
	return nil
}

func slotSet(slots []int) (s pg.Set) {
	for _, x := range slots {
		s.Add(x)
	}
	return s
}

func (s *server) emit(e Event) {
	e.Rank, e.Step, e.Time = s.w.Rank(), s.st.step, time.Now().UnixNano()
	s.out(e)
}

// tokens are a request's so far: the prompt's and the generated ones.
func (s *server) tokens(req int) []byte {
	return append(model.Prompt(s.cfg.Prompts[req]), s.st.requests[req].Text...)
}

// plan fills s.rows with what this rank feeds in this step: for each of its requests what its cache lacks, as far as the
// rows reach.
func (s *server) plan() {
	s.rows, s.last = s.rows[:0], s.last[:0]
	for i := range s.st.requests {
		r := &s.st.requests[i]
		if r.Owner != s.w.Rank() || r.Done {
			s.caches[i] = nil // who loses a request forgets it
			continue
		}
		if s.caches[i] == nil {
			s.caches[i] = s.m.NewCache()
		}
		c, toks := s.caches[i], s.tokens(i)
		for p := c.Len(); p < len(toks) && len(s.rows) < s.cfg.Rows; p++ {
			if p == len(toks)-1 {
				s.last = append(s.last, lastRow{len(s.rows), i})
			}
			s.rows = append(s.rows, model.Row{Cache: c, Pos: p, Token: toks[p]})
		}
	}
}

func grow[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n+n/2)
	}
	*s = (*s)[:n]
	return *s
}

func (s *server) step(ctx context.Context) error {
	s.plan()
	m, n := s.m, len(s.rows)
	if err := s.batch.Begin(s.rows); err != nil {
		return err
	}
	x, xn, y := grow(&s.x, n*m.Hidden), grow(&s.xn, n*m.Hidden), grow(&s.y, n*m.Hidden)
	wts, experts := grow(&s.wts, n*m.TopK), grow(&s.experts, n*m.TopK)
	lost, mass := grow(&s.lost, n), grow(&s.mass, n)
	clear(lost)
	m.Embed(s.rows, x)
	for l := range m.Layers {
		m.Attend(s.batch, l, x)
		m.Route(s.batch, l, x, xn, experts, wts)
		rep, err := ep.Step(ctx, s.buf, xn, experts, wts, func(h ep.Handle, y []float32) error { return s.compute(l, h, y) }, &ep.Output{Y: y, LostMass: mass})
		if err != nil {
			return fmt.Errorf("layer %d: %w", l, err)
		}
		s.count(rep, experts)
		for i := range x {
			x[i] += y[i]
		}
		for i := range mass {
			lost[i] += mass[i]
		}
	}
	logits := grow(&s.logits, n*m.Vocab)
	m.Head(s.batch, x, logits)
	s.batch.Commit()
	s.stats.Steps++
	return s.agree(ctx, logits, lost)
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

// count keeps the books of one layer.
func (s *server) count(rep ep.Report, experts []int32) {
	s.stats.Reruns += int64(rep.Reruns)
	s.stats.Computed += int64(rep.Rows)
	s.table.Reset(s.place, rep.Active, s.w.Rank())
	row := int64(4 * s.m.Hidden)
	for _, e := range experts {
		if o := s.table.Owner(int(e)); o >= 0 {
			s.stats.Rows++
			if o != s.w.Rank() {
				s.stats.RemoteRows++
				s.stats.LinkBytes += row
			}
		}
	}
	own := int64(0) // of the rows computed here, those that went back to others
	own = int64(rep.Rows)
	for _, e := range experts {
		if s.table.Owner(int(e)) == s.w.Rank() {
			own--
		}
	}
	s.stats.LinkBytes += own * row
}

// agree makes the step's bytes known to all and applies them. What a lost rank had is not there; its requests go on with
// another owner from what was agreed before.
func (s *server) agree(ctx context.Context, logits, lost []float32) error {
	size, v := s.w.Size(), s.m.Vocab
	each := 4 + recordBytes*len(s.cfg.Prompts)
	mine, all := grow(&s.mine, each), grow(&s.gather, each*size)
	clear(mine)
	binary.LittleEndian.PutUint32(mine, uint32(len(s.last)))
	for i, l := range s.last {
		lg := logits[l.row*v : (l.row+1)*v]
		b := mine[4+i*recordBytes:]
		binary.LittleEndian.PutUint32(b, uint32(l.req))
		binary.LittleEndian.PutUint32(b[4:], uint32(model.Argmax(lg)))
		binary.LittleEndian.PutUint64(b[8:], hash(lg))
		binary.LittleEndian.PutUint32(b[16:], math.Float32bits(lost[l.row]))
	}
	res, err := s.w.AllGather(ctx, pg.U8(all), pg.U8(mine), nil)
	if err != nil {
		return err
	}
	s.st.active = res.Active.Slots()
	for r := range size {
		if !res.Active.Has(r) {
			continue
		}
		b := all[r*each:]
		n := binary.LittleEndian.Uint32(b)
		if int(n) > len(s.cfg.Prompts) {
			return fmt.Errorf("serve: rank %d gives %d bytes for %d requests", r, n, len(s.cfg.Prompts))
		}
		for i := range int(n) {
			p := b[4+i*recordBytes:]
			req, tok := int(binary.LittleEndian.Uint32(p)), byte(binary.LittleEndian.Uint32(p[4:]))
			pos := 0
			if req < len(s.st.requests) {
				pos = len(s.st.requests[req].Text)
			}
			if err := s.st.apply(req, tok, s.max(req)); err != nil {
				return err
			}
			if r == s.w.Rank() {
				s.emit(Event{
					Kind: "token", Request: req, Pos: pos, Token: int(tok),
					Hash: binary.LittleEndian.Uint64(p[8:]), Lost: math.Float32frombits(binary.LittleEndian.Uint32(p[16:])),
				})
			}
		}
	}
	if res.Epoch != s.epoch {
		s.epoch = res.Epoch
		s.emit(Event{Kind: "step", Epoch: res.Epoch, Active: s.st.active})
	}
	return nil
}

// max is how many bytes a request gets: no more than the model's context has room for.
func (s *server) max(req int) int {
	return min(s.cfg.Max, s.m.Context-len(model.Prompt(s.cfg.Prompts[req])))
}

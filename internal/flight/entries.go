package flight

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
)

// Entry is a remembered operation, as a line of JSON has it. Times are Unix time in nanoseconds, 0 if it has not come to
// that.
type Entry struct {
	Rank        int    `json:"rank"` // slot of the process
	Incarnation uint32 `json:"incarnation"`
	Group       string `json:"group"` // its id, in hexadecimal
	Name        string `json:"group_name,omitempty"`
	Seq         uint64 `json:"sequence"`
	Op          string `json:"operation"`
	DType       string `json:"dtype,omitempty"`
	Peer        int    `json:"peer"` // rank in the group: root, or the other end of a send or recv
	Epoch       uint64 `json:"epoch"`
	Set         []int  `json:"set"` // slots that are active in that epoch; null: not known any more
	BytesIn     int    `json:"bytes_in"`
	BytesOut    int    `json:"bytes_out"`
	State       string `json:"state"`             // scheduled, started, ended
	Outcome     string `json:"outcome,omitempty"` // how it ended
	Created     int64  `json:"created_ns"`
	Started     int64  `json:"started_ns,omitempty"`
	Ended       int64  `json:"ended_ns,omitempty"`
	WaitedFor   []int  `json:"waited_for,omitempty"` // slots

	world  bool
	op     ops.Op
	out    ops.Outcome
	size   int // element, in bytes
	dt     dtype.DType
	whole  bool // all ranks of the group are active
	uneven bool
	limit  int64 // deadline in ms
}

// The states.
const (
	Scheduled = "scheduled"
	Started   = "started"
	Ended     = "ended"
)

// kept is what a group remembers, apart from it.
type kept struct {
	about
	found    [2][]found // the operations of its order; sends and receives
	versions []version
	waits    []wait
}

func (k *kept) len() int { return len(k.found[0]) + len(k.found[1]) }

func (g *Group) keep() kept {
	g.mu.Lock()
	defer g.mu.Unlock()
	return kept{g.about, g.read(), slices.Clone(g.versions), slices.Clone(g.waits)}
}

// Entries returns what is remembered of all groups, in the order in which it was issued.
func (r *Recorder) Entries() []Entry {
	all, _ := r.collect()
	return all
}

// gap says that a group's operations, or those of several, are remembered from a time on only.
type gap struct {
	world  bool
	n      uint64 // how many came before
	since  int64
	oldest uint64 // sequence of the oldest that is remembered
}

// collect returns the entries in the order in which they were issued.
func (r *Recorder) collect() (all []Entry, gaps []gap) {
	if r == nil {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone > 0 {
		gaps = append(gaps, gap{n: r.gone, since: r.wall(r.horizon) + 1})
	}
	groups := slices.Clone(r.retired)
	for _, g := range r.open {
		groups = append(groups, g.keep())
	}
	for i := range groups {
		k := &groups[i]
		if x := k.found[0]; len(x) > 0 && x[0].at > 0 {
			gaps = append(gaps, gap{k.id == r.cfg.World, uint64(x[0].at), r.wall(int64(x[0].words[wCreated])), x[0].seq()})
		}
		all = r.entries(all, k)
	}
	slices.SortStableFunc(all, func(a, b Entry) int { return cmp.Compare(a.Created, b.Created) })
	return all, gaps
}

// wall is a reading of the caller's clock as Unix time.
func (r *Recorder) wall(now int64) int64 { return r.cfg.Origin.UnixNano() + now }

func (r *Recorder) entries(all []Entry, k *kept) []Entry {
	sets := make([][]int, len(k.versions))
	for i := range sets {
		sets[i] = k.versions[i].active.Slots()
	}
	group := strconv.FormatUint(k.id, 16)
	for _, fs := range k.found {
		for i := range fs {
			w := &fs[i]
			in, out := w.bytes()
			e := Entry{
				Rank: r.cfg.Rank, Incarnation: r.cfg.Incarnation, Group: group, Name: k.name,
				Seq: w.seq(), Op: w.op().String(), Peer: w.peer(), Epoch: w.epoch(), BytesIn: in, BytesOut: out,
				State: Scheduled, Created: r.wall(int64(w.words[wCreated])),
				world: k.id == r.cfg.World, op: w.op(), out: w.out(), size: 1, dt: w.dt(), uneven: w.uneven(), limit: k.limit.Milliseconds(),
			}
			if n := e.dt.Size(); n > 0 {
				e.size, e.DType = n, e.dt.String()
			}
			if w.started() {
				e.State, e.Started = Started, r.wall(int64(w.words[wStarted]))
			}
			if e.out != 0 {
				e.State, e.Outcome, e.Ended = Ended, e.out.String(), r.wall(int64(w.words[wEnded]))
			}
			for i := range k.versions {
				if v := &k.versions[i]; v.epoch&halfMask == e.Epoch {
					e.Epoch, e.Set, e.whole = v.epoch, sets[i], len(sets[i]) == v.size
					break
				}
			}
			for i := range k.waits {
				if k.waits[i].at == w.at {
					e.WaitedFor = k.waits[i].missing.Slots()
				}
			}
			all = append(all, e)
		}
	}
	return all
}

// WriteJSON writes one line for each operation, in the order in which they were issued.
func (r *Recorder) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	for _, e := range r.Entries() {
		if err := enc.Encode(&e); err != nil {
			return err
		}
	}
	return nil
}

// ReadJSON reads what WriteJSON wrote.
func ReadJSON(r io.Reader) (all []Entry, err error) {
	dec := json.NewDecoder(r)
	for {
		var e Entry
		switch err := dec.Decode(&e); err {
		case nil:
			all = append(all, e)
		case io.EOF:
			return all, nil
		default:
			return all, fmt.Errorf("flight: operation %d of the dump: %w", len(all)+1, err)
		}
	}
}

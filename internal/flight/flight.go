// Package flight remembers the last operations of each group of a process, for the time when something has gone wrong:
// what was issued, what was waited for, what ended and how.
//
// Recording costs an operation seven stores, and no allocation, lock or clock: the caller passes the time, which costs more
// than all the rest. A dump reads while others record. It is written in two forms: as the pickle that
// torch.distributed.flight_recorder reads, and as one line of JSON for each operation.
//
// To torch's analyser a version of a group is a process group of its own, whose ranks are those that were active in it: it
// expects every rank of a process group in every operation, and with that its verdicts hold across losses and rejoins.
package flight

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
	"github.com/serry-project/serry/internal/slots"
)

// DefaultEntries is how many operations of a group are remembered.
const DefaultEntries = 2048

const (
	maxVersions = 64 // are kept without asking whether an entry still refers to them
	maxWaits    = 64
)

// Config of a Recorder.
type Config struct {
	Rank        int // slot of this process in the world
	Incarnation uint32
	World       uint64    // id of the group that all processes are in
	Entries     int       // operations of a group that are remembered, 64 bytes each (default 2048); made a power of two
	Origin      time.Time // what the clock showed when the caller's now was 0
}

// Recorder remembers for one process. All methods may be called from any goroutine; those of a nil *Recorder do nothing.
type Recorder struct {
	cfg  Config
	bits uint8

	mu      sync.Mutex
	open    []*Group
	retired []kept // closed ones, as far as they all fit in one ring
	gone    uint64 // operations of groups that are not even retired any more
	horizon int64  // when the last of them was created

	dumping sync.Mutex
}

// New makes a recorder without groups.
func New(cfg Config) *Recorder {
	if cfg.Entries <= 0 {
		cfg.Entries = DefaultEntries
	}
	return &Recorder{cfg: cfg, bits: uint8(bits.Len(uint(cfg.Entries - 1)))}
}

// Call is an operation as it is issued.
type Call struct {
	Seq    uint64 // its place in the group's order; of Send and Recv whatever the caller counts
	Op     ops.Op
	DType  dtype.DType
	Peer   int  // rank in the group: the root, or whom a Send or Recv is with
	In     int  // bytes that this rank gives
	Out    int  // bytes that it takes
	Uneven bool // the ranks' parts are not all equal
}

// Index is a remembered operation of a group.
type Index uint64

const local Index = 1 << 63 // it is in the ring of sends and receives

// Group remembers the operations of one group. Begin, Started and End are for the hot path. For operations of the group's
// order one goroutine at a time calls them, the driver of the group; for sends and receives, and for the other methods, any
// may. The methods of a nil *Group do nothing.
type Group struct {
	r *Recorder
	about
	ordered *ring
	local   atomic.Pointer[ring] // of sends and receives, made when there is one

	mu       sync.Mutex
	versions []version // ascending
	waits    []wait
}

// about is what a group is.
type about struct {
	id    uint64
	name  string
	limit time.Duration
}

type version struct {
	epoch  uint64
	size   int // ranks, active or not
	active slots.Set
}

type wait struct {
	at      Index
	missing slots.Set
}

// Group adds a group: its id, what people call it, the deadline of its operations, and the version that it begins in (see
// Version).
func (r *Recorder) Group(id uint64, name string, deadline time.Duration, epoch uint64, size int, active slots.Set) *Group {
	if r == nil {
		return nil
	}
	g := &Group{r: r, about: about{id, name, deadline}, ordered: newRing(r.bits, false), versions: []version{{epoch, size, active}}}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = append(r.open, g)
	return g
}

// Begin remembers an operation as issued in a version of the group.
func (g *Group) Begin(c *Call, epoch uint64, now time.Duration) Index {
	if g == nil {
		return 0
	}
	return g.begin(c, epoch, now)
}

func (g *Group) begin(c *Call, epoch uint64, now time.Duration) Index {
	if c.Op.Local() {
		return local | Index(g.locals().begin(c, epoch, now))
	}
	return Index(g.ordered.begin(c, epoch, now))
}

// Started says that an operation has begun to wait for others, and in which version: one that moves on to another version
// is Started again. An operation that ends at its first step need not be.
func (g *Group) Started(i Index, epoch uint64, now time.Duration) {
	if g != nil {
		g.ring(i).start(uint64(i&^local), epoch, now)
	}
}

// End says how an operation has ended, and in which version.
func (g *Group) End(i Index, out ops.Outcome, epoch uint64, now time.Duration) {
	if g != nil {
		g.ring(i).end(uint64(i&^local), out, epoch, now)
	}
}

// Waited says whom an operation waits for, when that has become worth asking: slots of the world. Only the last of it is
// kept, and of the last 64 operations.
func (g *Group) Waited(i Index, missing slots.Set) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if k := slices.IndexFunc(g.waits, func(w wait) bool { return w.at == i }); k >= 0 {
		g.waits[k].missing = missing
		return
	}
	if len(g.waits) == maxWaits {
		g.waits = slices.Delete(g.waits, 0, 1)
	}
	g.waits = append(g.waits, wait{i, missing})
}

// Version tells of a new version of the group: its epoch, the ranks of the group, active or not, and the active slots. It
// comes before an operation ends in it.
func (g *Group) Version(epoch uint64, size int, active slots.Set) {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.versions); n > 0 && g.versions[n-1].epoch >= epoch {
		return
	}
	if len(g.versions) >= maxVersions {
		g.prune()
	}
	g.versions = append(g.versions, version{epoch, size, active})
}

// prune forgets versions that no entry refers to, and in any case all but as many as there can be entries.
func (g *Group) prune() {
	used := map[uint64]bool{g.versions[len(g.versions)-1].epoch & halfMask: true}
	for _, all := range g.read() {
		for i := range all {
			used[all[i].epoch()] = true
		}
	}
	g.versions = slices.DeleteFunc(g.versions, func(v version) bool { return !used[v.epoch&halfMask] })
	if over := len(g.versions) - len(g.ordered.entries); over > 0 {
		g.versions = slices.Delete(g.versions, 0, over)
	}
}

// read returns the operations of the group's order, and its sends and receives.
func (g *Group) read() (all [2][]found) {
	all[0] = g.ordered.read(0)
	if x := g.local.Load(); x != nil {
		all[1] = x.read(local)
	}
	return all
}

func (g *Group) locals() *ring {
	x := g.local.Load()
	if x == nil {
		g.local.CompareAndSwap(nil, newRing(g.r.bits, true))
		x = g.local.Load()
	}
	return x
}

func (g *Group) ring(i Index) *ring {
	if i&local != 0 {
		return g.locals()
	}
	return g.ordered
}

// Close ends a group, after the last End. Its operations are remembered a while longer.
func (g *Group) Close() {
	if g == nil {
		return
	}
	r := g.r
	r.mu.Lock()
	defer r.mu.Unlock()
	k := slices.Index(r.open, g)
	if k < 0 {
		return
	}
	r.open = slices.Delete(r.open, k, k+1)
	r.retired = append(r.retired, g.keep())
	n := 0
	for i := len(r.retired) - 1; i >= 0; i-- {
		n += 1 + r.retired[i].len()
		if n > 1<<r.bits && i < len(r.retired)-1 {
			r.forget(i + 1)
			return
		}
	}
}

// forget forgets the n groups that were closed first.
func (r *Recorder) forget(n int) {
	for i := range n {
		if x := r.retired[i].found[0]; len(x) > 0 {
			last := &x[len(x)-1]
			r.gone += uint64(last.at) + 1
			r.horizon = max(r.horizon, int64(last.words[wCreated]))
		}
	}
	r.retired = slices.Delete(r.retired, 0, n)
}

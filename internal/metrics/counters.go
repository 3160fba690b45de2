package metrics

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/internal/ops"
)

// Cause is what a suspicion rests on.
type Cause uint8

// The causes.
const (
	RobustFutex Cause = iota + 1 // the kernel marked the death word of a process of this host
	Pidfd                        // or said that it has exited
	EOF                          // its socket ended
	Goodbye                      // it closed its mesh
	Heartbeat                    // a process of another host was not heard for the limit
	Voucher                      // a process of its host says that it is dead
	Deadline                     // it was late for an operation
	Unreachable                  // it and another member cannot reach each other
	Replaced                     // a new incarnation asks for its slot
	Told                         // the coordinator of another view named it
	numCauses
)

var causeNames = [numCauses]string{RobustFutex: "robust_futex", Pidfd: "pidfd", EOF: "eof", Goodbye: "goodbye", Heartbeat: "heartbeat",
	Voucher: "voucher", Deadline: "deadline", Unreachable: "unreachable", Replaced: "replaced", Told: "told"}

func (c Cause) String() string {
	if c > 0 && c < numCauses {
		return causeNames[c]
	}
	return "unknown"
}

// Durations are counted in buckets whose limits are powers of the fourth root of two in seconds, which are those of
// Prometheus' native histograms of schema 2: bucket i ends at 2^((i+bucketLow)/4) s. What is shorter than the first or
// longer than the last is counted in it.
const (
	schema     = 2
	bucketLow  = -24 << schema // 60 ns
	bucketHigh = 10 << schema  // 17 minutes
	numBuckets = bucketHigh - bucketLow + 1
)

// The fractions of 2^(1/4), 2^(1/2), 2^(3/4), as the bits of a float64.
var (
	quarter1 = math.Float64bits(math.Exp2(0.25)) & (1<<52 - 1)
	quarter2 = math.Float64bits(math.Exp2(0.50)) & (1<<52 - 1)
	quarter3 = math.Float64bits(math.Exp2(0.75)) & (1<<52 - 1)
)

// bucketOf is the bucket of a duration.
func bucketOf(d time.Duration) int {
	if d <= 0 {
		return 0
	}
	b := math.Float64bits(float64(d) * 1e-9)
	exp, frac := int(b>>52)-1023, b&(1<<52-1)
	i := exp<<schema - bucketLow
	switch {
	case frac > quarter3:
		i += 4
	case frac > quarter2:
		i += 3
	case frac > quarter1:
		i += 2
	case frac > 0:
		i++
	}
	return min(max(i, 0), numBuckets-1)
}

// perOp is what is counted of one operation in one lane. Buckets count those that ended well; by is indexed by the other
// outcomes.
type perOp struct {
	buckets [numBuckets]atomic.Uint64
	nanos   atomic.Uint64
	bytes   atomic.Uint64
	by      [ops.NumOutcomes]atomic.Uint64
	_       [128]byte // the next one is another core's
}

// Lane is where the operations of one group are counted, or of a few: an operation costs a group three uncontended
// additions. A nil Lane counts nothing.
type Lane struct{ ops [ops.NumOps]perOp }

// Ended counts an operation that has ended: the bytes that this rank gave, and how long it took from issue to end. Bytes and
// duration count only if it ended well. It allocates nothing, takes no lock and may be called from any goroutine.
func (l *Lane) Ended(op ops.Op, out ops.Outcome, bytes int, took time.Duration) {
	if l != nil {
		l.ended(op, out, bytes, took)
	}
}

func (l *Lane) ended(op ops.Op, out ops.Outcome, bytes int, took time.Duration) {
	if op >= ops.NumOps || out >= ops.NumOutcomes {
		op, out = 0, 0 // nobody's: not shown
	}
	p := &l.ops[op]
	if out != ops.OK {
		p.by[out].Add(1)
		return
	}
	if took > 0 {
		p.nanos.Add(uint64(took))
	}
	if bytes > 0 {
		p.bytes.Add(uint64(bytes))
	}
	p.buckets[bucketOf(took)].Add(1) // last: who has counted it has its time and bytes
}

// Groups of operations, as their label says.
const (
	groupWorld = "world"
	groupSub   = "sub"
)

// subLanes is among how many lanes the subgroups of a process are spread, so that two that work at once seldom meet.
const subLanes = 8

// Counters are what a process counts where it happens. They only grow. The zero value is ready; all methods of a nil
// *Counters do nothing, which is how a process without metrics runs. They may be called from any goroutine.
type Counters struct {
	world Lane
	subs  [subLanes]Lane
	next  atomic.Uint32

	detections [numCauses]atomic.Uint64
	evictions  atomic.Uint64
	rejoins    atomic.Uint64
	views      atomic.Uint64
	_          [128]byte
}

// Lane is where a new group counts: that of the world its own, subgroups a few.
func (c *Counters) Lane(world bool) *Lane {
	switch {
	case c == nil:
		return nil
	case world:
		return &c.world
	}
	return &c.subs[c.next.Add(1)%subLanes]
}

// Detected counts evidence against a process.
func (c *Counters) Detected(cause Cause) {
	if c != nil && cause < numCauses {
		c.detections[cause].Add(1)
	}
}

// View counts a view that was installed here, the slots that it lost, and those that came back to it: an incarnation
// above the first.
func (c *Counters) View(lost, rejoined int) {
	if c != nil {
		c.views.Add(1)
		c.evictions.Add(uint64(lost))
		c.rejoins.Add(uint64(rejoined))
	}
}

// Counts is what Counters have come to.
type Counts struct {
	Ops        []OpCounts // those of which any has ended, by group and operation
	Detections [numCauses]uint64
	Evictions  uint64
	Rejoins    uint64
	Views      uint64
}

// OpCounts is what was counted of an operation, in the world or in all subgroups.
type OpCounts struct {
	Group    string // world, sub
	Op       ops.Op
	Outcomes [ops.NumOutcomes]uint64
	Bytes    uint64
	Nanos    uint64
	Buckets  [numBuckets]uint64 // not cumulative; their sum is Outcomes[OK]
}

// Read returns the counts. Each operation's are of one moment, unless operations end so fast that there is none; then
// time and bytes are of up to a few more operations than the count.
func (c *Counters) Read() *Counts {
	out := &Counts{}
	if c == nil {
		return out
	}
	for op := ops.Op(1); op < ops.NumOps; op++ {
		x := OpCounts{Group: groupWorld, Op: op}
		x.add(&c.world.ops[op])
		out.keep(x)
	}
	for op := ops.Op(1); op < ops.NumOps; op++ {
		x := OpCounts{Group: groupSub, Op: op}
		for i := range c.subs {
			x.add(&c.subs[i].ops[op])
		}
		out.keep(x)
	}
	for i := range c.detections {
		out.Detections[i] = c.detections[i].Load()
	}
	out.Evictions, out.Rejoins, out.Views = c.evictions.Load(), c.rejoins.Load(), c.views.Load()
	return out
}

func (c *Counts) keep(x OpCounts) {
	for _, n := range x.Outcomes {
		if n > 0 {
			c.Ops = append(c.Ops, x)
			return
		}
	}
}

// readTries bounds how often a lane is read until it stands still.
const readTries = 16

func (x *OpCounts) add(p *perOp) {
	var a, b OpCounts
	a.read(p)
	for range readTries {
		if b.read(p); a == b {
			break
		}
		a = b
	}
	x.Bytes += a.Bytes
	x.Nanos += a.Nanos
	for i, n := range a.Buckets {
		x.Buckets[i] += n
	}
	for i, n := range a.Outcomes {
		x.Outcomes[i] += n
	}
}

// read reads the buckets before what is added to before them.
func (x *OpCounts) read(p *perOp) {
	var n uint64
	for i := range p.buckets {
		x.Buckets[i] = p.buckets[i].Load()
		n += x.Buckets[i]
	}
	for i := range p.by {
		x.Outcomes[i] = p.by[i].Load()
	}
	x.Outcomes[ops.OK] = n
	x.Nanos, x.Bytes = p.nanos.Load(), p.bytes.Load()
}

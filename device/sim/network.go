// Package sim is a network of links on a virtual clock: latency, bandwidth, partitions, broken connections and crashes,
// the same for the same seed.
//
// Nothing happens by itself. Send dates a frame's arrival, Advance moves the clock and delivers what is due to the other
// end, Poll hands it over. The chance of every direction of every link is a stream of its own, so what befalls a frame
// depends on the seed and on what was sent before it in that direction, not on how goroutines interleave elsewhere.
//
// A test steps the clock itself, from Next to Next, or lets Drive do it in a goroutine, in real time or in the bubble of
// testing/synctest; there a waiter sleeps on Link.Ready.
package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/serry-project/serry/internal/wire"
)

// Params is what a connection is like. The zero value is an ideal one.
type Params struct {
	Latency    time.Duration // from end to end
	Jitter     time.Duration // up to so much more, drawn for each frame; frames do not overtake
	Bandwidth  int64         // bytes per second, headers included; 0: not limited
	Loss       float64       // chance in [0, 1) that a frame has to be sent again; links are reliable, so it is a delay
	Retransmit time.Duration // delay of the first time again, doubling (default 2 x (Latency + Jitter) + 1 ms)
	Reconnect  time.Duration // delay of replay after Cut and Heal (default 3 x Latency + Jitter + 1 ms)
	Backlog    int           // bytes sent and not yet polled by the peer before Send says ErrFull (default 8 MiB)
}

func (p Params) filled() Params {
	if p.Loss < 0 || p.Loss >= 1 {
		panic(fmt.Sprintf("sim: Params.Loss is %v, want [0, 1)", p.Loss))
	}
	if p.Retransmit == 0 {
		p.Retransmit = 2*(p.Latency+p.Jitter) + time.Millisecond
	}
	if p.Reconnect == 0 {
		p.Reconnect = 3*p.Latency + p.Jitter + time.Millisecond
	}
	if p.Backlog == 0 {
		p.Backlog = 8 << 20
	}
	return p
}

// Network is a set of nodes, named by number, and the links between them. All methods may be called from any goroutine.
type Network struct {
	mu      sync.Mutex
	seed    uint64
	now     time.Duration
	clock   func() time.Duration // while Drive runs
	kick    chan struct{}        // tells Drive of an earlier event
	events  events               // directions in which something is going to happen
	links   []*Link              // open at one end at least
	serial  int                  // of the next direction
	made    map[[2]int]int       // how many links were made between two nodes
	oneWay  map[[2]int]bool      // from, to: nothing gets through
	alone   map[int]bool         // nodes that Isolate cut off
	pool    [25][][]byte         // free payload buffers by log2 of their size
	scratch [wire.Size]byte
}

// New returns an empty network at time 0.
func New(seed uint64) *Network {
	return &Network{
		seed:   seed,
		kick:   make(chan struct{}, 1),
		made:   make(map[[2]int]int),
		oneWay: make(map[[2]int]bool),
		alone:  make(map[int]bool),
	}
}

// Pair links nodes a and b and returns their ends. A crashed node that is paired again is a new process.
func (n *Network) Pair(a, b int, p Params) (atA, atB *Link) {
	if a == b {
		panic(fmt.Sprintf("sim: node %d paired with itself", a))
	}
	p = p.filled()
	n.mu.Lock()
	defer n.mu.Unlock()
	pair := [2]int{min(a, b), max(a, b)}
	nth := n.made[pair]
	n.made[pair]++
	atA, atB = n.end(a, b), n.end(b, a)
	n.join(atA, atB, p, nth)
	n.join(atB, atA, p, nth)
	atA.out.back, atB.out.back = atB.out, atA.out
	n.links = append(n.links, atA, atB)
	return atA, atB
}

func (n *Network) end(node, peer int) *Link {
	return &Link{net: n, node: node, peer: peer, ready: make(chan struct{}, 1)}
}

func (n *Network) join(from, to *Link, p Params, nth int) {
	stream := wire.Hash(wire.Hash(wire.Hash(0, uint64(from.node)), uint64(to.node)), uint64(nth))
	d := &direction{
		from: from, to: to, params: p,
		chance: rand.New(rand.NewPCG(n.seed, stream)),
		order:  n.serial,
		index:  -1,
	}
	n.serial++
	d.blocked = n.isBlocked(from.node, to.node)
	from.out, to.in = d, d
}

// Shape changes what frames sent from now on from one node to another meet.
func (n *Network) Shape(from, to int, p Params) {
	p = p.filled()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		if l.node == from && l.peer == to {
			l.out.params = p
		}
	}
}

// Now is the time of the clock.
func (n *Network) Now() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tick()
	return n.now
}

// tick reads the clock if there is one that runs.
func (n *Network) tick() {
	if n.clock != nil {
		n.now = max(n.now, n.clock())
	}
}

// Next is when something will happen, ok false if nothing will.
func (n *Network) Next() (at time.Duration, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.events) == 0 {
		return 0, false
	}
	return max(n.now, n.events[0].due), true
}

// Advance moves the clock to now, which is never back, and delivers what is due by then. An answer to a frame is dated
// from the clock as it is then: for exact times go from Next to Next.
func (n *Network) Advance(now time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.advance(now)
}

func (n *Network) advance(now time.Duration) {
	n.now = max(n.now, now)
	for len(n.events) > 0 && n.events[0].due <= n.now {
		d := n.events[0]
		d.deliver(n.now)
		n.schedule(d)
	}
}

// Settle goes from Next to Next, calling each before every step (nil: nothing), until nothing is going to happen or the
// clock has reached limit.
func (n *Network) Settle(limit time.Duration, each func()) {
	for {
		if each != nil {
			each()
		}
		at, ok := n.Next()
		if !ok || at > limit {
			return
		}
		n.Advance(at)
	}
}

// Drive moves the clock as time goes by, from now on until stop is closed.
func (n *Network) Drive(stop <-chan struct{}) {
	start := time.Now()
	n.mu.Lock()
	base := n.now
	n.clock = func() time.Duration { return base + time.Since(start) }
	n.mu.Unlock()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		n.mu.Lock()
		n.tick()
		n.advance(n.now)
		wait := time.Hour
		if len(n.events) > 0 {
			wait = n.events[0].due - n.now
		}
		n.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-n.kick:
		case <-stop:
			n.mu.Lock()
			n.tick()
			n.clock = nil
			n.mu.Unlock()
			return
		}
	}
}

// Partition lets nothing through between a and b, either way. Both stay alive and hear nothing: what is sent waits and
// is replayed when it heals.
func (n *Network) Partition(a, b int) {
	n.reblock(func() { n.oneWay[[2]int{a, b}], n.oneWay[[2]int{b, a}] = true, true })
}

// PartitionOneWay lets nothing through from one node to another; the other way still works, but what it delivers is not
// acknowledged, so its sender gets ErrFull in the end.
func (n *Network) PartitionOneWay(from, to int) {
	n.reblock(func() { n.oneWay[[2]int{from, to}] = true })
}

// Isolate cuts a node off from all others, also from those that it is paired with later, as if its host had lost power:
// no peer gets evidence of anything. HealAll takes it back.
func (n *Network) Isolate(node int) {
	n.reblock(func() { n.alone[node] = true })
}

// Heal ends partitions between a and b, both ways.
func (n *Network) Heal(a, b int) {
	n.reblock(func() {
		delete(n.oneWay, [2]int{a, b})
		delete(n.oneWay, [2]int{b, a})
	})
}

// HealAll ends every partition and isolation.
func (n *Network) HealAll() {
	n.reblock(func() {
		clear(n.oneWay)
		clear(n.alone)
	})
}

func (n *Network) isBlocked(from, to int) bool {
	return n.oneWay[[2]int{from, to}] || n.alone[from] || n.alone[to]
}

func (n *Network) reblock(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tick()
	change()
	for _, l := range n.links {
		d := l.out
		was := d.blocked
		d.blocked = n.isBlocked(l.node, l.peer)
		if was && !d.blocked {
			d.replay(n.now)
		}
	}
	for _, l := range n.links { // after all: the way back counts too
		n.schedule(l.out)
	}
}

// Cut breaks the connections between a and b: what is under way is replayed after they have reconnected. No frame is
// lost, none comes twice.
func (n *Network) Cut(a, b int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tick()
	for _, l := range n.links {
		if (l.node == a && l.peer == b) || (l.node == b && l.peer == a) {
			l.out.replay(n.now)
			n.schedule(l.out)
		}
	}
}

// Crash ends a node's process: its ends are closed, and of what it had sent and is still under way the first so many
// frames arrive, chosen by the seed; then each peer's Poll says ErrLost. Restarting it is a matter of new Pairs.
func (n *Network) Crash(node int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tick()
	for _, l := range append([]*Link(nil), n.links...) {
		if l.node == node && !l.ended {
			l.out.truncate(l.out.chance.IntN(l.out.queue.len() + 1))
			l.end(fmt.Sprintf("sim: node %d has crashed, to node %d", l.node, l.peer))
		}
	}
}

// schedule puts a direction where its next event belongs.
func (n *Network) schedule(d *direction) {
	due, ok := d.next()
	switch {
	case !ok && d.index >= 0:
		heap.Remove(&n.events, d.index)
	case ok && d.index >= 0:
		d.due = due
		heap.Fix(&n.events, d.index)
	case ok:
		d.due = due
		heap.Push(&n.events, d)
	}
	if n.clock != nil && len(n.events) > 0 && n.events[0] == d {
		select {
		case n.kick <- struct{}{}:
		default:
		}
	}
}

// events is a heap of directions by due time, then by order of making.
type events []*direction

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].due < e[j].due || e[i].due == e[j].due && e[i].order < e[j].order
}
func (e events) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].index, e[j].index = i, j
}
func (e *events) Push(x any) {
	d := x.(*direction)
	d.index = len(*e)
	*e = append(*e, d)
}
func (e *events) Pop() any {
	d := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	d.index = -1
	return d
}

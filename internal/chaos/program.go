package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/internal/wire"
)

// Program is what the ranks run, alike on all: steps of moves, each the start, the end or the whole of an operation of one
// group, drawn from the seed.
type Program struct {
	Seed  uint64
	Ranks int // founders; at least 3
	// Sync: each operation is waited for at once, so that whatever a rank does is for the last one that it called.
	Sync bool
}

const (
	slotSize = 16 << 10 // small, so that many operations take several chunks
	halfSlot = slotSize / 2
)

// capacity is how many slots the world has.
func (p *Program) capacity() int { return 2 * p.Ranks }

// groupNames are the groups that live as long as the program, in the order in which they are made. W is the world, P runs
// pairs, E the steps of package ep. D is made and closed in some steps.
var groupNames = []string{"W", "A", "B", "C", "P", "E"}

// members lists the slots of a group.
func (p *Program) members(group string) []int {
	n := p.Ranks
	upTo := func(lo, hi int) (s []int) {
		for ; lo < hi; lo++ {
			s = append(s, lo)
		}
		return s
	}
	switch group {
	case "W":
		return upTo(0, p.capacity())
	case "A":
		return upTo(0, max(2, 3*n/4))
	case "B":
		return upTo(max(1, n/4), n)
	case "C":
		return []int{0, n - 1}
	case "D":
		return []int{0, 1, n - 1}
	}
	return upTo(0, n)
}

// op is one operation of the program.
type op struct {
	*Program
	Step, At int // its place
	Group    string
	Kind     string // of collectives.Kind, or pair, step, p2p, sub, close, stop
	DType    dtype.DType
	Reduce   dtype.ReduceOp
	N        int // elements: of the vector, or what the parts are sized by
	Root     int // of p2p: who sends
	To       int // of p2p: who receives
	Messages int // of p2p: so many of N bytes each, one after the other
	InPlace  bool
}

func (o *op) String() string {
	return fmt.Sprintf("step %d.%d %s of %s, %v x %d, in place %v", o.Step, o.At, o.Kind, o.Group, o.DType, o.N, o.InPlace)
}

const stopAt = 1000 // the place in a step of the operation that ends it

// place is the operation's place in the program, as one number, a history's Call.
func (o *op) place() uint64 { return uint64(o.Step)<<10 | uint64(o.At+1) }

// boundaryCall is that of the Boundary that a step begins with.
func boundaryCall(step int) uint64 { return uint64(step) << 10 }

// stepOf is the step of a call.
func stepOf(call uint64) int { return int(call >> 10) }

// code is the operation in a history.
func (o *op) code() history.Op {
	if o.Kind == "stop" {
		return history.AllReduce
	}
	return history.ParseOp(o.Kind)
}

// move is what a rank does next.
type move struct {
	do string // call, start, wait, dispatch, dispatched, combine, combined, p2p
	op *op
}

// step draws a step.
func (p *Program) step(step int) (moves []move) {
	r := rand.New(rand.NewPCG(p.Seed, uint64(step)))
	at := 0
	draw := func(group string) *op {
		o := &op{Program: p, Step: step, At: at, Group: group}
		at++
		o.DType = dtype.All()[r.IntN(len(dtype.All()))]
		o.InPlace = r.IntN(2) == 0
		size := o.DType.Size()
		switch r.IntN(8) {
		case 0:
			o.N = 3*slotSize/size + r.IntN(5000) // several chunks
		case 1:
			o.N = []int{slotSize/size - 1, slotSize / size, slotSize/size + 1, halfSlot / size}[r.IntN(4)]
		case 2:
			o.N = r.IntN(2) // or nothing
		default:
			o.N = 1 + r.IntN(600)
		}
		o.Kind = []string{"all_reduce", "all_reduce", "all_gather", "all_to_all", "broadcast", "barrier"}[r.IntN(6)]
		o.Reduce = []dtype.ReduceOp{dtype.Sum, dtype.Sum, dtype.Avg, dtype.Max}[r.IntN(4)]
		o.Root = r.IntN(len(p.members(group)))
		if group == "W" {
			o.Root = r.IntN(p.Ranks)
		}
		if o.Kind == "all_gather" || o.Kind == "all_to_all" {
			o.N = o.N/3 + 1
		}
		return o
	}
	message := func(group string) *op {
		n := min(len(p.members(group)), p.Ranks)
		o := &op{Program: p, Step: step, At: at, Group: group, Kind: "p2p", DType: dtype.U8, Root: r.IntN(n), Messages: 1 + r.IntN(4)}
		at++
		o.To = (o.Root + 1 + r.IntN(n-1)) % n
		switch r.IntN(8) {
		case 0:
			o.N = wire.MaxPayload + r.IntN(1000) // several frames
		case 1:
			o.N = r.IntN(2)
		default:
			o.N = 1 + r.IntN(2000)
		}
		return o
	}
	groups := []string{"W", "A", "B", "C"}
	var open []*op // started, in order
	for n := 6 + r.IntN(6); n > 0; n-- {
		g := groups[r.IntN(len(groups))]
		switch k := r.IntN(13); {
		case k < 4 && len(open) < 4:
			o := draw(g)
			open = append(open, o)
			moves = append(moves, move{do: "start", op: o})
		case k < 6 && len(open) > 0:
			i := r.IntN(len(open))
			moves = append(moves, move{do: "wait", op: open[i]})
			open = append(open[:i:i], open[i+1:]...)
		case k == 6:
			o := &op{Program: p, Step: step, At: at, Group: "P", Kind: "pair", DType: dtype.U8, N: 1 + r.IntN(900)}
			at++
			moves = append(moves, move{do: "dispatch", op: o})
			if r.IntN(2) == 0 {
				moves = append(moves, move{do: "call", op: draw(g)})
			}
			moves = append(moves, move{do: "dispatched", op: o}, move{do: "combine", op: o}, move{do: "combined", op: o})
		case k == 7 || k == 8:
			moves = append(moves, move{do: "p2p", op: message(g)})
		case k == 9:
			moves = append(moves, move{do: "call", op: &op{Program: p, Step: step, At: at, Group: "E", Kind: "step", DType: dtype.F32, N: 1 + r.IntN(epTokens)}})
			at++
		default:
			moves = append(moves, move{do: "call", op: draw(g)})
		}
	}
	if step%3 == 1 { // a group that lives for one step
		sub := &op{Program: p, Step: step, At: at, Group: "D", Kind: "sub"}
		at++
		moves = append(moves, move{do: "call", op: sub})
		for range 2 {
			moves = append(moves, move{do: "call", op: draw("D")})
		}
		moves = append(moves, move{do: "call", op: &op{Program: p, Step: step, At: at, Group: "D", Kind: "close"}})
		at++
	}
	for _, o := range open {
		moves = append(moves, move{do: "wait", op: o})
	}
	if p.Sync {
		moves = slices.DeleteFunc(moves, func(m move) bool { return m.do == "wait" })
		for i := range moves {
			if moves[i].do == "start" {
				moves[i].do = "call"
			}
		}
	}
	return moves
}

// count is how many elements rank from gives to rank to, or (all_gather) to all.
func (o *op) count(from, to int) int {
	if o.Kind == "all_to_all" {
		if o.InPlace {
			return o.N
		}
		return o.N*(1+(from*3+to*5+o.Step)%4)/4 + (from+to)%2
	}
	return o.N*(1+(from*5+o.Step)%4)/4 + from%2
}

// pairCount is the bytes of a half of a pair.
func (o *op) pairCount(from, to int, combine bool) int {
	if combine {
		from, to = to, from
	}
	return o.N * (1 + (from*3+to*5+o.Step)%4) / 4
}

// message is what the sender of a p2p gives, the ith time.
func (o *op) message(i int) []byte {
	p := *o
	p.At += 1000 * (i + 1)
	return p.input(o.Root, o.To, o.N)
}

// tag is the one of a p2p: several of a step have the same, so that their order shows. Where messages may come too late to
// be received, each has its own. With the next step it changes: what one who died had sent may still lie there.
func (o *op) tag(late bool) uint32 {
	if late {
		return uint32(o.Step<<8 | o.At)
	}
	return uint32(o.Step<<8 | o.At%2)
}

// call makes rank's buffers for the operation, in a group of size ranks. What is written has guards around it.
func (o *op) call(rank, size int) (c *collectives.Call, g guarded) {
	es := o.DType.Size()
	c = &collectives.Call{DType: o.DType, Root: o.Root}
	at := -1 // where the input lies in the output
	switch o.Kind {
	case "barrier":
		c.Kind = collectives.Barrier
	case "all_reduce":
		c.Kind, c.Reduce = collectives.AllReduce, o.Reduce
		c.In = o.input(rank, 0, o.N)
		c.Out = c.In
		if o.InPlace {
			at = 0
		} else {
			c.Out = dirty(len(c.In))
		}
	case "broadcast":
		c.Kind, at = collectives.Broadcast, 0
		c.Out = dirty(o.N * es)
		c.In = c.Out
		if rank == o.Root {
			copy(c.Out, o.input(rank, 0, o.N))
		}
	case "all_gather":
		c.Kind = collectives.AllGather
		c.OutParts = make([]int, size)
		total, own := 0, 0
		for r := range size {
			if r == rank {
				own = total
			}
			c.OutParts[r] = o.count(r, 0) * es
			total += c.OutParts[r]
		}
		c.Out = dirty(total)
		c.In = o.input(rank, 0, o.count(rank, 0))
		if o.InPlace {
			copy(c.Out[own:], c.In)
			at = own
		}
	case "all_to_all":
		c.Kind = collectives.AllToAll
		c.InParts, c.OutParts = make([]int, size), make([]int, size)
		total := 0
		for r := range size {
			c.InParts[r], c.OutParts[r] = o.count(rank, r)*es, o.count(r, rank)*es
			c.In = append(c.In, o.input(rank, r, o.count(rank, r))...)
			total += c.OutParts[r]
		}
		c.Out = c.In
		if o.InPlace {
			at = 0
		} else {
			c.Out = dirty(total)
		}
	}
	g = guard(c.Out)
	c.Out = g.inner()
	if at >= 0 {
		c.In = c.Out[at : at+len(c.In)]
	}
	return c, g
}

// dirty is memory that was used before.
func dirty(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = 0xa5
	}
	return b
}

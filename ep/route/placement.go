// Package route decides which rank computes which row of a mixture-of-experts layer. It is pure: the placement of
// experts, the set of active ranks and the token's expert ids go in, and the rows for every rank come out. Whatever it
// decides depends only on things that all ranks agree on (and on the asking rank), so that no two ranks differ.
package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/serry-project/serry/internal/slots"
)

// Ranks is a set of ranks of a group (not of slots of the world): those that are active. It has Has(rank), Add(rank),
// Del(rank), Len(), Empty(), Slots() []int, And, Or, Minus, and prints as "[0 2 3]".
type Ranks = slots.Set

// Limits of a placement. An expert id travels in 16 bits.
const (
	MaxExperts = 1 << 16
	MaxRanks   = slots.Max
)

// All returns the set of the ranks 0..n-1.
func All(n int) (s Ranks) {
	for i := range n {
		s.Add(i)
	}
	return s
}

// Placement says which ranks hold a copy of which expert. It must not be changed after it was given to someone.
type Placement struct {
	Experts  int     // number of logical experts
	Ranks    int     // number of ranks of the group, active or not
	Replicas [][]int // [Experts], each an ordered list of distinct ranks; the first is the primary
	// Spread: a copy at home is not preferred. More rows travel, and each holder of an expert computes an equal share of
	// them, also where the sources' loads differ.
	Spread bool
}

// Contiguous places every expert on replicas different ranks. The primary of expert e is rank e*ranks/experts, so that
// a rank's primaries are a contiguous block. The further copies go where fewest experts are resident, and among those
// where fewest of the same primary's experts are: a rank that dies leaves its load to all others in equal shares. No
// rank holds more than replicas/ranks of all experts, rounded up.
func Contiguous(experts, ranks, replicas int) (*Placement, error) {
	if experts < 1 || experts > MaxExperts || ranks < 1 || ranks > MaxRanks {
		return nil, fmt.Errorf("route: %d experts on %d ranks: want 1 to %d on 1 to %d", experts, ranks, MaxExperts, MaxRanks)
	}
	if replicas < 1 || replicas > ranks {
		return nil, fmt.Errorf("route: %d replicas on %d ranks: each needs a rank of its own", replicas, ranks)
	}
	p := &Placement{Experts: experts, Ranks: ranks, Replicas: make([][]int, experts)}
	load := make([]int, ranks)         // experts resident on a rank
	shared := make([]int, ranks*ranks) // [primary, other]: experts of primary that have a copy on other
	ordinal := make([][]int, 0, ranks) // [i] = the i-th expert of each primary's block
	inBlock, last := 0, -1
	for e := range experts {
		r := e * ranks / experts
		if r != last {
			inBlock, last = 0, r
		}
		if inBlock == len(ordinal) {
			ordinal = append(ordinal, nil)
		}
		ordinal[inBlock] = append(ordinal[inBlock], e)
		inBlock++
		p.Replicas[e] = append(make([]int, 0, replicas), r)
		load[r]++
	}
	limit := (replicas*experts + ranks - 1) / ranks
	for range replicas - 1 {
		for _, es := range ordinal {
			for _, e := range es {
				p.place(e, load, shared, limit)
			}
		}
	}
	return p, nil
}

// place puts one more copy of e on a rank that holds none.
func (p *Placement) place(e int, load, shared []int, limit int) {
	have := p.Replicas[e]
	home, best := have[0], -1
	for o := 1; o < p.Ranks; o++ {
		r := (home + o) % p.Ranks
		if slices.Contains(have, r) {
			continue
		}
		if best < 0 || load[r] < load[best] || load[r] == load[best] && shared[home*p.Ranks+r] < shared[home*p.Ranks+best] {
			best = r
		}
	}
	if load[best] >= limit {
		// Every rank without e is full, so one with e has room: move a copy of another expert there.
		for _, to := range have {
			if load[to] < limit && p.move(best, to, load, shared) {
				break
			}
		}
	}
	p.Replicas[e] = append(have, best)
	load[best]++
	shared[home*p.Ranks+best]++
}

// move takes one copy that is not a primary from a rank to another that has none of that expert.
func (p *Placement) move(from, to int, load, shared []int) bool {
	for _, l := range p.Replicas {
		if i := slices.Index(l, from); i > 0 && !slices.Contains(l, to) {
			l[i] = to
			load[from]--
			load[to]++
			shared[l[0]*p.Ranks+from]--
			shared[l[0]*p.Ranks+to]++
			return true
		}
	}
	return false
}

// FromPhysical makes a placement from a physical-to-logical map as EPLB gives it: slot i lies on rank
// i/(len(slots)/ranks) and holds expert slots[i]; -1 is an empty slot. Copies of an expert on one rank count once. The
// result is validated.
func FromPhysical(slots []int, experts, ranks int) (*Placement, error) {
	if ranks < 1 || len(slots) == 0 || len(slots)%ranks != 0 {
		return nil, fmt.Errorf("route: %d physical slots on %d ranks: want a multiple", len(slots), ranks)
	}
	if experts < 1 || experts > MaxExperts {
		return nil, fmt.Errorf("route: %d experts: want 1 to %d", experts, MaxExperts)
	}
	per := len(slots) / ranks
	p := &Placement{Experts: experts, Ranks: ranks, Replicas: make([][]int, experts)}
	for i, e := range slots {
		if e == -1 {
			continue
		}
		if e < 0 || e >= experts {
			return nil, fmt.Errorf("route: physical slot %d holds expert %d of %d", i, e, experts)
		}
		if r := i / per; !slices.Contains(p.Replicas[e], r) {
			p.Replicas[e] = append(p.Replicas[e], r)
		}
	}
	return p, p.Validate()
}

// Validate returns every complaint about p, joined, or nil.
func (p *Placement) Validate() error {
	if p == nil {
		return errors.New("route: no placement")
	}
	var errs []error
	complain := func(format string, a ...any) { errs = append(errs, fmt.Errorf("route: "+format, a...)) }
	if p.Experts < 1 || p.Experts > MaxExperts {
		complain("%d experts: want 1 to %d", p.Experts, MaxExperts)
	}
	if p.Ranks < 1 || p.Ranks > MaxRanks {
		complain("%d ranks: want 1 to %d", p.Ranks, MaxRanks)
	}
	if len(p.Replicas) != p.Experts {
		complain("replicas of %d experts, want %d", len(p.Replicas), p.Experts)
	}
	for e, l := range p.Replicas {
		if len(l) == 0 {
			complain("expert %d is on no rank", e)
		}
		for i, r := range l {
			if r < 0 || r >= p.Ranks {
				complain("expert %d is on rank %d of %d", e, r, p.Ranks)
			} else if slices.Contains(l[:i], r) {
				complain("expert %d is on rank %d twice", e, r)
			}
		}
	}
	return errors.Join(errs...)
}

// Lost lists the experts that have no copy on an active rank, in ascending order; nil if all are covered.
func (p *Placement) Lost(active Ranks) (lost []int) {
	for e, l := range p.Replicas {
		if !slices.ContainsFunc(l, func(r int) bool { return active.Has(r) }) {
			lost = append(lost, e)
		}
	}
	return lost
}

// Owner returns the rank that computes expert e for the tokens of rank src, or -1 if no active rank holds e: src itself
// if it is active and holds e (nothing then leaves it; not with Spread); else the active holders, in the order of Replicas, take turns
// over src+e. All tokens of src for e go to one rank (larger batches there, and a row is sent once for all experts that
// share a rank), and the loss of a rank moves no row of an expert that it does not hold.
func (p *Placement) Owner(e int, active Ranks, src int) int {
	l := p.Replicas[e]
	n := 0
	for _, r := range l {
		if active.Has(r) {
			if r == src && !p.Spread {
				return r
			}
			n++
		}
	}
	if n == 0 {
		return -1
	}
	i := (src + e) % n
	for _, r := range l {
		if active.Has(r) {
			if i == 0 {
				return r
			}
			i--
		}
	}
	return -1 // not reached
}

// Resident lists the experts that have a copy on a rank, in ascending order.
func (p *Placement) Resident(rank int) (es []int) {
	for e, l := range p.Replicas {
		if slices.Contains(l, rank) {
			es = append(es, e)
		}
	}
	return es
}

// Digest is a 64-bit FNV-1a hash of p, the same on every machine: two placements with the same digest route alike.
func (p *Placement) Digest() uint64 {
	h := uint64(14695981039346656037)
	var b [4]byte
	put := func(v int) {
		binary.LittleEndian.PutUint32(b[:], uint32(v))
		for _, c := range b {
			h = (h ^ uint64(c)) * 1099511628211
		}
	}
	put(p.Experts)
	put(p.Ranks)
	if p.Spread {
		put(1)
	}
	for _, l := range p.Replicas {
		put(len(l))
		for _, r := range l {
			put(r)
		}
	}
	return h
}

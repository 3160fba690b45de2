// Package serve answers prompts with the model of examples/moe, expert-parallel over the ranks of a world: each rank runs
// attention for its own requests and holds its share of the experts; every expert has a replica on another rank. When a
// rank dies, the survivors go on with the step they are in, take over its requests and resume them from the bytes that
// were already agreed. A replacement enters at the next step.
package serve

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// Request is one prompt and what has been generated for it so far. All ranks hold all requests, equal.
type Request struct {
	Text  []byte // generated and agreed
	Done  bool
	Owner int // slot; -1: nobody yet
}

// state is what all ranks agree on between two steps. Its methods are pure: they make the same of the same on every rank.
type state struct {
	step     uint64
	active   []int // slots, ascending
	requests []Request
}

func newState(n int, active []int) *state {
	s := &state{active: active, requests: make([]Request, n)}
	for i := range s.requests {
		s.requests[i].Owner = -1
	}
	return s
}

// assign gives every unfinished request a living owner: first those without one, to who has the fewest (the lowest slot on
// a tie), then from who has two more than another to that one. It returns the requests whose owner was gone.
func (s *state) assign() (taken []int) {
	load := map[int]int{}
	for _, a := range s.active {
		load[a] = 0
	}
	for i := range s.requests {
		r := &s.requests[i]
		if r.Done {
			continue
		}
		if _, ok := load[r.Owner]; ok {
			load[r.Owner]++
		} else if r.Owner >= 0 {
			taken = append(taken, i)
			r.Owner = -1
		}
	}
	least := func() int {
		best := s.active[0]
		for _, a := range s.active {
			if load[a] < load[best] {
				best = a
			}
		}
		return best
	}
	for i := range s.requests {
		if r := &s.requests[i]; !r.Done && r.Owner < 0 {
			r.Owner = least()
			load[r.Owner]++
		}
	}
	for i := len(s.requests) - 1; i >= 0; i-- {
		r := &s.requests[i]
		if to := least(); !r.Done && load[r.Owner] >= load[to]+2 {
			load[r.Owner]--
			load[to]++
			r.Owner = to
		}
	}
	return taken
}

// finished says that nothing is left to do.
func (s *state) finished() bool {
	for i := range s.requests {
		if !s.requests[i].Done {
			return false
		}
	}
	return true
}

// apply puts one agreed byte at the end of a request. max is how many it gets.
func (s *state) apply(req int, token byte, max int) error {
	if req < 0 || req >= len(s.requests) || s.requests[req].Done {
		return fmt.Errorf("serve: a rank gives a byte for request %d, which is not open", req)
	}
	r := &s.requests[req]
	if token == 0 {
		r.Done = true
		return nil
	}
	r.Text = append(r.Text, token)
	r.Done = len(r.Text) >= max
	return nil
}

// encode is what a newcomer gets:
//
//	step (8), number of active slots (4), slots (4 each), number of requests (4),
//	then each {owner (4), done (1), length (4), text}
func (s *state) encode() []byte {
	b := binary.LittleEndian.AppendUint64(nil, s.step)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(s.active)))
	for _, a := range s.active {
		b = binary.LittleEndian.AppendUint32(b, uint32(a))
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(s.requests)))
	for _, r := range s.requests {
		b = binary.LittleEndian.AppendUint32(b, uint32(int32(r.Owner)))
		done := byte(0)
		if r.Done {
			done = 1
		}
		b = binary.LittleEndian.AppendUint32(append(b, done), uint32(len(r.Text)))
		b = append(b, r.Text...)
	}
	return b
}

func decodeState(b []byte) (*state, error) {
	bad := false
	take := func(n uint32) []byte {
		if uint64(n) > uint64(len(b)) {
			bad = true
			return make([]byte, min(n, 8))
		}
		x := b[:n]
		b = b[n:]
		return x
	}
	u32 := func() uint32 { return binary.LittleEndian.Uint32(take(4)) }
	s := &state{step: binary.LittleEndian.Uint64(take(8))}
	for n := u32(); n > 0 && !bad; n-- {
		s.active = append(s.active, int(u32()))
	}
	for n := u32(); n > 0 && !bad; n-- {
		r := Request{Owner: int(int32(u32()))}
		r.Done = take(1)[0] == 1
		r.Text = slices.Clone(take(u32()))
		s.requests = append(s.requests, r)
	}
	if bad || len(b) > 0 || len(s.active) == 0 {
		return nil, fmt.Errorf("serve: the state that the members attached cannot be read")
	}
	return s, nil
}

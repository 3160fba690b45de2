package serve

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// request is one prompt and what has been generated for it so far. All ranks hold all requests, equal.
type request struct {
	Answer
	Done  bool
	Owner int // slot, nobody or gone
}

// nobody owns a request yet.
const nobody = -1

// gone is the owner of what belonged to an earlier process of a slot.
func gone(slot int) int { return -2 - slot }

// state is what all ranks agree on between two steps. Its methods are pure: they make the same of the same on every rank.
type state struct {
	step     uint64
	ending   bool  // some rank was told to end
	active   []int // slots, ascending
	requests []request
}

func newState(n int, active []int) *state {
	s := &state{active: active, requests: make([]request, n)}
	for i := range s.requests {
		s.requests[i].Owner = nobody
	}
	return s
}

// enter is the set after a Boundary at which the processes of fresh came in: what belonged to their slots belonged to
// others before them.
func (s *state) enter(active, fresh []int) {
	s.active = active
	for i := range s.requests {
		if r := &s.requests[i]; slices.Contains(fresh, r.Owner) {
			r.Owner = gone(r.Owner)
		}
	}
}

// assign gives every unfinished request a living owner: first those without one, to who has the fewest (the lowest slot on
// a tie), then from who has two more than another to that one. It returns the requests whose owner was gone, by its slot,
// and those that me has got.
func (s *state) assign(me int) (taken map[int][]int, got []int) {
	taken = map[int][]int{}
	load, was := map[int]int{}, make([]int, len(s.requests))
	for _, a := range s.active {
		load[a] = 0
	}
	for i := range s.requests {
		r := &s.requests[i]
		if was[i] = r.Owner; r.Done {
			continue
		}
		if _, lives := load[r.Owner]; lives {
			load[r.Owner]++
		} else if r.Owner != nobody {
			slot := r.Owner
			if slot < nobody {
				slot = gone(slot) // its own inverse
			}
			taken[slot] = append(taken[slot], i)
			r.Owner = nobody
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
		if r := &s.requests[i]; !r.Done && r.Owner == nobody {
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
	for i := range s.requests {
		if r := &s.requests[i]; r.Owner == me && was[i] != me {
			got = append(got, i)
		}
	}
	return taken, got
}

// answered says that every request is.
func (s *state) answered() bool {
	return !slices.ContainsFunc(s.requests, func(r request) bool { return !r.Done })
}

// token is one agreed byte of a request.
type token struct {
	request int
	token   byte
	hash    uint64
	lost    float64
}

// apply puts an agreed byte at the end of its request, which gets most of them.
func (s *state) apply(t token, most int) error {
	if t.request < 0 || t.request >= len(s.requests) || s.requests[t.request].Done {
		return fmt.Errorf("serve: a rank gives a byte for request %d, which is not open", t.request)
	}
	r := &s.requests[t.request]
	r.Hashes = append(r.Hashes, t.hash)
	r.Lost += t.lost
	if t.token == 0 {
		r.Done = true
		return nil
	}
	r.Text = append(r.Text, t.token)
	r.Done = len(r.Text) >= most
	return nil
}

// encode is what a newcomer gets:
//
//	step (8), ending (1), number of active slots (4), slots (4 each), number of requests (4), then each
//	{owner (4), done (1), lost (8), length of text (4), number of hashes (4), text, hashes (8 each)}
func (s *state) encode(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, s.step)
	b = append(b, bit(s.ending))
	b = le.AppendUint32(b, uint32(len(s.active)))
	for _, a := range s.active {
		b = le.AppendUint32(b, uint32(a))
	}
	b = le.AppendUint32(b, uint32(len(s.requests)))
	for _, r := range s.requests {
		b = le.AppendUint32(b, uint32(int32(r.Owner)))
		b = le.AppendUint64(append(b, bit(r.Done)), math.Float64bits(r.Lost))
		b = le.AppendUint32(b, uint32(len(r.Text)))
		b = le.AppendUint32(b, uint32(len(r.Hashes)))
		b = append(b, r.Text...)
		for _, h := range r.Hashes {
			b = le.AppendUint64(b, h)
		}
	}
	return b
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// decoder takes numbers off the front of its bytes; what is missing reads as zero, and bad is set.
type decoder struct {
	b   []byte
	bad bool
}

var zeros [8]byte

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return zeros[:min(n, uint64(len(zeros)))]
	}
	x := d.b[:n]
	d.b = d.b[n:]
	return x
}

func (d *decoder) bit() bool   { return d.take(1)[0] == 1 }
func (d *decoder) u32() uint32 { return binary.LittleEndian.Uint32(d.take(4)) }
func (d *decoder) u64() uint64 { return binary.LittleEndian.Uint64(d.take(8)) }

func decodeState(b []byte) (*state, error) {
	d := &decoder{b: b}
	s := &state{step: d.u64(), ending: d.bit()}
	for n := d.u32(); n > 0 && !d.bad; n-- {
		s.active = append(s.active, int(d.u32()))
	}
	for n := d.u32(); n > 0 && !d.bad; n-- {
		r := request{Owner: int(int32(d.u32())), Done: d.bit()}
		r.Lost = math.Float64frombits(d.u64())
		text, hashes := d.u32(), d.u32()
		r.Text = append(r.Text, d.take(uint64(text))...)
		for ; hashes > 0 && !d.bad; hashes-- {
			r.Hashes = append(r.Hashes, d.u64())
		}
		s.requests = append(s.requests, r)
	}
	if d.bad || len(d.b) > 0 || len(s.active) == 0 {
		return nil, fmt.Errorf("serve: the state that the members attached cannot be read")
	}
	return s, nil
}

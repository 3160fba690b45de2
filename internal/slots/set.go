// Package slots is the set of slots of a world, as a value.
package slots

import (
	"fmt"
	"math/bits"
)

// Max is the largest capacity of a world.
const Max = 1024

// Set is a set of slots, a value: it can be compared, copied and used as a map key.
type Set [Max / 64]uint64

// Of returns the set of the given slots.
func Of(slots ...int) (s Set) {
	for _, i := range slots {
		s.Add(i)
	}
	return s
}

// Add puts slot i in.
func (s *Set) Add(i int) { s[i>>6] |= 1 << (i & 63) }

// Del takes slot i out.
func (s *Set) Del(i int) { s[i>>6] &^= 1 << (i & 63) }

// Has says whether slot i is in; a slot out of range is not.
func (s *Set) Has(i int) bool { return uint(i) < Max && s[i>>6]&(1<<(i&63)) != 0 }

// Len counts the slots.
func (s *Set) Len() (n int) {
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// Empty says that no slot is in.
func (s *Set) Empty() bool { return *s == Set{} }

// Next returns the lowest slot >= i, or -1.
func (s *Set) Next(i int) int {
	for w := i >> 6; w < len(s); w++ {
		x := s[w]
		if w == i>>6 {
			x &= ^uint64(0) << (i & 63)
		}
		if x != 0 {
			return w<<6 + bits.TrailingZeros64(x)
		}
	}
	return -1
}

// And returns the slots in both.
func (s Set) And(o Set) Set {
	for i := range s {
		s[i] &= o[i]
	}
	return s
}

// Or returns the slots in either.
func (s Set) Or(o Set) Set {
	for i := range s {
		s[i] |= o[i]
	}
	return s
}

// Minus returns the slots in s but not in o.
func (s Set) Minus(o Set) Set {
	for i := range s {
		s[i] &^= o[i]
	}
	return s
}

// Slots lists them in order.
func (s Set) Slots() []int {
	r := make([]int, 0, s.Len())
	for i := s.Next(0); i >= 0; i = s.Next(i + 1) {
		r = append(r, i)
	}
	return r
}

// String is "[0 2 3]".
func (s Set) String() string { return fmt.Sprint(s.Slots()) }

// Digest is a 64-bit FNV-1a hash of the set, the same on every machine.
func (s *Set) Digest() uint64 {
	h := uint64(14695981039346656037)
	for _, w := range s {
		for range 8 {
			h = (h ^ w&255) * 1099511628211
			w >>= 8
		}
	}
	return h
}

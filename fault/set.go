package fault

import "github.com/serry-project/serry/internal/slots"

// MaxSlots is the largest Capacity of a world.
const MaxSlots = slots.Max

// Set is a set of slots, a value.
type Set = slots.Set

// SetOf returns the set of the given slots.
func SetOf(s ...int) Set { return slots.Of(s...) }

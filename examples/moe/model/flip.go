package model

import (
	"fmt"
	"math"
)

// FlipBit changes the lowest bit of the exponent of one weight of a resident
// expert: the kind of fault that a wrong replica is, for tests that must notice
// it.
func (m *Model) FlipBit(layer, e int) error {
	if !m.HasExpert(layer, e) {
		return fmt.Errorf("layer %d, expert %d: %w", layer, e, ErrNotResident)
	}
	w := &m.layers[layer].experts[e].Load().up.w[0][0]
	*w = math.Float32frombits(math.Float32bits(*w) ^ 1<<23)
	return nil
}

//go:build !faultpoint

package faultpoint

// Enabled says whether points can be armed in this build.
const Enabled = false

// Hit does nothing in this build.
func Hit(name string) {}

// Arm panics in this build: a test that needs it has the build tag.
func Arm(name string, nth int, action func()) {
	panic("faultpoint: built without -tags faultpoint: " + name + " cannot be armed")
}

// Disarm does nothing in this build.
func Disarm() {}

// Hits is 0 in this build.
func Hits(name string) int { return 0 }

//go:build !long

package proof

const long = false

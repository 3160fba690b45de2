//go:build !long

package mutate

const long = false

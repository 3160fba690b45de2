//go:build long

package mutate

const long = true

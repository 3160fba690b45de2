//go:build long

package collectives

const long = true

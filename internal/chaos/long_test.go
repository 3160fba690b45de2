//go:build long

package chaos

const long = true

//go:build !long

package chaos

const long = false

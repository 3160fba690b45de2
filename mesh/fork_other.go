//go:build !linux

package mesh

func dontFork([]byte) {}

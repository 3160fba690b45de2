//go:build (amd64 || arm64) && !noasm

package host

//go:noescape
func spin(n int)

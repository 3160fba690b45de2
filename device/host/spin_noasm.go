//go:build (!amd64 && !arm64) || noasm

package host

// spin is the loop that the assembly equals, without its PAUSE.
func spin(n int) {
	for ; n > 0; n-- {
	}
}

//go:build unix

package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// terminalSize is that of a terminal; ok is false for what is none.
func terminalSize(f *os.File) (width, height int, ok bool) {
	ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	if ws.Col == 0 || ws.Row == 0 { // one that does not know
		return 80, 24, true
	}
	return int(ws.Col), int(ws.Row), true
}

package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A terminal gets the picture, unless lines are asked for; a file gets lines.
func TestTerminal(t *testing.T) {
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals: ", err)
	}
	defer pty.Close()
	require.NoError(t, unix.IoctlSetPointerInt(int(pty.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(pty.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals: ", err)
	}
	defer tty.Close()
	require.True(t, isTerminal(tty))
	require.IsType(t, &log{}, newScreen(tty, true))
	p, ok := newScreen(tty, false).(*picture)
	require.True(t, ok)
	w, h := p.size()
	require.Equal(t, [2]int{80, 24}, [2]int{w, h}, "it does not know its size")
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 123, Row: 45}))
	w, h = p.size()
	require.Equal(t, [2]int{123, 45}, [2]int{w, h})

	f, err := os.Create(t.TempDir() + "/file")
	require.NoError(t, err)
	defer f.Close()
	require.False(t, isTerminal(f))
	require.IsType(t, &log{}, newScreen(f, false))
}

//go:build faultpoint

package faultpoint

import (
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	if os.Getenv("SERRY_FAULTPOINT_TEST_DIES") != "" {
		Arm(PullMid, 2, nil)
		Hit(PullMid)
		Hit(PullMid)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestArm(t *testing.T) {
	defer Disarm()
	var ran []int
	Hit(NewGroup)
	Arm(NewGroup, 2, func() { ran = append(ran, Hits(NewGroup)) })
	for range 4 {
		Hit(NewGroup)
		Hit(SealAfter)
	}
	require.Equal(t, []int{3}, ran, "once, at the second hit from then on")
	Arm(NewGroup, 1, func() { t.Error("disarmed") })
	Disarm()
	Hit(NewGroup)
	require.Equal(t, 1, Hits(NewGroup))
	require.Panics(t, func() { Hit("nowhere") })
	require.Panics(t, func() { Arm("nowhere", 1, nil) })
	require.Panics(t, func() { Arm(NewGroup, 0, nil) })
	Hit(NewGroup) // a panic leaves nothing locked
}

func TestNilActionKills(t *testing.T) {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "SERRY_FAULTPOINT_TEST_DIES=1")
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Run(), &exit)
	require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal())
}

// Package harness runs ranks as processes of their own, so that they can be killed, stopped and replaced like real ones,
// and makes hosts for them: network namespaces that share nothing but a switch. Spawn, Network and what they return are for
// programs; Main, Start and Hosts for tests, whose binary starts itself again, once for each rank.
package harness

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

const (
	programEnv = "SERRY_HARNESS_PROGRAM"
	argsEnv    = "SERRY_HARNESS_ARGS"
)

// TB is what is needed of a testing.TB.
type TB interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
	Skipf(format string, args ...any)
	Cleanup(f func())
}

// Program is what a process of a test runs. Lines that it prints to out reach the test as Proc.Lines.
type Program func(args []string, out io.Writer) error

// Main runs the program that this process was started for, or the tests (m is a *testing.M). Call it from TestMain.
func Main(m interface{ Run() int }, programs map[string]Program) {
	name := os.Getenv(programEnv)
	if name == "" {
		os.Exit(m.Run())
	}
	p, ok := programs[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "harness: no program %q\n", name)
		os.Exit(2)
	}
	if err := p(strings.Split(os.Getenv(argsEnv), "\x1f"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Option changes the command line of a process: another binary, say, or where it runs.
type Option func(*exec.Cmd)

// Start runs a program as a process. It is killed when the test ends.
func Start(t TB, name, program string, args []string, opts ...Option) *Proc {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), programEnv+"="+program, argsEnv+"="+strings.Join(args, "\x1f"))
	p, err := Spawn(name, cmd, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Signal(syscall.SIGKILL)
		<-p.Done()
		// A process that is killed has no exit status that says it.
		if p.Crashed() {
			t.Errorf("%s:\n%s", p.Name, p.Stderr())
		}
	})
	return p
}

// Hosts makes the hosts of a network that lasts as long as the test. Without the rights the test is skipped.
func Hosts(t TB, n int) []*Host {
	t.Helper()
	net, err := NewNetwork(n)
	if err != nil {
		t.Skipf("%v", err)
	}
	t.Cleanup(net.Close)
	return net.Hosts
}

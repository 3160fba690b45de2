package harness

import (
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	Main(m, map[string]Program{"echo": echo, "says": says})
}

// echo answers each byte of each connection to the address, and prints it.
func echo(args []string, out io.Writer) error {
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "at", l.Addr())
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() { _, _ = io.Copy(io.MultiWriter(c, out), c) }()
	}
}

// says dials, sends each line of its input and prints what comes back.
func says(args []string, out io.Writer) error {
	c, err := net.Dial("tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "dialled")
	go func() { _, _ = io.Copy(out, c) }()
	_, err = io.Copy(c, os.Stdin)
	return err
}

// TestHostsReachEachOther sends through the switch, and through cuts of one way and of both.
func TestHostsReachEachOther(t *testing.T) {
	hosts := Hosts(t, 3)
	at := net.JoinHostPort(hosts[1].IP, "4711")
	server := Start(t, "server", "echo", []string{at}, hosts[1].In())
	_, err := server.Line("at", 10*time.Second)
	require.NoError(t, err)
	client := Start(t, "client", "says", []string{at}, hosts[2].In())
	_, err = client.Line("dialled", 10*time.Second)
	require.NoError(t, err)
	const wait = 20 * time.Second
	passes := func(text string) {
		t.Helper()
		require.NoError(t, client.Tell("%s", text))
		for _, p := range []*Proc{server, client} {
			_, err := p.Line(text, wait)
			require.NoError(t, err)
		}
	}
	passes("both ways")
	for name, cut := range map[string]func(down bool) error{
		"the way there": func(down bool) error { return hosts[2].CutTo(hosts[1], down) },
		"the way back":  func(down bool) error { return hosts[1].CutTo(hosts[2], down) },
		"the server":    hosts[1].Cut,
		"the client":    hosts[2].Cut,
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, cut(true))
			require.NoError(t, client.Tell("over %s", name))
			_, err := client.Line("over "+name, 50*time.Millisecond)
			require.Error(t, err)
			require.NoError(t, cut(false))
			_, err = client.Line("over "+name, wait)
			require.NoError(t, err)
		})
	}
}

// TestHostIsRenewed: what comes in the place of a host has its address.
func TestHostIsRenewed(t *testing.T) {
	n, err := NewNetwork(2)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(n.Close)
	at := net.JoinHostPort(n.Hosts[0].IP, "4711")
	for range 3 {
		server := Start(t, "server", "echo", []string{at}, n.Hosts[0].In())
		_, err := server.Line("at", 10*time.Second)
		require.NoError(t, err)
		client := Start(t, "client", "says", []string{at}, n.Hosts[1].In())
		_, err = client.Line("dialled", 10*time.Second)
		require.NoError(t, err)
		server.Signal(syscall.SIGKILL)
		<-server.Done()
		require.NoError(t, n.Renew(0))
	}
}

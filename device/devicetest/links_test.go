//go:build unix

package devicetest_test

import (
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/devicetest"
	"github.com/serry-project/serry/device/faulty"
	"github.com/serry-project/serry/device/shm"
	"github.com/serry-project/serry/device/stream"
	"github.com/serry-project/serry/device/tcp"
)

// pair is two links of package stream and what mesh does for them: connect, connect again, give up.
type pair struct {
	t    *testing.T
	a, b *stream.Link
	dial func(t *testing.T) (a, b int)
	gone bool
}

func (p *pair) connect() {
	hasA, genA := p.a.Reset()
	hasB, genB := p.b.Reset()
	sockA, sockB := p.dial(p.t)
	if err := p.a.Attach(sockA, hasB, genA); err != nil {
		p.t.Errorf("Attach: %v", err)
	}
	if err := p.b.Attach(sockB, hasA, genB); err != nil {
		p.t.Errorf("Attach: %v", err)
	}
}

// cut breaks the connection as the network does: each end finds out when it polls.
func (p *pair) cut() {
	p.a.WithFd(func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_RDWR) })
}

func (p *pair) step(nap func()) {
	if !p.gone && p.a.Down() != nil && p.b.Down() != nil {
		if _, err := p.a.Poll(nil); err != nil { // closed
			return
		}
		if _, err := p.b.Poll(nil); err != nil {
			return
		}
		p.connect()
	}
	nap()
}

// leave is the end of A's process, and what mesh says to B's link then.
func (p *pair) leave() {
	p.gone = true
	p.a.Close()
	p.b.Fail(fmt.Errorf("%w: rank 0 has ended", device.ErrLost))
}

func run(t *testing.T, caps device.Caps, open func(peer string) *stream.Link, dial func(t *testing.T) (a, b int), script *faulty.Script) {
	devicetest.Run(t, func(t *testing.T) devicetest.Pair {
		p := &pair{t: t, a: open("rank 1"), b: open("rank 0"), dial: dial}
		p.connect()
		nap := devicetest.Nap()
		d := devicetest.Pair{
			A: p.a, B: p.b, NameA: "rank 0", NameB: "rank 1", Caps: caps,
			Step: func() { p.step(nap) }, Cut: p.cut, Gone: p.leave,
		}
		if script != nil {
			d.A = script.Wrap(p.a, faulty.Options{Peer: "rank 1"})
			d.B = script.Wrap(p.b, faulty.Options{Peer: "rank 0"})
		}
		return d
	})
}

func openTCP(peer string) *stream.Link { return tcp.New(tcp.Options{Peer: peer}) }
func openShm(peer string) *stream.Link { return shm.New(shm.Options{Peer: peer}) }

func TestTCP(t *testing.T) {
	caps := device.Caps{Name: "tcp"}
	run(t, caps, openTCP, dialTCP, nil)
	t.Run("NoSum", func(t *testing.T) {
		run(t, caps, func(peer string) *stream.Link { return tcp.New(tcp.Options{Peer: peer, NoSum: true}) }, dialTCP, nil)
	})
	t.Run("Delayed", func(t *testing.T) {
		run(t, caps, openTCP, dialTCP, faulty.MustParse("(delay 200us (every 5)) (delay 200us recv (every 7))"))
	})
}

func TestShm(t *testing.T) {
	caps := device.Caps{Name: "shm", SharesMemory: true}
	run(t, caps, openShm, dialUnix, nil)
}

// dialTCP returns both ends of a connection over loopback, as descriptors of ours.
func dialTCP(t *testing.T) (a, b int) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialled := make(chan net.Conn, 1)
	go func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Errorf("dial: %v", err)
		}
		dialled <- c
	}()
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	conn := <-dialled
	if conn == nil {
		t.FailNow()
	}
	return take(t, accepted), take(t, conn)
}

// take turns a connection of package net into a descriptor of our own.
func take(t *testing.T, c net.Conn) int {
	defer c.Close()
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	tcp.Tune(fd)
	return fd
}

func dialUnix(t *testing.T) (a, b int) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fds[0], fds[1]
}

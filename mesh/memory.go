package mesh

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device/host"
)

// The memory message, on a unix socket:
//
//	size of the sender's segment (8), index of the death word that the receiver shall watch (4), flags (1)
//	with the descriptors: segment, pidfd (flag 1), shared words (flag 2)
const (
	withPidfd = 1
	withWords = 2
)

func closeFd(fd int) { _ = unix.Close(fd) }

func closeFds(fds []int) {
	for _, fd := range fds {
		closeFd(fd)
	}
}

// readHead reads a message's head, and the descriptors that come with it if they are expected.
func (t *talk) readHead(h []byte, withFds bool) (int, error) {
	c, ok := t.c.(*net.UnixConn)
	if !withFds || !ok {
		return io.ReadFull(t.c, h)
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	for n < len(h) {
		var k int
		var fds []int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			k, fds, rerr = host.RecvFds(int(fd), h[n:])
			return !errors.Is(rerr, unix.EAGAIN)
		})
		t.fds = append(t.fds, fds...)
		if err == nil {
			err = rerr
		}
		if err != nil {
			return n, err
		}
		n += k
	}
	return n, nil
}

func (t *talk) sendFds(kind uint8, body []byte, fds ...int) error {
	rc, err := t.c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	b := message(kind, body)
	var n int
	var serr error
	err = rc.Write(func(fd uintptr) bool {
		n, serr = host.SendFds(int(fd), b, fds...)
		return !errors.Is(serr, unix.EAGAIN)
	})
	if err == nil {
		err = serr
	}
	if err == nil && n < len(b) {
		_, err = t.c.Write(b[n:])
	}
	return t.sent(err)
}

// sameUser checks whose process is at the other end of a unix socket.
func sameUser(c net.Conn) (pid int, err error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return 0, nil
	}
	rc, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var uid int
	cerr := rc.Control(func(fd uintptr) { pid, uid, err = host.PeerCred(int(fd)) })
	if cerr != nil {
		return 0, cerr
	}
	if err == nil && uid != os.Geteuid() {
		err = noMemory("it runs as user %d, this process as %d", uid, os.Geteuid())
	}
	return pid, err
}

// swapMemory gives the other side our segment and maps its own. given is the index of our death word that it watches.
func (m *Mesh) swapMemory(t *talk, first bool) (f *foreign, given uint32, err error) {
	given = m.seg.watcher()
	defer func() {
		if err != nil {
			m.seg.release(given)
			f.close()
			f, given = nil, noWatcher
		}
	}()
	gave := false
	if first {
		if gave, err = m.giveMemory(t, given); err != nil {
			return nil, given, err
		}
	}
	if f, err = m.takeMemory(t); err != nil {
		return nil, given, err
	}
	if !first {
		if gave, err = m.giveMemory(t, given); err != nil {
			return f, given, err
		}
	}
	f.hasWords = f.hasWords || gave
	return f, given, nil
}

func (m *Mesh) giveMemory(t *talk, given uint32) (words bool, err error) {
	var e enc
	e.u64(m.seg.size)
	e.u32(given)
	flags := uint8(0)
	fds := []int{m.seg.FD()}
	if m.pidfd >= 0 {
		flags |= withPidfd
		fds = append(fds, m.pidfd)
	}
	if w := m.words.Load(); w != nil {
		flags |= withWords
		fds = append(fds, w.FD())
	}
	e.u8(flags)
	return flags&withWords != 0, t.sendFds(msgMemory, e, fds...)
}

func (m *Mesh) takeMemory(t *talk) (*foreign, error) {
	b, err := t.receive(msgMemory)
	fds := t.fds
	t.fds = nil
	if err != nil {
		closeFds(fds)
		return nil, err
	}
	d := dec{b: b}
	size, watch, flags := d.u64(), d.u32(), d.u8()
	want := 1
	if flags&withPidfd != 0 {
		want++
	}
	if flags&withWords != 0 {
		want++
	}
	if d.bad || len(fds) != want {
		closeFds(fds)
		return nil, t.refuse(noMemory("memory message of %d bytes with %d descriptors, want %d", len(b), len(fds), want))
	}
	pidfd, words := -1, -1
	rest := fds[1:]
	if flags&withPidfd != 0 {
		pidfd, rest = rest[0], rest[1:]
	} else if pid, err := sameUser(t.c); err == nil && pid > 0 {
		// Its kernel has no pidfds to pass, or forbids them: then the number, right after we talked to it, must do.
		if fd, err := host.PidfdOpen(pid); err == nil {
			pidfd = fd
		}
	}
	if flags&withWords != 0 {
		words = rest[0]
	}
	f, err := openForeign(t.addr, size, watch, fds[0], pidfd)
	if err != nil {
		if words >= 0 {
			closeFd(words)
		}
		return nil, t.refuse(noMemory("%s", err))
	}
	if words >= 0 {
		f.hasWords = true
		m.takeWords(words, t.addr.Name)
	}
	return f, nil
}

// descriptor takes the socket out of Go's poller: what comes back is ours.
func descriptor(c net.Conn) (int, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("mesh: %T has no descriptor", c)
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	cerr := rc.Control(func(n uintptr) { fd, err = unix.FcntlInt(n, unix.F_DUPFD_CLOEXEC, 3) })
	c.Close()
	if cerr != nil {
		err = cerr
	}
	if err != nil {
		return -1, err
	}
	return fd, nil
}

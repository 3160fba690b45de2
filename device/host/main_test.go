//go:build linux

package host

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

const helperEnv = "SERRY_HOST_TEST_HELPER"

// helpers are the programs that a test runs as processes of their own. Each
// gets a connected unix socket.
var helpers = map[string]func(sock int) error{}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		if err := helpers[name](3); err != nil {
			fmt.Fprintf(os.Stderr, "helper %s: %v\n", name, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

type child struct {
	cmd  *exec.Cmd
	sock int
	done chan struct{}
	err  error
}

// start runs a helper; extra is appended to its environment.
func start(t testing.TB, helper string, extra ...string) *child {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	theirs := os.NewFile(uintptr(pair[1]), "helper")
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), helperEnv+"="+helper, "GORACE=atexit_sleep_ms=0"), extra...)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	require.NoError(t, cmd.Start())
	theirs.Close()
	c := &child{cmd: cmd, sock: pair[0], done: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		close(c.done)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-c.done
		unix.Close(c.sock)
	})
	return c
}

func (c *child) wait(t testing.TB) error {
	t.Helper()
	select {
	case <-c.done:
		return c.err
	case <-time.After(20 * time.Second):
		t.Fatal("the helper does not end")
		return nil
	}
}

func send(t testing.TB, sock int, payload string, fds ...int) {
	t.Helper()
	n, err := SendFds(sock, []byte(payload), fds...)
	require.NoError(t, err)
	require.Equal(t, len(payload), n)
}

func recv(t testing.TB, sock int) (string, []int) {
	t.Helper()
	s, fds, err := recvWait(sock)
	require.NoError(t, err)
	return s, fds
}

func recvWait(sock int) (string, []int, error) {
	p := []unix.PollFd{{Fd: int32(sock), Events: unix.POLLIN}}
	for {
		if n, err := unix.Poll(p, 20000); err != unix.EINTR {
			if err != nil || n == 0 {
				return "", nil, fmt.Errorf("nothing received: %v", err)
			}
			break
		}
	}
	buf := make([]byte, 256)
	n, fds, err := RecvFds(sock, buf)
	return string(buf[:n]), fds, err
}

func init() {
	// "mortal" registers death words for the parent, touches memory, says so
	// and waits to be killed.
	helpers["mortal"] = func(sock int) error {
		var mib, words int
		if _, err := fmt.Sscan(os.Getenv("MORTAL"), &mib, &words); err != nil {
			return err
		}
		seg, err := CreateSegment("death", RobustBytes(words))
		if err != nil {
			return err
		}
		registered := make(chan error)
		go func() {
			runtime.LockOSThread()
			r, err := RegisterRobust(seg.Bytes(), words)
			registered <- err
			for { // the thread lives as long as the process
				time.Sleep(time.Hour)
				runtime.KeepAlive(r)
			}
		}()
		if err := <-registered; err != nil {
			return err
		}
		var mem []byte
		if mib > 0 {
			if mem, err = unix.Mmap(-1, 0, mib<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
				return err
			}
			for i := 0; i < len(mem); i += 4096 {
				mem[i] = 1
			}
		}
		pidfd, err := SelfPidfd()
		if err != nil {
			return err
		}
		if _, err := SendFds(sock, []byte("ready"), seg.FD(), pidfd); err != nil {
			return err
		}
		_, _, err = recvWait(sock)
		runtime.KeepAlive(mem)
		return err
	}
	// "waker" maps the parent's shared word, increments and wakes it.
	helpers["waker"] = func(sock int) error {
		_, fds, err := recvWait(sock)
		if err != nil {
			return err
		}
		seg, err := OpenSegment(fds[0], 4096, true)
		if err != nil {
			return err
		}
		w := Word32(seg.Bytes(), 0)
		w.Add(1)
		_, err = FutexWake(w, 1)
		return err
	}
	// "reader" maps the parent's segment read-only, waits on its first word
	// and answers with the second.
	helpers["reader"] = func(sock int) error {
		_, fds, err := recvWait(sock)
		if err != nil {
			return err
		}
		seg, err := OpenSegment(fds[0], 4096, false)
		if err != nil {
			return err
		}
		if _, err := SendFds(sock, []byte("mapped")); err != nil {
			return err
		}
		w := Word32(seg.Bytes(), 0)
		for w.Load() == 0 {
			if r, err := FutexWait(w, 0, 10*time.Second); err != nil || r == FutexTimedOut {
				return fmt.Errorf("futex: %v %w", r, err)
			}
		}
		_, err = SendFds(sock, fmt.Appendf(nil, "%d", Word32(seg.Bytes(), LineBytes).Load()))
		return err
	}
	// "writer" maps the parent's segment read-only and stores in it.
	helpers["writer"] = func(sock int) (err error) {
		_, fds, err := recvWait(sock)
		if err != nil {
			return err
		}
		seg, err := OpenSegment(fds[0], 4096, false)
		if err != nil {
			return err
		}
		debug.SetPanicOnFault(true)
		defer func() {
			if recover() != nil {
				_, err = SendFds(sock, []byte("fault"))
			}
		}()
		seg.Bytes()[0] = 1
		return errors.New("it could write")
	}
	// "limited" tries to make a segment under limits.
	helpers["limited"] = func(int) error {
		var kind string
		var mib int
		if _, err := fmt.Sscan(os.Getenv("LIMITED"), &kind, &mib); err != nil {
			return err
		}
		which := map[string]int{"fsize": unix.RLIMIT_FSIZE, "as": unix.RLIMIT_AS}[kind]
		limit := uint64(8 << 20)
		if kind == "as" {
			used, err := addressSpace()
			if err != nil {
				return err
			}
			// A thread that starts meanwhile takes 64 to 128 MiB of it (a malloc arena and a stack).
			limit = used + 8<<30
		}
		if err := unix.Setrlimit(which, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return err
		}
		_, err := CreateSparse("limited", mib<<20, 1<<20)
		fmt.Fprintln(os.Stdout, err)
		return nil
	}
}

func addressSpace() (uint64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	var pages uint64
	_, err = fmt.Sscan(string(b), &pages)
	return pages * uint64(os.Getpagesize()), err
}

// eventually waits until f is true.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

var sink atomic.Uint64

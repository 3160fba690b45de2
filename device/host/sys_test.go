//go:build linux

package host

import (
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestPeerCred(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	for _, fd := range pair {
		defer unix.Close(fd)
		pid, uid, err := PeerCred(fd)
		require.NoError(t, err)
		require.Equal(t, os.Getpid(), pid)
		require.Equal(t, os.Getuid(), uid)
	}
	_, _, err = PeerCred(9999)
	require.ErrorIs(t, err, unix.EBADF)
}

func TestDescriptorPassing(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(pair[1])
	var closed bool
	defer func() {
		if !closed {
			unix.Close(pair[0])
		}
	}()
	a, b := pair[0], pair[1]
	buf := make([]byte, 64)
	_, _, err = RecvFds(b, buf)
	require.ErrorIs(t, err, unix.EAGAIN)

	ev, err := NewEventfd()
	require.NoError(t, err)
	defer unix.Close(ev)
	send(t, a, "one", ev)
	send(t, a, "two")
	send(t, a, "three", ev, ev)
	var text string
	var got []int
	for len(text) < len("onetwothree") {
		n, fds, err := RecvFds(b, buf)
		require.NoError(t, err)
		require.LessOrEqual(t, len(fds), 2)
		text += string(buf[:n])
		got = append(got, fds...)
	}
	require.Equal(t, "onetwothree", text)
	require.Len(t, got, 3)
	for _, fd := range got {
		fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, fl&unix.FD_CLOEXEC)
		require.NoError(t, EventfdSignal(fd))
		require.NoError(t, unix.Close(fd))
	}
	n, err := EventfdDrain(ev)
	require.NoError(t, err)
	require.EqualValues(t, 3, n)

	_, err = SendFds(a, nil, ev)
	require.Error(t, err)
	_, err = SendFds(a, []byte("x"), make([]int, MaxFds+1)...)
	require.Error(t, err)
	_, err = SendFds(a, []byte("x"), 9999)
	require.ErrorIs(t, err, unix.EBADF)

	unix.Close(a)
	closed = true
	_, _, err = RecvFds(b, buf)
	require.Equal(t, io.EOF, err)
	_, err = SendFds(b, []byte("x"))
	require.ErrorIs(t, err, unix.EPIPE, "no SIGPIPE")
}

// TestTruncatedDescriptors sends more descriptors than RecvFds has room for:
// none of them may stay open.
func TestTruncatedDescriptors(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	many := make([]int, MaxFds+4)
	for i := range many {
		many[i] = pair[0]
	}
	before := openFds(t)
	require.NoError(t, unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(many...), nil, 0))
	_, _, err = RecvFds(pair[1], make([]byte, 8))
	require.ErrorContains(t, err, "the kernel dropped descriptors")
	require.Equal(t, before, openFds(t))
}

func openFds(t *testing.T) int {
	d, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(d)
}

func TestEpoll(t *testing.T) {
	ep, err := EpollCreate(2)
	require.NoError(t, err)
	evs, err := ep.Wait(0)
	require.NoError(t, err)
	require.Empty(t, evs)
	start := time.Now()
	evs, err = ep.Wait(1500 * time.Microsecond)
	require.NoError(t, err)
	require.Empty(t, evs)
	require.GreaterOrEqual(t, time.Since(start), 1500*time.Microsecond)

	var fds [3]int
	for i := range fds {
		fds[i], err = NewEventfd()
		require.NoError(t, err)
		defer unix.Close(fds[i])
		require.NoError(t, ep.Add(fds[i], ReadyIn, uint64(i)<<40|7))
	}
	require.ErrorIs(t, ep.Add(fds[0], ReadyIn, 0), unix.EEXIST)
	require.NoError(t, EventfdSignal(fds[1]))
	for _, timeout := range []time.Duration{0, time.Second, -1} {
		evs, err = ep.Wait(timeout)
		require.NoError(t, err)
		require.Equal(t, []Event{{Token: 1<<40 | 7, Ready: ReadyIn}}, evs)
	}
	require.NoError(t, ep.Mod(fds[1], ReadyOut, ^uint64(0)))
	evs, err = ep.Wait(0)
	require.NoError(t, err)
	require.Equal(t, []Event{{Token: ^uint64(0), Ready: ReadyOut}}, evs)
	require.NoError(t, EventfdSignal(fds[0]))
	require.NoError(t, EventfdSignal(fds[2]))
	evs, err = ep.Wait(0)
	require.NoError(t, err)
	require.Len(t, evs, 2, "no more than asked for")
	require.NoError(t, ep.Del(fds[1]))
	require.ErrorIs(t, ep.Del(fds[1]), unix.ENOENT)
	n, err := EventfdDrain(fds[0])
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	n, err = EventfdDrain(fds[0])
	require.NoError(t, err)
	require.Zero(t, n)
	require.NoError(t, ep.Close())
	require.NoError(t, ep.Close())
}

func TestIdentity(t *testing.T) {
	a, err := Identity()
	require.NoError(t, err)
	b, err := Identity()
	require.NoError(t, err)
	require.Equal(t, a, b)
	require.Len(t, a.BootID, 36)
	require.Equal(t, os.Getpid(), a.PID)
	require.NotZero(t, a.StartTime)
	require.NotZero(t, a.NetNS)
	require.NotZero(t, a.PidNS)
	require.NotZero(t, a.IpcNS)

	v, err := startTime([]byte("42 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n"))
	require.NoError(t, err)
	require.EqualValues(t, 4711, v)
	_, err = startTime([]byte("42 (x) S 1"))
	require.Error(t, err)
}

func TestNanotimeAndSpin(t *testing.T) {
	a := Nanotime()
	Spin(-1)
	Spin(0)
	Spin(1 << 40) // bounded
	SchedYield()
	require.Greater(t, Nanotime(), a)
	require.Less(t, Nanotime()-a, int64(time.Second))
}

func TestCores(t *testing.T) {
	n := Cores()
	require.GreaterOrEqual(t, n, 1)
	require.LessOrEqual(t, n, affinity())

	tree := func(files map[string]string) string {
		root := t.TempDir()
		for name, text := range files {
			p := filepath.Join(root, name)
			require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
			require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
		}
		return root
	}
	v2 := tree(map[string]string{
		"proc/self/cgroup":                 "0::/pod/box\n",
		"proc/self/mountinfo":              "30 25 0:27 / /cg rw shared:9 - cgroup2 cgroup2 rw\n",
		"proc/meminfo":                     "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n",
		"cg/pod/cpu.max":                   "250000 100000\n",
		"cg/pod/box/cpu.max":               "max 100000\n",
		"cg/pod/memory.max":                "max\n",
		"cg/pod/memory.current":            "1\n",
		"cg/pod/box/memory.max":            "1048576\n",
		"cg/pod/box/memory.current":        "1000000\n",
		"cg/pod/box/memory.stat":           "anon 1\ninactive_file 400000\n",
		"cg/elsewhere/memory.limit_in_xxx": "",
	})
	require.Equal(t, 3, coresUnder(v2, 8), "a parent's quota binds, rounded up")
	require.Equal(t, 2, coresUnder(v2, 2))
	free, what, err := freeMemory(v2)
	require.NoError(t, err)
	require.EqualValues(t, 448576, free)
	require.Contains(t, what, "cgroup")

	v1 := tree(map[string]string{
		"proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n3:cpu,cpuacct:/docker/abc\n0::/\n",
		"proc/self/mountinfo": "31 23 0:28 /docker/abc /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" +
			"32 23 0:29 / /cg/memory rw - cgroup cgroup rw,memory\n",
		"proc/meminfo":                        "MemAvailable:    8000 kB\n",
		"cg/cpu/cpu.cfs_quota_us":             "50000\n",
		"cg/cpu/cpu.cfs_period_us":            "100000\n",
		"cg/memory/memory.limit_in_bytes":     "9223372036854771712\n",
		"cg/memory/memory.usage_in_bytes":     "1\n",
		"cg/memory/box/memory.limit_in_bytes": "100\n",
		"cg/memory/box/memory.usage_in_bytes": "200\n",
	})
	require.Equal(t, 1, coresUnder(v1, 8))
	free, _, err = freeMemory(v1)
	require.NoError(t, err)
	require.Zero(t, free)

	bare := tree(map[string]string{"proc/meminfo": "MemAvailable: 8000 kB\n"})
	require.Equal(t, 8, coresUnder(bare, 8))
	free, what, err = freeMemory(bare)
	require.NoError(t, err)
	require.EqualValues(t, 8000<<10, free)
	require.Equal(t, "the host", what)
	_, _, err = freeMemory(tree(nil))
	require.Error(t, err)
}

//go:build linux

package host

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestSegmentIsSealed(t *testing.T) {
	s, err := CreateSegment("slot", 5000)
	require.NoError(t, err)
	defer s.Close()
	require.Len(t, s.Bytes(), 8192, "whole pages")
	require.Equal(t, make([]byte, 8192), s.Bytes())
	s.Bytes()[8191] = 7 // the owner still writes
	require.Equal(t, byte(7), s.Bytes()[8191])

	require.ErrorIs(t, unix.Ftruncate(s.FD(), 4096), unix.EPERM)
	require.ErrorIs(t, unix.Ftruncate(s.FD(), 1<<20), unix.EPERM)
	_, err = unix.Mmap(s.FD(), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.ErrorIs(t, err, unix.EPERM)
	_, err = unix.Pwrite(s.FD(), []byte{1}, 0)
	require.ErrorIs(t, err, unix.EPERM)
	require.ErrorIs(t, unix.Fallocate(s.FD(), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096), unix.EPERM)
	ro, err := unix.Mmap(s.FD(), 0, 8192, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	require.Equal(t, byte(7), ro[8191])
	require.ErrorIs(t, unix.Mprotect(ro, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	require.NoError(t, unix.Munmap(ro))
	_, err = unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, unix.EPERM)

	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Nil(t, s.Bytes())
	require.Equal(t, -1, s.FD())
}

func TestSharedSegmentStaysWritable(t *testing.T) {
	s, err := CreateShared("words", 4096)
	require.NoError(t, err)
	defer s.Close()
	_, err = unix.FcntlInt(uintptr(s.FD()), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
	require.ErrorIs(t, err, unix.EPERM, "nobody may take the words away from the others")
	fd, err := unix.FcntlInt(uintptr(s.FD()), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	o, err := OpenSegment(fd, 4096, true)
	require.NoError(t, err)
	defer o.Close()
	require.True(t, Word64(o.Bytes(), LineBytes).CompareAndSwap(0, 42))
	require.EqualValues(t, 42, Word64(s.Bytes(), LineBytes).Load())
}

func TestOpenSegmentRefuses(t *testing.T) {
	dup := func(fd int) int {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		require.NoError(t, err)
		return d
	}
	s, err := CreateSegment("slot", 4096)
	require.NoError(t, err)
	defer s.Close()

	_, err = OpenSegment(dup(s.FD()), 8192, false)
	require.ErrorContains(t, err, "it has 4096 bytes, its owner announced 8192")
	_, err = OpenSegment(dup(s.FD()), 4096, true)
	require.ErrorIs(t, err, unix.EPERM)
	_, err = OpenSegment(dup(s.FD()), 0, false)
	require.ErrorContains(t, err, "at least 1 byte")

	loose, err := unix.MemfdCreate("loose", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(loose, 4096))
	_, err = OpenSegment(loose, 4096, false)
	require.ErrorIs(t, err, ErrNotSealed)
	_, err = unix.FcntlInt(uintptr(loose), unix.F_GETFD, 0)
	require.ErrorIs(t, err, unix.EBADF, "the descriptor was ours, also on error")

	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(4096))
	_, err = OpenSegment(dup(int(f.Fd())), 4096, false)
	require.ErrorContains(t, err, "is it a memfd?")
}

func TestSegmentBetweenProcesses(t *testing.T) {
	s, err := CreateSegment("slot", 4096)
	require.NoError(t, err)
	defer s.Close()
	c := start(t, "reader")
	send(t, c.sock, "segment", s.FD())
	got, _ := recv(t, c.sock)
	require.Equal(t, "mapped", got)
	Word32(s.Bytes(), LineBytes).Store(1234)
	w := Word32(s.Bytes(), 0)
	w.Store(1)
	_, err = FutexWake(w, 1)
	require.NoError(t, err)
	got, _ = recv(t, c.sock)
	require.Equal(t, "1234", got)
	require.NoError(t, c.wait(t))
}

func TestStoreInAPeersSegmentFaults(t *testing.T) {
	s, err := CreateSegment("slot", 4096)
	require.NoError(t, err)
	defer s.Close()
	c := start(t, "writer")
	send(t, c.sock, "segment", s.FD())
	got, _ := recv(t, c.sock)
	require.Equal(t, "fault", got)
	require.NoError(t, c.wait(t))
	require.Zero(t, s.Bytes()[0])
}

func TestReserve(t *testing.T) {
	s, err := CreateSparse("slot", 64<<20, 5000)
	require.NoError(t, err)
	defer s.Close()
	exist := func() int64 {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(s.FD(), &st))
		require.EqualValues(t, 64<<20, st.Size)
		return st.Blocks * 512
	}
	page := int64(os.Getpagesize())
	require.Equal(t, (5000+page-1)/page*page, exist())
	require.NoError(t, s.Reserve(4000))
	require.Equal(t, (5000+page-1)/page*page, exist(), "they are there already")
	require.NoError(t, s.Reserve(1<<20+1))
	require.Equal(t, 1<<20+page, exist())
	s.Bytes()[1<<20] = 7
	require.NoError(t, s.Reserve(64<<20))
	require.EqualValues(t, 64<<20, exist())
	require.Equal(t, byte(7), s.Bytes()[1<<20])
	require.ErrorContains(t, s.Reserve(64<<20+1), "of a segment of 67108864")

	huge, err := CreateSparse("huge", 1<<40, 1)
	require.NoError(t, err)
	defer huge.Close()
	err = huge.Reserve(1 << 39)
	require.ErrorIs(t, err, ErrNoMemory)
	require.ErrorContains(t, err, "SERRY_SHM_BYTES")
}

func TestNoRoomIsAnError(t *testing.T) {
	_, err := CreateSegment("huge", 1<<50)
	require.ErrorIs(t, err, ErrNoMemory)
	require.ErrorContains(t, err, "1125899906842624 bytes asked, the")
	require.ErrorContains(t, err, "SERRY_SHM_BYTES")
	_, err = CreateSegment("none", 0)
	require.ErrorContains(t, err, "at least 1 byte")
	_, err = CreateSegment(strings.Repeat("x", 201), 1)
	require.ErrorContains(t, err, "at most 200")

	for kind, want := range map[string]string{
		"fsize 64": "67108864 bytes asked, the file size limit is 8388608: raise it",
		"as 65536": "mmap 68719476736 bytes: not enough memory (cannot allocate memory)",
		"fsize 1":  "<nil>",
		"as 1":     "<nil>",
	} {
		t.Run(kind, func(t *testing.T) {
			exe, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), helperEnv+"=limited", "LIMITED="+kind, "GORACE=atexit_sleep_ms=0")
			var errOut bytes.Buffer
			cmd.Stderr = &errOut
			out, err := cmd.Output()
			if strings.Contains(errOut.String(), "ThreadSanitizer") {
				t.Skip("the race detector needs more address space")
			}
			require.NoError(t, err, errOut.String())
			require.Contains(t, string(out), want)
		})
	}
}

func TestWordsPanicOutOfBounds(t *testing.T) {
	b := make([]byte, 64)
	for _, off := range []int{-4, 61, 64, 1 << 40, 2} {
		require.Panics(t, func() { Word32(b, off) }, off)
	}
	for _, off := range []int{-8, 57, 60, 4} {
		require.Panics(t, func() { Word64(b, off) }, off)
	}
	Word32(b, 60).Store(1)
	Word64(b, 48).Store(2)
	require.Equal(t, byte(1), b[60])
}

func BenchmarkCreateSegment64MiB(b *testing.B) {
	for b.Loop() {
		s, err := CreateSegment("bench", 64<<20)
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

func BenchmarkCreateSparse64MiB(b *testing.B) {
	for b.Loop() {
		s, err := CreateSparse("bench", 64<<20, 4<<20)
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}

func BenchmarkCreateAndTouch64MiB(b *testing.B) {
	for b.Loop() {
		s, err := CreateSegment("bench", 64<<20)
		if err != nil {
			b.Fatal(err)
		}
		m := s.Bytes()
		for i := 0; i < len(m); i += 4096 {
			m[i] = 1
		}
		s.Close()
	}
}

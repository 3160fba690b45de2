//go:build linux

package host

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mortal is a helper process with its death region and pidfd.
type mortal struct {
	*child
	seg   *Segment
	pidfd int
}

func startMortal(t testing.TB, mib, words int) *mortal {
	t.Helper()
	c := start(t, "mortal", fmt.Sprintf("MORTAL=%d %d", mib, words))
	got, fds := recv(t, c.sock)
	require.Equal(t, "ready", got)
	require.Len(t, fds, 2)
	seg, err := OpenSegment(fds[0], RobustBytes(words), false)
	require.NoError(t, err)
	t.Cleanup(func() { seg.Close(); unix.Close(fds[1]) })
	return &mortal{child: c, seg: seg, pidfd: fds[1]}
}

func (m *mortal) kill(t testing.TB) {
	t.Helper()
	require.NoError(t, unix.Kill(m.cmd.Process.Pid, unix.SIGKILL))
}

// TestDeathIsSeenEarly logs how long after SIGKILL the death word and the pidfd
// tell of it.
func TestDeathIsSeenEarly(t *testing.T) {
	for _, mib := range []int{0, 256} {
		t.Run(fmt.Sprintf("%dMiB", mib), func(t *testing.T) {
			var byWord, byPidfd []time.Duration
			for range 5 {
				m := startMortal(t, mib, 1)
				require.False(t, OwnerDied(RobustWord(m.seg.Bytes(), 0).Load()))
				died := make(chan int64, 1)
				w, err := NewDeathWatch(func(uint64) { died <- Nanotime() })
				require.NoError(t, err)
				require.NoError(t, w.Add(1, RobustWord(m.seg.Bytes(), 0)))
				exited := make(chan int64, 1)
				go func() {
					if ok, err := waitExit(m.pidfd, 20000); ok && err == nil {
						exited <- Nanotime()
					}
					close(exited)
				}()
				time.Sleep(10 * time.Millisecond)
				start := Nanotime()
				m.kill(t)
				select {
				case at := <-died:
					byWord = append(byWord, time.Duration(at-start))
				case <-time.After(10 * time.Second):
					t.Fatal("the death word was not marked")
				}
				at, ok := <-exited
				require.True(t, ok)
				byPidfd = append(byPidfd, time.Duration(at-start))
				require.True(t, OwnerDied(RobustWord(m.seg.Bytes(), 0).Load()))
				w.Close()
			}
			slices.Sort(byWord)
			slices.Sort(byPidfd)
			t.Logf("%d MiB: death word median %v, of %v; pidfd median %v, of %v", mib, byWord[2], byWord, byPidfd[2], byPidfd)
		})
	}
}

func TestDeathWatchManyPeers(t *testing.T) {
	const words, spare = 300, 3 // more than one sleeper holds
	rw, ro := bothMappings(t)
	require.GreaterOrEqual(t, len(rw), RobustBytes(words-45))
	m := startMortal(t, 0, words)
	var mu sync.Mutex
	var dead []uint64
	w, err := NewDeathWatch(func(id uint64) {
		mu.Lock()
		dead = append(dead, id)
		mu.Unlock()
	})
	require.NoError(t, err)
	defer w.Close()
	for i := range spare { // peers that live on
		require.NoError(t, w.Add(uint64(1000+i), RobustWord(ro, i)))
	}
	for i := range words {
		require.NoError(t, w.Add(uint64(i), RobustWord(m.seg.Bytes(), i)))
	}
	require.ErrorContains(t, w.Add(5, RobustWord(m.seg.Bytes(), 5)), "already")
	w.Remove(7)
	w.Remove(4711)
	m.kill(t)
	eventually(t, "all reported", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(dead) >= words-1
	})
	slices.Sort(dead)
	require.Len(t, slices.Compact(dead), words-1)
	require.NotContains(t, dead, uint64(7))
	require.NoError(t, w.Add(7, RobustWord(m.seg.Bytes(), 7)), "marked already: reported at once")
	eventually(t, "7 reported", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Contains(dead, 7)
	})
	w.Close()
	require.ErrorContains(t, w.Add(8, RobustWord(m.seg.Bytes(), 8)), "closed")
}

// TestDeathWatchRemoveLetsGo unmaps a word as soon as Remove has returned, while
// other sets come and go.
func TestDeathWatchRemoveLetsGo(t *testing.T) {
	w, err := NewDeathWatch(func(uint64) { t.Error("nobody died") })
	require.NoError(t, err)
	defer w.Close()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 50 {
				s, err := CreateSegment("death", RobustBytes(1))
				if err != nil {
					t.Error(err)
					return
				}
				id := uint64(g*1000 + i)
				if err := w.Add(id, RobustWord(s.Bytes(), 0)); err != nil {
					t.Error(err)
				}
				if i%3 == 0 {
					runtime.Gosched()
				}
				w.Remove(id)
				s.Close()
			}
		})
	}
	wg.Wait()
}

func TestDeathWatchCallbackMayRemove(t *testing.T) {
	rw, ro := bothMappings(t)
	var w *DeathWatch
	done := make(chan struct{})
	w, err := NewDeathWatch(func(id uint64) {
		w.Remove(id)
		w.Remove(2)
		w.Close()
		close(done)
	})
	require.NoError(t, err)
	require.NoError(t, w.Add(1, RobustWord(ro, 0)))
	require.NoError(t, w.Add(2, RobustWord(ro, 1)))
	RobustWord(rw, 0).Store(futexOwnerDied)
	_, err = FutexWake(RobustWord(rw, 0), 1)
	require.NoError(t, err)
	<-done
}

// TestRobustMarksThreadDeath needs no process: the words follow the thread.
func TestRobustMarksThreadDeath(t *testing.T) {
	for _, closed := range []bool{false, true} {
		rw, _ := bothMappings(t)
		tid := make(chan int)
		errs := make(chan error)
		go onOtherThread(func() {
			r, err := RegisterRobust(rw, 3)
			errs <- err
			if closed {
				r.Close()
				r.Close()
			}
			tid <- unix.Gettid()
		})
		require.NoError(t, <-errs)
		id := <-tid
		if closed {
			gone := fmt.Sprintf("/proc/self/task/%d", id)
			eventually(t, "thread gone", func() bool { return unix.Access(gone, unix.F_OK) != nil })
		} else {
			eventually(t, "marked", func() bool { return OwnerDied(RobustWord(rw, 2).Load()) })
		}
		for i := range 3 {
			require.Equal(t, !closed, OwnerDied(RobustWord(rw, i).Load()))
		}
		require.Zero(t, RobustWord(rw, 3).Load())
	}
	_, err := RegisterRobust(make([]byte, 16), 2)
	require.Error(t, err)
}

// onOtherThread runs f on a thread that ends with it. The main thread does not.
func onOtherThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			onOtherThread(f)
		}()
		<-done
		runtime.UnlockOSThread()
		return
	}
	f()
}

func TestPidfd(t *testing.T) {
	c := start(t, "mortal", "MORTAL=0 1")
	_, fds := recv(t, c.sock)
	for _, fd := range fds {
		defer unix.Close(fd)
	}
	own, err := PidfdOpen(c.cmd.Process.Pid)
	require.NoError(t, err)
	defer unix.Close(own)
	for _, fd := range []int{own, fds[1]} {
		dead, err := Exited(fd)
		require.NoError(t, err)
		require.False(t, dead)
	}
	require.NoError(t, c.cmd.Process.Kill())
	for _, fd := range []int{own, fds[1]} {
		eventually(t, "exited", func() bool {
			dead, err := Exited(fd)
			require.NoError(t, err)
			return dead
		})
	}
	_, err = PidfdOpen(1 << 30)
	require.Error(t, err)
	_, err = Exited(9999)
	require.ErrorIs(t, err, unix.EBADF)
}

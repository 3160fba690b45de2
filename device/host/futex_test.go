//go:build linux

package host

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bothMappings is one shared word seen over a writable and a read-only mapping.
func bothMappings(t testing.TB) (rw, ro []byte) {
	t.Helper()
	s, err := CreateSegment("words", 4096)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	m, err := mapShared(s.FD(), 4096, false)
	require.NoError(t, err)
	o := &Segment{mem: m, fd: -1}
	t.Cleanup(func() { o.Close() })
	return s.Bytes(), o.Bytes()
}

func TestFutexOnReadOnlyMapping(t *testing.T) {
	rw, ro := bothMappings(t)
	w, r := Word32(rw, 0), Word32(ro, 0)

	res, err := FutexWait(r, 1, time.Second)
	require.NoError(t, err)
	require.Equal(t, FutexChanged, res)
	start := time.Now()
	res, err = FutexWait(r, 0, 5*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, FutexTimedOut, res)
	require.GreaterOrEqual(t, time.Since(start), 5*time.Millisecond)

	done := make(chan FutexResult)
	go func() {
		for r.Load() == 0 {
			_, _ = FutexWait(r, 0, -1)
		}
		res, _ := FutexWait(r, 1, -1)
		done <- res
	}()
	time.Sleep(2 * time.Millisecond)
	w.Store(1)
	eventually(t, "woken", func() bool {
		n, err := FutexWake(r, 1) // waking needs no write access either
		require.NoError(t, err)
		select {
		case res := <-done:
			require.Equal(t, FutexWoken, res)
			return true
		default:
			return n < 0
		}
	})
}

func TestFutexWakesN(t *testing.T) {
	rw, _ := bothMappings(t)
	w := Word32(rw, 64)
	done := make(chan struct{}, 3)
	for range 3 {
		go func() {
			for w.Load() == 0 {
				_, _ = FutexWait(w, 0, -1)
			}
			done <- struct{}{}
		}()
	}
	time.Sleep(5 * time.Millisecond)
	w.Store(1)
	_, err := FutexWake(w, 1<<40)
	require.NoError(t, err)
	for range 3 {
		<-done
	}
}

func TestFutexWaitv(t *testing.T) {
	for _, fallback := range []bool{false, true} {
		name := map[bool]string{false: "kernel", true: "fallback"}[fallback]
		t.Run(name, func(t *testing.T) {
			if noWaitv.Load() && !fallback {
				t.Skip("no futex_waitv here")
			}
			defer noWaitv.Store(noWaitv.Swap(fallback))
			rw, ro := bothMappings(t)
			var words []*atomic.Uint32
			vals := make([]uint32, 100)
			for i := range vals {
				words = append(words, Word32(ro, i*RobustStride))
			}
			res, err := FutexWaitv(words, vals, 3*time.Millisecond)
			require.NoError(t, err)
			require.Equal(t, FutexTimedOut, res)
			vals[7] = 1
			res, err = FutexWaitv(words, vals, -1)
			require.NoError(t, err)
			require.Equal(t, FutexChanged, res)
			vals[7] = 0

			for _, i := range []int{0, 42} {
				done := make(chan error)
				go func() {
					for words[i].Load() == 0 {
						if _, err := FutexWaitv(words, vals, 10*time.Second); err != nil {
							done <- err
							return
						}
					}
					done <- nil
				}()
				time.Sleep(3 * time.Millisecond)
				w := Word32(rw, i*RobustStride)
				w.Store(1)
				_, err = FutexWake(w, 1)
				require.NoError(t, err)
				require.NoError(t, <-done)
				vals[i] = 1
			}
			_, err = FutexWaitv(nil, nil, 0)
			require.Error(t, err)
			_, err = FutexWaitv(make([]*atomic.Uint32, 129), make([]uint32, 129), 0)
			require.Error(t, err)
		})
	}
}

func TestFutexBetweenProcesses(t *testing.T) {
	s, err := CreateShared("words", 4096)
	require.NoError(t, err)
	defer s.Close()
	c := start(t, "waker")
	send(t, c.sock, "words", s.FD())
	w := Word32(s.Bytes(), 0)
	for w.Load() == 0 {
		res, err := FutexWait(w, 0, 10*time.Second)
		require.NoError(t, err)
		require.NotEqual(t, FutexTimedOut, res)
	}
	require.NoError(t, c.wait(t))
}

func TestHotCallsDoNotAllocate(t *testing.T) {
	rw, ro := bothMappings(t)
	w := Word32(rw, 0)
	words, vals := []*atomic.Uint32{Word32(ro, 0), Word32(ro, 16)}, []uint32{0, 0}
	ev, err := NewEventfd()
	require.NoError(t, err)
	ep, err := EpollCreate(4)
	require.NoError(t, err)
	defer ep.Close()
	require.NoError(t, ep.Add(ev, ReadyIn, 1))
	for name, f := range map[string]func(){
		"FutexWait":  func() { _, _ = FutexWait(w, 0, time.Microsecond) },
		"FutexWaitv": func() { _, _ = FutexWaitv(words, vals, time.Microsecond) },
		"FutexWake":  func() { _, _ = FutexWake(w, 1) },
		"SchedYield": SchedYield,
		"Spin":       func() { Spin(10) },
		"Nanotime":   func() { sink.Store(uint64(Nanotime())) },
		"eventfd":    func() { _ = EventfdSignal(ev); _, _ = EventfdDrain(ev) },
		"epoll":      func() { _ = EventfdSignal(ev); _, _ = ep.Wait(0); _, _ = ep.Wait(time.Millisecond) },
	} {
		require.Zero(t, testing.AllocsPerRun(100, f), name)
	}
}

func BenchmarkSchedYield(b *testing.B) {
	for b.Loop() {
		SchedYield()
	}
}

func BenchmarkSpin(b *testing.B) {
	for b.Loop() {
		Spin(1)
	}
}

func BenchmarkNanotime(b *testing.B) {
	for b.Loop() {
		sink.Store(uint64(Nanotime()))
	}
}

func BenchmarkFutexWakeNobody(b *testing.B) {
	rw, _ := bothMappings(b)
	w := Word32(rw, 0)
	for b.Loop() {
		_, _ = FutexWake(w, 1)
	}
}

func BenchmarkFutexPingPong(b *testing.B) {
	rw, _ := bothMappings(b)
	ping, pong := Word32(rw, 0), Word32(rw, LineBytes)
	b.ReportAllocs()
	n := uint32(b.N)
	go func() {
		for i := uint32(0); i < n; i++ {
			for ping.Load() == i {
				_, _ = FutexWait(ping, i, -1)
			}
			pong.Add(1)
			_, _ = FutexWake(pong, 1)
		}
	}()
	for i := uint32(0); i < n; i++ {
		ping.Add(1)
		_, _ = FutexWake(ping, 1)
		for pong.Load() == i {
			_, _ = FutexWait(pong, i, -1)
		}
	}
}

//go:build unix

package devicetest

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// descriptor: who sleeps on Fd is woken by every frame, whenever it comes.
func descriptor(s *state) {
	waitable := func() bool {
		fd, _ := s.B.Fd()
		return fd >= 0
	}
	for i := 0; i < 200 && !waitable(); i++ {
		s.move("a descriptor")
	}
	if !waitable() {
		s.Skip("this link has no descriptor to wait on")
	}
	rounds := count(500)
	sent := make(chan error, 1)
	turn := make(chan struct{})
	defer close(turn)
	go func() {
		r := rand.New(rand.NewPCG(5, 6))
		for range turn {
			switch spin := r.IntN(4); spin {
			case 0:
				time.Sleep(time.Duration(r.IntN(200)) * time.Microsecond)
			case 1:
				for range r.IntN(20) {
					runtime.Gosched()
				}
			}
			ok, err := s.a.send(0)
			if err == nil && !ok {
				err = errors.New("full with one frame")
			}
			for i := 0; i < 3 && err == nil; i++ {
				_, err = s.A.Poll(s.a.recv) // flushes
			}
			sent <- err
		}
	}()
	for round := range rounds {
		turn <- struct{}{}
		for s.b.in[0].n == uint64(round) {
			fd, write := s.B.Fd()
			if fd < 0 {
				s.poll(s.b)
				s.Pair.Step()
				s.patience("a descriptor")
				continue
			}
			events := int16(unix.POLLIN)
			if write {
				events |= unix.POLLOUT
			}
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 5000)
			if n == 0 && err == nil {
				before := s.b.got
				s.poll(s.b)
				s.Fatalf("round %d: slept 5 s on the descriptor; then Poll delivered %d frames", round, s.b.got-before)
			}
			s.poll(s.b)
		}
		if err := <-sent; err != nil {
			s.Fatalf("round %d: A: %v", round, err)
		}
	}
}

// noLeak: a closed link leaves neither goroutines nor descriptors.
func noLeak(t *testing.T, open func(t *testing.T) Pair) {
	use := func() {
		t.Run("use", func(t *testing.T) {
			s := start(t, open)
			for range 20 {
				s.mustSend(s.a)
				s.mustSend(s.b)
			}
			s.settle()
		})
	}
	use()
	goroutines, files := runtime.NumGoroutine(), openFiles()
	for range 4 {
		use()
	}
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		g, f := runtime.NumGoroutine()-goroutines, openFiles()-files
		if g <= 0 && f <= 0 {
			return
		}
		if time.Since(begin) > 3*time.Second {
			t.Fatalf("4 closed pairs left %d goroutines and %d open descriptors", g, f)
		}
	}
}

// openFiles counts descriptors where the system lists them.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(entries)
}

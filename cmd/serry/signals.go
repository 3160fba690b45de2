package main

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/serry-project/serry/internal/launch"
)

// signals are those that this process gets, from before the ranks are there.
type signals struct {
	ctx    context.Context // ends with the first
	cancel context.CancelFunc
	got    chan os.Signal
	done   chan struct{}
	tasks  sync.WaitGroup

	mu       sync.Mutex
	launcher *launch.Launcher
	all      []syscall.Signal
}

func catch() *signals {
	s := &signals{got: make(chan os.Signal, 8), done: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	// A reader of our output that goes away must not end us by SIGPIPE: the ranks go on.
	want := []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGPIPE}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		want = append(want, syscall.SIGHUP)
	}
	signal.Notify(s.got, want...)
	s.tasks.Go(func() {
		for {
			select {
			case sig := <-s.got:
				if sig, ok := sig.(syscall.Signal); ok && sig != syscall.SIGPIPE {
					s.take(sig)
				}
			case <-s.done:
				return
			}
		}
	})
	return s
}

func (s *signals) take(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, sig)
	s.cancel()
	if s.launcher != nil {
		s.launcher.Stop(sig)
	}
	if len(s.all) == 2 {
		signal.Stop(s.got) // so that a third one ends us, should a rank not even die of SIGKILL
	}
}

// deliver passes on to l what has come and what comes.
func (s *signals) deliver(l *launch.Launcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.launcher = l
	for _, sig := range s.all {
		l.Stop(sig)
	}
}

func (s *signals) first() syscall.Signal {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) == 0 {
		return 0
	}
	return s.all[0]
}

func (s *signals) release() {
	signal.Stop(s.got)
	close(s.done)
	s.tasks.Wait()
	s.cancel()
}

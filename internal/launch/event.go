package launch

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"syscall"
	"time"
)

// Kind is what happened.
type Kind string

// The kinds of an Event, and which fields it has beside Time, Kind and Rank.
const (
	Started    Kind = "started"    // Pid, Restarts
	Exited     Kind = "exited"     // Pid, Restarts, Code, Signal
	Restarting Kind = "restarting" // Restarts, Delay: how long until then; Code, Signal: why
	GaveUp     Kind = "gave_up"    // Restarts, Code, Signal: failed, and no restart is left
	Stopping   Kind = "stopping"   // Signal, Reason; Rank is -1: all ranks are told to end
	Finished   Kind = "finished"   // Code: that of the launcher; Rank is -1
)

// Event is something that happened to a rank, or to all.
type Event struct {
	Time     time.Time
	Kind     Kind
	Rank     int // -1 for all
	Pid      int
	Restarts int // how often the rank was started again by then
	Code     int // exit code, 128 + the signal's number if it was a signal
	Signal   syscall.Signal
	Delay    time.Duration
	Reason   string
}

// MarshalJSON writes times in RFC 3339, the delay in seconds, and leaves out what the kind does not have.
func (e Event) MarshalJSON() ([]byte, error) {
	out := struct {
		Time     string   `json:"time"`
		Event    Kind     `json:"event"`
		Rank     *int     `json:"rank,omitempty"`
		Pid      int      `json:"pid,omitempty"`
		Restarts *int     `json:"restarts,omitempty"`
		Code     *int     `json:"code,omitempty"`
		Signal   string   `json:"signal,omitempty"`
		Delay    *float64 `json:"delay_s,omitempty"`
		Reason   string   `json:"reason,omitempty"`
	}{Time: e.Time.UTC().Format(time.RFC3339Nano), Event: e.Kind, Pid: e.Pid, Reason: e.Reason}
	if e.Rank >= 0 {
		out.Rank, out.Restarts = &e.Rank, &e.Restarts
	}
	switch e.Kind {
	case Restarting:
		s := e.Delay.Seconds()
		out.Delay, out.Code = &s, &e.Code
	case Exited, GaveUp, Finished:
		out.Code = &e.Code
	}
	if e.Signal != 0 {
		out.Signal = SignalName(e.Signal)
	}
	return json.Marshal(out)
}

// JSONLines returns an OnEvent that writes each event to w as a line of JSON. If that fails it says so once and goes on.
func JSONLines(w io.Writer, log *slog.Logger) func(Event) {
	var once sync.Once
	return func(e Event) {
		b, err := json.Marshal(e)
		if err == nil {
			_, err = w.Write(append(b, '\n'))
		}
		if err != nil {
			once.Do(func() { log.Warn("events are lost from here on", "err", err) })
		}
	}
}

// events hands what was emitted to a callback, one at a time and in order, without holding up who emits.
type events struct {
	call func(Event)

	mu     sync.Mutex
	wake   *sync.Cond
	queue  []Event
	busy   bool
	closed bool
	done   chan struct{}
}

func newEvents(call func(Event)) *events {
	e := &events{call: call, done: make(chan struct{})}
	e.wake = sync.NewCond(&e.mu)
	if call == nil {
		e.call = func(Event) {}
	}
	go e.run()
	return e
}

func (e *events) run() {
	defer close(e.done)
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		for len(e.queue) == 0 {
			if e.closed {
				return
			}
			e.wake.Wait()
		}
		next := e.queue[0]
		e.queue, e.busy = e.queue[1:], true
		e.mu.Unlock()
		e.call(next)
		e.mu.Lock()
		e.busy = false
		e.wake.Broadcast()
	}
}

func (e *events) emit(ev Event) {
	ev.Time = time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.queue = append(e.queue, ev)
		e.wake.Broadcast()
	}
}

// flush returns when all that was emitted has been handed on.
func (e *events) flush() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.queue) > 0 || e.busy {
		e.wake.Wait()
	}
}

func (e *events) close() {
	e.mu.Lock()
	e.closed = true
	e.wake.Broadcast()
	e.mu.Unlock()
	<-e.done
}

// SignalName is "SIGKILL" for 9.
func SignalName(s syscall.Signal) string {
	if name := sysSignalName(s); name != "" {
		return name
	}
	return fmt.Sprintf("signal %d", int(s))
}

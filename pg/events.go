package pg

import (
	"sync"
	"time"
)

// Event is a change of the view, or the end of this process's membership.
type Event struct {
	Epoch  uint64
	Active Set
	Lost   []int // slots
	Joined []int
	Why    string
	Over   bool // this process is out
	At     time.Time
}

// events keeps the last 256 for who reads them late.
type events struct {
	mu sync.Mutex
	ch chan Event
}

func (e *events) put(ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		select {
		case e.ch <- ev:
			return
		default:
			select {
			case <-e.ch:
			default:
			}
		}
	}
}

// Events delivers every new view, oldest first. Who does not read loses the oldest beyond 256.
func (w *World) Events() <-chan Event { return w.events.ch }

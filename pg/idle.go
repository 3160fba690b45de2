package pg

import (
	"slices"
	"time"

	"github.com/serry-project/serry/fault"
)

const (
	quietFor  = 10 * time.Millisecond  // after an operation, until those who retain it are told
	tidyEvery = 250 * time.Millisecond // while something is kept for others
	oweEvery  = time.Millisecond       // while a link has no room for a credit
)

// Idle implements agent.Host. 10 ms after an operation those who retain it are told; versions that every member has left
// behind, and groups that every member has closed, are forgotten; credits for messages that a link had no room for are
// sent again.
func (h worldHost) Idle(now time.Duration) (next time.Duration) {
	w := h.World
	if w.Group == nil {
		return 0
	}
	// It stays set until they are told: of the operations of these 10 ms only the first wakes the loop.
	if w.ackAt == 0 && w.completed.Load() {
		w.ackAt = now + quietFor
	}
	if w.ackAt != 0 && now >= w.ackAt {
		w.ackAt = 0
		w.completed.Store(false)
		for _, g := range w.all() {
			if g.comm.Tell() && g.comm.Untold() { // no room
				w.ackAt = now + quietFor
			}
		}
	}
	if w.tidyAt != 0 && now >= w.tidyAt {
		w.tidyAt = 0
		if w.tidy() {
			w.tidyAt = now + tidyEvery
		}
	}
	if w.owes.Swap(false) && w.oweAt == 0 {
		w.oweAt = now + oweEvery
	}
	if w.oweAt != 0 && now >= w.oweAt {
		w.oweAt = 0
		for _, g := range w.all() {
			g.creditAll()
		}
		if w.owes.Swap(false) {
			w.oweAt = now + oweEvery
		}
	}
	for _, t := range []time.Duration{w.ackAt, w.tidyAt, w.oweAt} {
		if t != 0 && (next == 0 || t < next) {
			next = t
		}
	}
	return next
}

// tidy forgets what nobody needs any more, and says whether something is kept.
func (w *World) tidy() (more bool) {
	for _, g := range w.all() {
		switch {
		case !g.retired.Load():
			g.idle()
			more = g.comm.Tidy() || more
		case !g.comm.Finished(), !g.inOrder.Load() && g.comm.Current().Fail == "":
			more = true // for who was to be told, or until all know that it has failed
		case !g.inOrder.Load() && !g.comm.Quit():
			more = true
		default:
			w.mu.Lock()
			delete(w.groups, g.id)
			w.order = slices.DeleteFunc(w.order, func(id uint64) bool { return id == g.id })
			w.gone.add(g.id)
			w.mu.Unlock()
			g.comm.Release(true)
			w.agent.Step(fault.Dropped{Group: g.id})
		}
	}
	return more
}

// finished tells the loop that an operation of a group with remote members is complete.
func (g *Group) finished() {
	if g.comm.Remote() && !g.w.completed.Swap(true) {
		g.w.ground.Post()
	}
}

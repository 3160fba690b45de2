//go:build faultpoint

package faultpoint

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
)

// Enabled says whether points can be armed in this build.
const Enabled = true

type arm struct {
	nth    int
	action func()
}

var (
	mu    sync.Mutex
	known = All()
	arms  = map[string]arm{}
	hits  = map[string]int{}
)

// Hit says that the caller has come to the point. It panics for a name that All
// does not list.
func Hit(name string) {
	if action := count(name); action != nil {
		action()
	}
}

func count(name string) (action func()) {
	mu.Lock()
	defer mu.Unlock()
	mustKnow(name)
	hits[name]++
	if a, ok := arms[name]; ok && a.nth == hits[name] {
		delete(arms, name)
		return a.action
	}
	return nil
}

// Arm makes the nth Hit of a point from now on (1 is the next) run action, once,
// on the goroutine that hit it. A nil action kills the process with SIGKILL.
func Arm(name string, nth int, action func()) {
	mu.Lock()
	defer mu.Unlock()
	mustKnow(name)
	if nth < 1 {
		panic(fmt.Sprintf("faultpoint: arm %s: hit %d: want 1 or more", name, nth))
	}
	if action == nil {
		action = kill
	}
	arms[name] = arm{nth: hits[name] + nth, action: action}
}

// Disarm forgets all that was armed and counted.
func Disarm() {
	mu.Lock()
	defer mu.Unlock()
	clear(arms)
	clear(hits)
}

// Hits is how often a point was hit.
func Hits(name string) int {
	mu.Lock()
	defer mu.Unlock()
	mustKnow(name)
	return hits[name]
}

// mustKnow is called with mu held.
func mustKnow(name string) {
	if !slices.Contains(known, name) {
		panic("faultpoint: no point has the name " + name)
	}
}

func kill() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // nothing of this goroutine may happen after the point
}

package chaos

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// Holding is what a process holds of the system.
type Holding struct {
	Goroutines, Descriptors, Mappings, Memfds int
	Resident                                  int64 // bytes
}

// holds counts it, after a collection of garbage.
func holds() (h Holding) {
	runtime.GC()
	runtime.GC() // what the first one has found finalizers of
	h.Goroutines = runtime.NumGoroutine()
	if es, err := os.ReadDir("/proc/self/fd"); err == nil {
		h.Descriptors = len(es) - 1 // that of the directory
		for _, e := range es {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "/memfd:") {
				h.Memfds++
			}
		}
	}
	if b, err := os.ReadFile("/proc/self/maps"); err == nil {
		h.Mappings = strings.Count(string(b), "/memfd:")
	}
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			h.Resident = n * int64(os.Getpagesize())
		}
	}
	return h
}

package fault

import (
	"testing"
	"time"
)

// TestBig kills a host of 16 in a world of 128.
func TestBig(t *testing.T) {
	var hosts []int
	for i := range 128 {
		hosts = append(hosts, i/16)
	}
	w := emptyWorld(1, 8, bugNone)
	w.found(hosts, nil, Set{})
	l := &lab{t, w}
	l.run(20 * ms)
	begin, steps := time.Now(), w.steps
	for i := range 15 {
		l.rank(16 + i).crash()
	}
	l.run(60 * ms)
	v := l.rank(0).m.View()
	if len(v.Members) != 113 {
		t.Fatalf("epoch %d: %d members", v.Epoch, len(v.Members))
	}
	d := time.Since(begin)
	t.Logf("epoch %d after %v, %d steps: %v a step", v.Epoch, d, w.steps-steps, d/time.Duration(w.steps-steps))
}

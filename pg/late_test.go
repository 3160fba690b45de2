package pg

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"

	"github.com/stretchr/testify/require"
)

// said shows what processes logged (SERRY_LOG=debug), if the test fails.
func said(t testing.TB, ps *[]*harness.Proc) {
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range *ps {
				lines := p.Lines()
				t.Logf("%s (pid %d): %s\n%s", p.Name, p.Pid(), strings.Join(lines[max(0, len(lines)-8):], "; "), p.Stderr())
			}
		}
	})
}

// loops starts size ranks that reduce in a loop and waits until all are in the first view.
func loops(t testing.TB, size int, a loopArgs) []*harness.Proc {
	t.Helper()
	a.Size = size
	ps := make([]*harness.Proc, size)
	for r := range ps {
		a.Rank = r
		ps[r] = a.start(t)
	}
	for _, p := range ps {
		_, err := p.Line("epoch 1 ", 30*time.Second)
		require.NoError(t, err)
	}
	return ps
}

// activeAs waits until a rank has reduced over exactly this set, and returns the epoch.
func activeAs(t testing.TB, p *harness.Proc, d time.Duration, slots ...int) (epoch uint64) {
	t.Helper()
	want := fmt.Sprint(slots)
	for end := time.Now().Add(d); ; time.Sleep(time.Millisecond) {
		for _, l := range p.Lines() {
			if rest, ok := strings.CutPrefix(l, "epoch "); ok && strings.Contains(rest, want) {
				fmt.Sscan(rest, &epoch)
				return epoch
			}
		}
		if time.Now().After(end) {
			t.Fatalf("%s has not reduced over %v in %v\nlines: %s\nstderr: %s", p.Name, slots, d, strings.Join(p.Lines(), "\n"), p.Stderr())
		}
	}
}

// TestTwoAtOnce kills two of four at once.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		for _, dead := range [][]int{{0, 1}, {1, 2}, {0, 3}} {
			t.Run(fmt.Sprint(l, dead), func(t *testing.T) {
				t.Parallel()
				ps := loops(t, 4, loopArgs{Dir: t.TempDir(), Links: l})
				for _, r := range dead {
					ps[r].Signal(syscall.SIGKILL)
				}
				var left []int
				for r := range 4 {
					if !slices.Contains(dead, r) {
						left = append(left, r)
					}
				}
				for _, r := range left {
					activeAs(t, ps[r], 15*time.Second, left...)
				}
			})
		}
	}
}

// TestLastOfAHost kills all but one at the same moment: the last goes on alone, by the kernel's word for the others.
func TestLastOfAHost(t *testing.T) {
	t.Parallel()
	for _, last := range []int{0, 2, 3} {
		t.Run(fmt.Sprint(last), func(t *testing.T) {
			t.Parallel()
			ps := loops(t, 4, loopArgs{Dir: t.TempDir(), Mode: Continue})
			for r, p := range ps {
				if r != last {
					p.Signal(syscall.SIGKILL)
				}
			}
			activeAs(t, ps[last], 15*time.Second, last)
		})
	}
}

// TestStopped stops a rank: it is late, not dead, and is excluded by name when the deadline of the operation is over. When
// it is continued it learns that it is out, and has changed nothing for the others, who check every sum.
func TestStopped(t *testing.T) {
	t.Parallel()
	const deadline = time.Second
	for _, l := range []string{"auto", "tcp"} {
		for _, late := range []int{0, 1} {
			t.Run(fmt.Sprint(l, late), func(t *testing.T) {
				t.Parallel()
				ps := loops(t, 3, loopArgs{Dir: t.TempDir(), Links: l, Timeout: deadline})
				ps[late].Signal(syscall.SIGSTOP)
				began := time.Now()
				left := slices.DeleteFunc([]int{0, 1, 2}, func(r int) bool { return r == late })
				time.Sleep(deadline / 2)
				for _, r := range left {
					for _, line := range ps[r].Lines() {
						require.NotContains(t, line, fmt.Sprint(left), "before the deadline")
					}
				}
				for _, r := range left {
					activeAs(t, ps[r], 20*time.Second, left...)
				}
				require.GreaterOrEqual(t, time.Since(began), deadline*9/10)
				ps[late].Signal(syscall.SIGCONT)
				line, err := ps[late].Line("error ", 10*time.Second)
				require.NoError(t, err)
				require.Contains(t, line, "evicted (slot")
				require.Contains(t, line, fmt.Sprintf("rank %d is late", late))
				for _, r := range left {
					ps[r].Signal(0)
					_, err := ps[r].Wait(50 * time.Millisecond)
					require.ErrorContains(t, err, "still runs")
				}
			})
		}
	}
}

// TestPausedIsNotLost stops and continues a rank again and again, each time for less than the deadline: nobody is lost.
func TestPausedIsNotLost(t *testing.T) {
	t.Parallel()
	ps := loops(t, 3, loopArgs{Dir: t.TempDir(), Timeout: 20 * time.Second})
	for i := range 20 {
		p := ps[i%3]
		p.Signal(syscall.SIGSTOP)
		time.Sleep(20 * time.Millisecond)
		p.Signal(syscall.SIGCONT)
		time.Sleep(5 * time.Millisecond)
	}
	for _, p := range ps {
		for _, l := range p.Lines() {
			require.False(t, strings.HasPrefix(l, "epoch 2"), l)
			require.False(t, strings.HasPrefix(l, "error"), l)
		}
	}
}

// TestLeave: a rank that leaves in order is a loss that is no error, and its process ends well.
func TestLeave(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		for _, m := range []Mode{Continue, Raise} {
			t.Run(fmt.Sprint(l, m), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				var ps []*harness.Proc
				for r := range 3 {
					a := loopArgs{Rank: r, Size: 3, Dir: dir, Links: l, Mode: m}
					if r == 0 {
						a.Steps = 50
					}
					ps = append(ps, a.start(t))
				}
				_, err := ps[0].Wait(30 * time.Second)
				require.NoError(t, err)
				for _, p := range ps[1:] {
					activeAs(t, p, 15*time.Second, 1, 2)
					if m == Raise {
						line, err := p.Line("error ", 5*time.Second)
						require.NoError(t, err)
						require.Contains(t, line, "rank 0 left")
					}
				}
			})
		}
	}
}

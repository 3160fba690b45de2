package pg

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

// idlesProgram has groups of every kind that it does not use, reduces in the world, and says how many pieces of shared
// memory it has mapped.
func idlesProgram(args []string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, "file://"+args[0])
	if err != nil {
		return err
	}
	rank, _ := strconv.Atoi(args[1])
	fresh := args[2] == "rejoin"
	w, err := Join(ctx, Config{Rank: rank, Size: 3, Store: st, Rejoin: fresh, ArenaBytes: 16 << 20, Options: Options{SlotBytes: 64 << 10}})
	if err != nil {
		return err
	}
	if !fresh {
		for _, o := range []Options{{}, {Mode: Raise}, {Mode: Raise, ManualResume: true}, {Mode: Raise, Pairs: true}} {
			o.SlotBytes = 8 << 10
			if _, err := w.Sub(ctx, nil, o); err != nil {
				return err
			}
		}
	}
	x := []int64{1}
	for step := 1; ; step++ {
		if !fresh {
			if _, err := w.Boundary(ctx, nil); err != nil {
				return err
			}
		}
		fresh = false
		time.Sleep(2 * time.Millisecond)
		res, err := w.AllReduce(ctx, I64(x), I64([]int64{1}), dtype.Sum)
		if err != nil {
			return err
		}
		if step%50 == 0 {
			runtime.GC()
			maps, err := os.ReadFile("/proc/self/maps")
			if err != nil {
				return err
			}
			n := 0
			for _, l := range strings.Split(string(maps), "\n") {
				if strings.Contains(l, "memfd:") {
					n++
				}
			}
			fmt.Fprintf(out, "epoch %d maps %d %v\n", res.Epoch, n, res.Active.Slots())
		}
	}
}

// TestDeadMemoryIsUnmapped replaces a rank again and again: the memory of the dead ones does not pile up in the others,
// though they have groups that nobody uses, and losses that nobody was told of.
func TestDeadMemoryIsUnmapped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := func(rank int, how string) *harness.Proc {
		return harness.Start(t, fmt.Sprintf("rank %d", rank), "idles", []string{dir, strconv.Itoa(rank), how})
	}
	ps := []*harness.Proc{start(0, "found"), start(1, "found"), start(2, "found")}
	all := append([]*harness.Proc{}, ps...)
	said(t, &all)
	mapped := func(p *harness.Proc, epoch int) (n int) {
		lines := p.Lines()
		for i := len(lines) - 1; i >= 0; i-- {
			var e int
			if _, err := fmt.Sscanf(lines[i], "epoch %d maps %d [0 1 2]", &e, &n); err == nil && e == epoch {
				return n
			}
		}
		return 0
	}
	first := [2]int{}
	for k := range 10 {
		epoch := 1 + 2*k
		for r := range first {
			require.Eventually(t, func() bool { return mapped(ps[r], epoch) > 0 }, 20*time.Second, 5*time.Millisecond)
			if k == 0 {
				first[r] = mapped(ps[r], epoch)
			}
			require.Eventually(t, func() bool { return mapped(ps[r], epoch) <= first[r]+2 }, 10*time.Second, 5*time.Millisecond,
				"rank %d: %d at first, %d after %d rejoins", r, first[r], mapped(ps[r], epoch), k)
		}
		ps[2].Signal(syscall.SIGKILL)
		_, _ = ps[2].Wait(5 * time.Second)
		ps[2] = start(2, "rejoin")
		all = append(all, ps[2])
	}
}

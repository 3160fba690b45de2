package pg

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// ringProgram sends in each step more than a window to the next active rank while it receives as much from the one before.
func ringProgram(args []string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, "file://"+args[0])
	if err != nil {
		return err
	}
	rank, _ := strconv.Atoi(args[1])
	w, err := Join(ctx, Config{Rank: rank, Size: 3, Store: st, Links: args[2], Rejoin: args[3] == "rejoin", Options: Options{Mode: Raise}})
	if err != nil {
		return err
	}
	step, _ := strconv.Atoi(string(w.Joined().Attach))
	const size = Window / 3
	give, take := make([]byte, size), make([]byte, size)
	ring := func(active []int) error {
		i := 0
		for active[i] != rank {
			i++
		}
		next, before := active[(i+1)%len(active)], active[(i+len(active)-1)%len(active)]
		var eg errgroup.Group
		eg.Go(func() error {
			for k := range 5 {
				give[0], give[size-1] = byte(step), byte(rank)
				if err := w.Send(ctx, U8(give), next, uint32(k)); err != nil {
					return err
				}
			}
			return nil
		})
		eg.Go(func() error {
			for k := range 5 {
				if err := w.Recv(ctx, U8(take), before, uint32(k)); err != nil {
					return err
				}
				if take[0] != byte(step) || take[size-1] != byte(before) {
					return fmt.Errorf("step %d: got step %d of rank %d from rank %d", step, take[0], take[size-1], before)
				}
			}
			return nil
		})
		return eg.Wait()
	}
	fresh := w.Joined().Replacement // it stands in the Boundary of its first step already
	for {
		if !fresh {
			if _, err := w.Boundary(ctx, func() []byte { return []byte(strconv.Itoa(step)) }); err != nil {
				return err
			}
		}
		fresh = false
		step++
		res, err := w.Barrier(ctx)
		if err == nil && res.Active.Len() > 1 {
			err = ring(res.Active.Slots())
		}
		switch {
		case err == nil:
			fmt.Fprintf(out, "epoch %d %v\n", res.Epoch, res.Active.Slots())
		case !errors.As(err, new(*RankLost)):
			return err
		}
	}
}

// TestWindowSurvivesKills kills ranks in the middle of their messages and replaces them, again and again: nobody waits for
// room that a dead process has taken with it.
func TestWindowSurvivesKills(t *testing.T) {
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			start := func(rank int, how string) *harness.Proc {
				return harness.Start(t, fmt.Sprintf("rank %d", rank), "ring", []string{dir, strconv.Itoa(rank), l, how})
			}
			ps := []*harness.Proc{start(0, "found"), start(1, "found"), start(2, "found")}
			every := append([]*harness.Proc{}, ps...)
			said(t, &every)
			for k := range 7 {
				for _, p := range ps {
					_, err := p.Line(fmt.Sprintf("epoch %d [0 1 2]", 1+2*k), 20*time.Second)
					require.NoError(t, err)
				}
				r := k % 3
				time.Sleep(time.Duration(k) * 3 * time.Millisecond)
				ps[r].Signal(syscall.SIGKILL)
				_, _ = ps[r].Wait(5 * time.Second)
				for _, p := range ps {
					if p != ps[r] {
						_, err := p.Line(fmt.Sprintf("epoch %d [", 2+2*k), 20*time.Second)
						require.NoError(t, err)
					}
				}
				ps[r] = start(r, "rejoin")
				every = append(every, ps[r])
			}
		})
	}
}

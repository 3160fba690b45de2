package pg

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"os"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// worlds founds a world of n ranks as goroutines of this process.
func worlds(t testing.TB, n int, cfg Config) []*World {
	t.Helper()
	st, err := rendezvous.Open(context.Background(), fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	ws := make([]*World, n)
	var eg errgroup.Group
	for r := range n {
		eg.Go(func() (err error) {
			c := cfg
			c.Rank, c.Size, c.Store = r, n, st
			if os.Getenv("SERRY_LOG") != "" {
				c.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})).With("rank", r)
			}
			ws[r], err = Join(ctx, c)
			return err
		})
	}
	require.NoError(t, eg.Wait())
	t.Cleanup(func() {
		for _, w := range ws {
			_ = w.Close()
		}
	})
	return ws
}

// all runs f on every rank at once.
func all(t testing.TB, ws []*World, f func(w *World) error) {
	t.Helper()
	var eg errgroup.Group
	for _, w := range ws {
		if w != nil {
			eg.Go(func() error {
				if err := f(w); err != nil {
					return fmt.Errorf("rank %d: %w", w.Rank(), err)
				}
				return nil
			})
		}
	}
	require.NoError(t, eg.Wait())
}

func links(t *testing.T, f func(t *testing.T, cfg Config)) {
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			f(t, Config{Links: l, ArenaBytes: 32 << 20, Options: Options{SlotBytes: 64 << 10}})
		})
	}
}

func TestOperations(t *testing.T) {
	links(t, func(t *testing.T, cfg Config) {
		for _, n := range []int{1, 2, 3, 5} {
			t.Run(fmt.Sprint(n), func(t *testing.T) {
				ws := worlds(t, n, cfg)
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				for _, length := range []int{0, 1, 7, 1000, 40_000} {
					all(t, ws, func(w *World) error { return operations(ctx, w, n, length) })
				}
			})
		}
	})
}

func operations(ctx context.Context, w *World, n, length int) error {
	r := w.Rank()
	in, out := make([]float32, length), make([]float32, length)
	for i := range in {
		in[i] = float32(i%31) * float32(r+1)
	}
	if _, err := w.AllReduce(ctx, F32(out), F32(in), dtype.Sum); err != nil {
		return err
	}
	for i := range out {
		if want := float32(i%31) * float32(n*(n+1)/2); out[i] != want {
			return fmt.Errorf("all_reduce %d: element %d is %v, want %v", length, i, out[i], want)
		}
	}
	if _, err := w.AllReduce(ctx, F32(in), F32(in), dtype.Max); err != nil {
		return err
	}
	for i := range in {
		if want := float32(i%31) * float32(n); in[i] != want {
			return fmt.Errorf("all_reduce in place %d: element %d is %v, want %v", length, i, in[i], want)
		}
	}
	counts := make([]int, n)
	total := 0
	for i := range counts {
		counts[i] = length * (i + 1) / n
		total += counts[i]
	}
	mine, gathered := make([]int64, counts[r]), make([]int64, total)
	for i := range mine {
		mine[i] = int64(r*1000 + i)
	}
	if _, err := w.AllGather(ctx, I64(gathered), I64(mine), counts); err != nil {
		return err
	}
	at := 0
	for s, c := range counts {
		for i := range c {
			if gathered[at] != int64(s*1000+i) {
				return fmt.Errorf("all_gather: rank %d element %d is %d", s, i, gathered[at])
			}
			at++
		}
	}
	send, recv := make([]int, n), make([]int, n)
	ns, nr := 0, 0
	for i := range n {
		send[i], recv[i] = length*(i+r)%977, length*(i+r)%977
		ns += send[i]
		nr += recv[i]
	}
	a, b := make([]int32, ns), make([]int32, nr)
	at = 0
	for i, c := range send {
		for j := range c {
			a[at] = int32(r*100 + i + j)
			at++
		}
	}
	if _, err := w.AllToAll(ctx, I32(b), I32(a), recv, send); err != nil {
		return err
	}
	at = 0
	for i, c := range recv {
		for j := range c {
			if b[at] != int32(i*100+r+j) {
				return fmt.Errorf("all_to_all: from rank %d element %d is %d", i, j, b[at])
			}
			at++
		}
	}
	root := length % n
	buf := make([]byte, length)
	if r == root {
		for i := range buf {
			buf[i] = byte(i * 7)
		}
	}
	if _, err := w.Broadcast(ctx, U8(buf), root); err != nil {
		return err
	}
	for i := range buf {
		if buf[i] != byte(i*7) {
			return fmt.Errorf("broadcast: byte %d is %d", i, buf[i])
		}
	}
	if n > 1 {
		to, from := (r+1)%n, (r+n-1)%n
		x, y := make([]byte, 8+length), make([]byte, 8+length)
		binary.LittleEndian.PutUint64(x, math.Float64bits(float64(r)))
		if err := w.Send(ctx, U8(x), to, 5); err != nil {
			return err
		}
		if err := w.Recv(ctx, U8(y), from, 5); err != nil {
			return err
		}
		if got := math.Float64frombits(binary.LittleEndian.Uint64(y)); got != float64(from) {
			return fmt.Errorf("recv: from %d got %v", from, got)
		}
	}
	_, err := w.Barrier(ctx)
	return err
}

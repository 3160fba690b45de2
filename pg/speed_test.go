package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

// speedProgram times b.N operations and prints the percentiles in nanoseconds.
func speedProgram(args []string, out io.Writer) error {
	var a loopArgs
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	n, _ := strconv.Atoi(args[1])
	ctx := context.Background()
	st, err := rendezvous.Open(ctx, "file://"+a.Dir)
	if err != nil {
		return err
	}
	w, err := Join(ctx, Config{Rank: a.Rank, Size: a.Size, Store: st, Links: a.Links})
	if err != nil {
		return err
	}
	x, y := make([]int64, max(n/8, 1)), make([]int64, max(n/8, 1))
	d := make([]time.Duration, 0, a.Steps)
	var sum time.Duration
	for i := range a.Steps + 1000 {
		if _, err := w.Barrier(ctx); err != nil {
			return err
		}
		begin := time.Now()
		if _, err := w.AllReduce(ctx, I64(y), I64(x), dtype.Sum); err != nil {
			return err
		}
		if i >= 1000 {
			d = append(d, time.Since(begin))
			sum += d[len(d)-1]
		}
	}
	slices.Sort(d)
	fmt.Fprintf(out, "speed %d %d %d\n", d[len(d)/2], d[len(d)*99/100], sum/time.Duration(len(d)))
	return w.Leave(ctx)
}

// BenchmarkAllReduce runs the ranks as processes; ns/op is the median of the slowest rank, p99 and mean are beside it.
func BenchmarkAllReduce(b *testing.B) {
	for _, l := range []string{"auto", "tcp"} {
		for _, n := range []int{2, 4} {
			for _, bytes := range []int{8, 64 << 10} {
				b.Run(fmt.Sprintf("links=%s/ranks=%d/bytes=%d", l, n, bytes), func(b *testing.B) {
					dir := b.TempDir()
					var ps []*harness.Proc
					for r := range n {
						a, _ := json.Marshal(loopArgs{Rank: r, Size: n, Dir: dir, Links: l, Steps: max(b.N, 100)})
						ps = append(ps, harness.Start(b, fmt.Sprintf("rank %d", r), "speed", []string{string(a), fmt.Sprint(bytes)}))
					}
					var p50, p99, mean float64
					for _, p := range ps {
						line, err := p.Line("speed ", time.Minute)
						require.NoError(b, err)
						var x, y, z float64
						_, err = fmt.Sscan(line, &x, &y, &z)
						require.NoError(b, err)
						p50, p99, mean = max(p50, x), max(p99, y), max(mean, z)
					}
					b.ReportMetric(p50, "ns/op")
					b.ReportMetric(p99, "p99-ns")
					b.ReportMetric(mean, "mean-ns")
				})
			}
		}
	}
}

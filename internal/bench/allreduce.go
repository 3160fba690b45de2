package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/pg"
)

// AllReduceConfig is what to time.
type AllReduceConfig struct {
	Ranks int    `json:"ranks"`
	Bytes int    `json:"bytes"`
	Links string `json:"links"`
	N     int    `json:"n"`
}

// AllReduceDefaults is the case that the project has a bar for.
func AllReduceDefaults() AllReduceConfig {
	return AllReduceConfig{Ranks: 2, Bytes: 8, Links: "auto", N: 100_000}
}

// The rows of AllReduce: the first two are timed between barriers that are not.
const (
	rowApart   = "out of place"
	rowInPlace = "in place"
	rowBack    = "back to back"
	rowClock   = "(reading the clock)"
)

// AllReduce times an all_reduce of int64 as one rank sees it.
func AllReduce(ctx context.Context, o Options, cfg AllReduceConfig) (*Result, error) {
	var c checks
	c.ranks(cfg.Ranks, 1)
	c.that(8 <= cfg.Bytes && cfg.Bytes <= 1<<30 && cfg.Bytes%8 == 0, "bytes", cfg.Bytes, "a multiple of 8 from 8 to 1GiB")
	c.number("n", cfg.N, 1, most)
	c.links(cfg.Links)
	if err := c.err(); err != nil {
		return nil, err
	}
	res := newResult("allreduce", cfg, "%d ranks, %s, links %s", cfg.Ranks, sizeText(int64(cfg.Bytes)), cfg.Links)
	worst, err := timed(ctx, o, res, cfg.Ranks, rankArgs{Program: "allreduce", Links: cfg.Links, N: cfg.N, Bytes: cfg.Bytes})
	if err != nil {
		return nil, err
	}
	if cfg.Ranks == 2 && cfg.Bytes == 8 && cfg.Links == "auto" {
		res.bar("p50 of the slowest rank", time.Microsecond, max(worst[rowApart], worst[rowInPlace]))
	}
	return res, nil
}

// timed runs a program that times calls on every rank, puts their histograms, merged, into res, and returns the highest
// median of any rank by row.
func timed(ctx context.Context, o Options, res *Result, n int, a rankArgs) (worst map[string]time.Duration, err error) {
	c, err := newCrew(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	p := newProgress(o.Progress)
	defer p.clear()
	p.say("%s: starting %d ranks", res.Name, n)
	ps, err := c.founders(n, a)
	if err != nil {
		return nil, err
	}
	worst = map[string]time.Duration{}
	sum := map[string]times{}
	var order []string
	var bad error
	other := func(q *proc, text string) {
		if s, ok := strings.CutPrefix(text, "at "); ok && q.rank == 0 {
			p.say("%s: %s", res.Name, s)
		}
		if s, ok := strings.CutPrefix(text, "violation "); ok {
			res.violate("rank %d: %s", q.rank, s)
		}
		if s, ok := strings.CutPrefix(text, "note "); ok && q.rank == 0 {
			res.note("%s", s)
		}
		if s, ok := strings.CutPrefix(text, "times "); ok {
			name, data, _ := strings.Cut(s, "\t")
			t, err := timesOf(data)
			if err != nil {
				bad = err
				return
			}
			if _, ok := sum[name]; !ok {
				sum[name] = newTimes()
				order = append(order, name)
			}
			sum[name].merge(t)
			worst[name] = max(worst[name], t.summary("").P50)
		}
	}
	if err := c.gather(ps, "done", time.Hour, nil, other); err != nil {
		return nil, err
	}
	for _, name := range order {
		res.Rows = append(res.Rows, sum[name].summary(name))
	}
	return worst, bad
}

// allreduce is one rank of AllReduce.
func (r *rank) allreduce() error {
	w, err := r.join()
	if err != nil {
		return err
	}
	ctx, n := r.ctx, r.Bytes/8
	x, y := make([]int64, n), make([]int64, n)
	want := int64(1)<<r.Size - 1
	wrong := 0
	call := func(out []int64) (time.Duration, error) {
		for i := range x {
			x[i] = 1 << w.Rank()
		}
		if _, err := w.Barrier(ctx); err != nil {
			return 0, err
		}
		begin := host.Nanotime()
		_, err := w.AllReduce(ctx, pg.I64(out), pg.I64(x), dtype.Sum)
		took := host.Nanotime() - begin
		if err == nil && (out[0] != want || out[n-1] != want) {
			if wrong++; wrong < 4 {
				r.say("violation the sum is %d, want %d", out[0], want)
			}
		}
		return time.Duration(took), err
	}
	rows := []times{newTimes(), newTimes(), newTimes(), newTimes()}
	warm := min(r.N/10, 1000)
	for i := -2 * warm; i < 2*r.N; i++ {
		out := y
		if i&1 == 1 {
			out = x
		}
		d, err := call(out)
		if err != nil {
			return err
		}
		if i >= 0 {
			rows[i&1].add(int64(d))
		}
		if i&4095 == 0 {
			r.say("at %d of %d calls", i, 2*r.N)
		}
	}
	clear(x)
	for range r.N {
		begin := host.Nanotime()
		if _, err := w.AllReduce(ctx, pg.I64(y), pg.I64(x), dtype.Sum); err != nil {
			return err
		}
		rows[2].add(host.Nanotime() - begin)
	}
	for range 1000 {
		begin := host.Nanotime()
		rows[3].add(host.Nanotime() - begin)
	}
	for i, name := range []string{rowApart, rowInPlace, rowBack, rowClock} {
		if err := r.give(name, rows[i]); err != nil {
			return err
		}
	}
	r.say("done")
	return w.Leave(ctx)
}

// sizeText writes a number of bytes.
func sizeText(n int64) string {
	for _, u := range []struct {
		n    int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.n && n%u.n == 0 {
			return fmt.Sprintf("%d %s", n/u.n, u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

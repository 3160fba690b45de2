package sim

import (
	"context"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Batch is many schedules, and what came of them.
type Batch struct {
	Command     string   `json:"command,omitempty"`
	Schedules   int      `json:"schedules"`
	Seed        uint64   `json:"seed"` // of the first
	Violations  int      `json:"violations"`
	SeedsFailed []uint64 `json:"seeds_failed"`
	PerSecond   float64  `json:"schedules_per_s"`
	Seconds     float64  `json:"seconds"`
	Cores       int      `json:"cores"`
	EndStates   int      `json:"distinct_end_states"`
	Views       int64    `json:"views"`
	Operations  int64    `json:"operations"`
	Accesses    int64    `json:"accesses"` // to shared words
	Virtual     float64  `json:"virtual_seconds"`
	Deepest     int      `json:"ranks_max"`

	// Coverage is, by kind of fault, the part of the schedules that it is in; Uncovered names the kinds that are in too few
	// of them: 2 %, or 0.5 % for a death in a phase of an agreement.
	Coverage  map[string]float64 `json:"coverage"`
	Uncovered []string           `json:"uncovered,omitempty"`

	// Failed are the first that failed, with as few faults as still make them.
	Failed []*Failure `json:"failed,omitempty"`
}

// Failure is a schedule in which a promise was broken.
type Failure struct {
	Seed       uint64   `json:"seed"`
	Ranks      int      `json:"ranks"`
	Violations []string `json:"violations"`
	Faults     []string `json:"faults"`  // of the plan
	Without    []int    `json:"without"` // those of them that are not needed
}

// Run runs n schedules from a seed on, on so many threads, until ctx ends. progress is called now and then.
func Run(ctx context.Context, seed uint64, n, threads int, o Options, progress func(done, failed int)) *Batch {
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	b := &Batch{Seed: seed, Cores: runtime.NumCPU(), Coverage: map[string]float64{}}
	var mu sync.Mutex
	var next atomic.Int64
	var in [kinds]int
	ends := map[uint64]struct{}{}
	begin, told := time.Now(), time.Now()
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			var r Runner
			for ctx.Err() == nil {
				i := next.Add(1) - 1
				if i >= int64(n) {
					return
				}
				w := r.Run(seed+uint64(i), o)
				var f *Failure
				if len(w.Violations) > 0 {
					mu.Lock()
					enough := len(b.Failed) >= 20
					mu.Unlock()
					if !enough {
						f = r.failure(w, o)
					}
				}
				mu.Lock()
				b.add(w, &in, ends, f)
				if progress != nil && time.Since(told) > time.Second {
					told = time.Now()
					progress(b.Schedules, len(b.SeedsFailed))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	b.Seconds = time.Since(begin).Seconds()
	b.PerSecond = float64(b.Schedules) / b.Seconds
	b.EndStates = len(ends)
	slices.Sort(b.SeedsFailed)
	for k := range kinds {
		share := float64(in[k]) / float64(max(b.Schedules, 1))
		b.Coverage[k.String()] = share
		if least := k.least(); share < least && o.Ranks == 0 && o.Hosts == 0 {
			b.Uncovered = append(b.Uncovered, k.String())
		}
	}
	return b
}

// least is the part of the schedules that a kind has to be in.
func (k Kind) least() float64 {
	if k.Death() {
		return 0.005
	}
	return 0.02
}

func (b *Batch) add(w *Result, in *[kinds]int, ends map[uint64]struct{}, f *Failure) {
	b.Schedules++
	for k, c := range w.Coverage.Kinds {
		if c > 0 {
			in[k]++
		}
	}
	b.Views += int64(w.Coverage.Views)
	b.Operations += int64(w.Coverage.Returns)
	b.Accesses += int64(w.Coverage.Accesses)
	b.Virtual += w.Took.Seconds()
	b.Deepest = max(b.Deepest, w.Ranks)
	ends[w.End] = struct{}{}
	if len(w.Violations) > 0 {
		b.Violations += len(w.Violations)
		b.SeedsFailed = append(b.SeedsFailed, w.Seed)
	}
	if f != nil {
		b.Failed = append(b.Failed, f)
	}
}

// failure shrinks what has failed.
func (r *Runner) failure(w *Result, o Options) *Failure {
	least, o := r.Shrink(w.Seed, o)
	f := &Failure{Seed: w.Seed, Ranks: w.Ranks, Faults: least.Faults, Without: o.Without}
	for _, v := range least.Violations {
		f.Violations = append(f.Violations, v.String())
	}
	return f
}

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/examples/moe/model"
	"github.com/serry-project/serry/examples/moe/serve"
	"github.com/serry-project/serry/pg"
)

// endKey in the rendezvous tells the workers to end when all is answered.
const endKey = "end"

// meetTime is enough to reach the rendezvous, which is there before any worker: longer tries are for a demo that is gone.
const meetTime = 10 * time.Second

// job is what the demo tells its workers, as JSON on their command line.
type job struct {
	Weights string
	Experts int
	Flip    *flip // nil: all weights are right
	Serve   serve.Config
}

// flip is one wrong bit in one rank's replica of an expert, as a negative control.
type flip struct{ Rank, Layer, Expert int }

// worker is one rank: it loads its share of the model, joins, serves, and prints events as JSON lines. Beside those of
// serve there are "joining" (its share is loaded, and it calls Join) and "view" (Epoch, Active: it has a new view). It ends
// when the demo writes endKey, or has ended itself.
func worker(ctx context.Context, text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return fmt.Errorf("the job: %w", err)
	}
	meet, cancelMeet := context.WithTimeout(ctx, meetTime)
	defer cancelMeet()
	cfg, err := pg.FromEnv(meet)
	if err != nil {
		return err
	}
	m, err := serve.Load(j.Weights, cfg.Rank, cfg.Size, j.Serve.Replicas, j.Experts)
	if err != nil {
		return err
	}
	if j.Flip != nil && j.Flip.Rank == cfg.Rank {
		if err := m.FlipBit(j.Flip.Layer, j.Flip.Expert); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	out := bufio.NewWriter(os.Stdout)
	enc := json.NewEncoder(out)
	emit := func(e serve.Event) {
		mu.Lock()
		defer mu.Unlock()
		_ = enc.Encode(e) // if who watches is gone, SIGPIPE ends us
		_ = out.Flush()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	end := make(chan struct{})
	go func() {
		if _, err := cfg.Store.Get(ctx, endKey); err != nil {
			cancel(fmt.Errorf("the demo is gone: %w", err))
			return
		}
		close(end)
	}()
	emit(serve.Event{Kind: "joining", Rank: cfg.Rank, Time: time.Now().UnixNano()})
	w, err := pg.Join(ctx, cfg)
	if err != nil {
		return err
	}
	go func() {
		for ev := range w.Events() {
			emit(serve.Event{Kind: "view", Rank: w.Rank(), Time: ev.At.UnixNano(), Epoch: ev.Epoch, Active: ev.Active.Slots()})
		}
	}()
	if err := serve.Run(ctx, w, m, j.Serve, end, emit); err != nil {
		return err
	}
	return w.Leave(ctx)
}

// findFlip finds an expert of a rank that has a bit which matters to the first logits of that rank's own first request.
// (Many do not: what they weigh may be zero.) m is as it was in the end.
func findFlip(ctx context.Context, m *model.Model, cfg serve.Config, ranks, rank int) (*flip, error) {
	p, err := serve.Placement(m.Experts, ranks, cfg.Replicas)
	if err != nil {
		return nil, err
	}
	cfg.Prompts, cfg.Max = cfg.Prompts[rank%len(cfg.Prompts):][:1], 1
	first := func() (uint64, error) {
		as, err := serve.Reference(ctx, m, cfg, nil)
		if err != nil {
			return 0, err
		}
		return as[0].Hashes[0], nil
	}
	right, err := first()
	if err != nil {
		return nil, err
	}
	for layer := range m.Layers {
		for _, e := range p.Resident(rank) {
			if p.Owner(e, route.All(ranks), rank) != rank {
				continue // its rows go to the other replica
			}
			if err := m.FlipBit(layer, e); err != nil {
				return nil, err
			}
			h, err := first()
			_ = m.FlipBit(layer, e)
			if err != nil {
				return nil, err
			}
			if h != right {
				return &flip{rank, layer, e}, nil
			}
		}
	}
	return nil, fmt.Errorf("no bit of rank %d's experts matters to its first request", rank)
}

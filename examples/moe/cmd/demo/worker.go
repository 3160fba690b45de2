package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/serry-project/serry/examples/moe/model"
	"github.com/serry-project/serry/examples/moe/serve"
	"github.com/serry-project/serry/pg"
)

// job is what the demo tells its workers, as JSON on their command line.
type job struct {
	Weights string
	Experts int
	Flip    int // rank whose replica of an expert gets one wrong bit; -1: none (a negative control)
	Serve   serve.Config
}

// worker is one rank: it loads its share of the model, joins, serves, and prints events as JSON lines. Beside those of
// serve there are "joining" (its share is loaded, and it calls Join) and "view" (Epoch, Active: it has a new view).
func worker(ctx context.Context, text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return fmt.Errorf("the job: %w", err)
	}
	cfg, err := pg.FromEnv(ctx)
	if err != nil {
		return err
	}
	m, err := serve.Load(j.Weights, cfg.Rank, cfg.Size, j.Serve.Replicas, j.Experts)
	if err != nil {
		return err
	}
	if j.Flip == cfg.Rank {
		if err := flip(m); err != nil {
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
	if err := serve.Run(ctx, w, m, j.Serve, emit); err != nil {
		return err
	}
	return w.Leave(ctx)
}

// flip changes one bit of the first expert that lives here.
func flip(m *model.Model) error {
	for e := range m.Experts {
		if m.HasExpert(0, e) {
			return m.FlipBit(0, e)
		}
	}
	return fmt.Errorf("no expert of layer 0 lives here")
}

package ep_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

// Two ranks, here goroutines of one process, hold four experts, each on both of them: expert e multiplies a row by e+1.
// Each rank sends two tokens of three elements to two experts each, and gets the weighted sums back. With processes, and a
// group of Raise mode as here, a rank that dies makes Step repeat itself over the others' replicas.
func Example() {
	const experts, topK, hidden = 4, 2, 3
	ctx := context.Background()
	store := rendezvous.NewMem()
	var ranks sync.WaitGroup
	for rank := range 2 {
		ranks.Go(func() {
			w, err := pg.Join(ctx, pg.Config{Rank: rank, Size: 2, Store: store})
			check(err)
			place, err := route.Contiguous(experts, w.Size(), 2)
			check(err)
			cfg := ep.Config{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: 16, Placement: place, Policy: ep.Rerun}
			g, err := w.Sub(ctx, nil, pg.Options{Mode: pg.Raise, Pairs: true, SlotBytes: cfg.SlotBytes(w.Size())})
			check(err)
			// A replacement finds the group in w.Groups() instead, and sets cfg.Joining = w.Joined().Replacement.
			buf, err := ep.Open(ctx, ep.FromGroup(g), cfg)
			check(err)

			x := []float32{1, 2, 3, 10, 20, 30} // [tokens, hidden]
			ids := []int32{0, 3, 1, 2}          // [tokens, topK]
			weights := []float32{0.5, 0.5, 0.25, 0.75}
			y := make([]float32, len(x))
			_, err = ep.Step(ctx, buf, x, ids, weights, func(h ep.Handle, y []float32) error {
				for _, b := range h.Blocks() { // the rows of one of our experts
					in, out := h.X()[b.Offset*hidden:], y[b.Offset*hidden:]
					for i := range b.Count * hidden {
						out[i] = in[i] * float32(b.Expert+1)
					}
				}
				return nil
			}, &ep.Output{Y: y})
			check(err)
			if rank == 0 {
				fmt.Println(y)
			}
			check(buf.Close(ctx))
			check(w.Leave(ctx))
		})
	}
	ranks.Wait()
	// Output: [2.5 5 7.5 27.5 55 82.5]
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

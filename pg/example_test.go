package pg_test

import (
	"context"
	"fmt"
	"log"
	"strconv"
	"sync"

	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

// Three ranks, here goroutines of one process, add what each of them has.
func Example() {
	ctx := context.Background()
	store := rendezvous.NewMem() // processes meet at "tcp://host:port" or in a directory: rendezvous.Open, or FromEnv
	var ranks sync.WaitGroup
	for rank := range 3 {
		ranks.Go(func() {
			w, err := pg.Join(ctx, pg.Config{Rank: rank, Size: 3, Store: store})
			if err != nil {
				log.Fatal(err)
			}
			mine, sum := []float32{float32(rank + 1)}, []float32{0}
			res, err := w.AllReduce(ctx, pg.F32(sum), pg.F32(mine), pg.Sum)
			if err != nil {
				log.Fatal(err)
			}
			if rank == 0 {
				fmt.Println(sum[0], "of ranks", res.Active)
			}
			if err := w.Leave(ctx); err != nil {
				log.Fatal(err)
			}
		})
	}
	ranks.Wait()
	// Output: 6 of ranks [0 1 2]
}

// A rank under a launcher that starts the dead again (serry run --max-restarts): it lives through the deaths of others, and
// who is started again goes on at the members' step.
func ExampleWorld_Boundary() {
	ctx := context.Background()
	cfg, err := pg.FromEnv(ctx)
	if err != nil {
		log.Fatal(err)
	}
	w, err := pg.Join(ctx, cfg)
	if err != nil {
		log.Fatal(err)
	}
	step, _ := strconv.Atoi(string(w.Joined().Attach)) // 0 for a founder
	for ; step < 1000; step++ {
		// Here newcomers enter; one that has just come in stands in this very Boundary.
		passed, err := w.Boundary(ctx, func() []byte { return []byte(strconv.Itoa(step)) })
		if err != nil {
			log.Fatal(err)
		}
		if len(passed.Joined) > 0 {
			fmt.Println("step", step, "slots that came in:", passed.Joined)
		}
		x := []float32{1}
		if _, err := w.AllReduce(ctx, pg.F32(x), pg.F32(x), pg.Sum); err != nil {
			log.Fatal(err)
		}
	}
	if err := w.Leave(ctx); err != nil {
		log.Fatal(err)
	}
}

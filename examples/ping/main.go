// Command ping counts, in each of its steps, the ranks that live: an example of a program that others' deaths do not end.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/serry-project/serry/pg"
)

func main() {
	ctx := context.Background() // of the operations: to end it in one would fail it for all
	stop, _ := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	cfg, err := pg.FromEnv(stop) // RANK, WORLD_SIZE and the rendezvous, as the launcher sets them
	check(err)
	w, err := pg.Join(stop, cfg) // a founder waits for all; who is started again enters at a Boundary of the others
	check(err)
	step, _ := strconv.Atoi(string(w.Joined().Attach)) // where the others are; 0 for a founder
	for epoch := uint64(0); stop.Err() == nil; time.Sleep(10 * time.Millisecond) {
		one, sum := []float32{1}, []float32{0}
		res, err := w.AllReduce(ctx, pg.F32(sum), pg.F32(one), pg.Sum) // over whoever lives, alike on all
		check(err)
		if res.Epoch != epoch {
			epoch = res.Epoch
			fmt.Printf("rank %d (pid %d), step %d: %v of ranks %v (epoch %d)\n", w.Rank(), os.Getpid(), step, sum[0], res.Active, epoch)
		}
		step++
		_, err = w.Boundary(ctx, func() []byte { return []byte(strconv.Itoa(step)) }) // here newcomers enter
		check(err)
	}
	check(w.Leave(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

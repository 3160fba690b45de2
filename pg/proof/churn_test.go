package proof

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

// TestChurn kills and replaces ranks again and again, now and then two at once, until none of the founders may be left.
func TestChurn(t *testing.T) {
	seed := seedOf(t)
	rounds := 4
	if *full {
		rounds = 40
	}
	churn := func(name, links string, mode pg.Mode, hosts bool) {
		t.Run(fmt.Sprintf("%s/%v", name, mode), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 5))
			args := rankArgs{Links: links, Mode: mode, Seed: seed, Pause: time.Millisecond}
			w := newWorld(t, args)
			if hosts {
				w, _ = twoHosts(t, args)
			}
			for r := range founders {
				w.start(r, nil)
			}
			for _, p := range w.Live {
				_, err := p.Line("begins", 30*time.Second)
				require.NoError(t, err)
			}
			for range rounds {
				victims := []int{rnd.IntN(founders)}
				if rnd.IntN(3) == 0 && !hosts { // with both of a host nobody could vouch for them
					victims = append(victims, (victims[0]+1+rnd.IntN(founders-1))%founders)
				}
				for _, v := range victims {
					w.Kill(w.Live[v])
				}
				time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
				for _, v := range victims {
					w.start(v, func(a *rankArgs) { a.Rejoin = true })
				}
				for _, v := range victims {
					_, err := w.Live[v].Line("begins", 30*time.Second)
					require.NoError(t, err)
				}
				time.Sleep(time.Duration(rnd.IntN(30)) * time.Millisecond)
			}
			count := w.finish()
			t.Log(count)
		})
	}
	variants(func(links string, mode pg.Mode) { churn(links, links, mode, false) })
	for _, mode := range []pg.Mode{pg.Raise, pg.Continue} {
		churn("hosts", "auto", mode, true)
	}
}

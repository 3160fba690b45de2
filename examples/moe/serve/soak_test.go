//go:build long

package serve

import (
	"math/rand/v2"
	"testing"
)

// Again and again a rank dies at any moment, also one that has just come, and is replaced.
func TestSoak(t *testing.T) {
	cfg := testConfig(400)
	want := reference(t, cfg)
	for _, links := range []string{"auto", "tcp"} {
		t.Run(links, func(t *testing.T) {
			c := startCluster(t, 4, links, cfg)
			c.bytes(20)
			for range 15 {
				victim := rand.IntN(4)
				c.kill(victim)
				c.survived(c.alive()...)
				c.start(victim, true)
				c.survived(0, 1, 2, 3)
			}
			c.end(want)
		})
	}
}

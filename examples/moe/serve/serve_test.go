package serve

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/serry-project/serry/examples/moe/model"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

const weights = "../weights/model.safetensors"

var prompts = []string{"// Package tree ", "func main() {\n", "type Server struct {\n\tmu sync.Mutex\n", "package x\n\nimport (\n", "if err != nil {"}

// serveAll serves the prompts on n ranks of this process and returns the answers that they agreed on.
func serveAll(t *testing.T, n int, links string, most int) []Answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	as := make([]Answer, len(prompts))
	var mu sync.Mutex
	var eg errgroup.Group
	for r := range n {
		eg.Go(func() error {
			m, err := Load(weights, r, n, 2, 16)
			if err != nil {
				return err
			}
			w, err := pg.Join(ctx, pg.Config{Rank: r, Size: n, Store: st, Links: links})
			if err != nil {
				return err
			}
			defer w.Close()
			err = Run(ctx, w, m, Config{Prompts: prompts, Max: most}, func(e Event) {
				if e.Kind != "token" {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				a := &as[e.Request]
				a.Hashes = append(a.Hashes, e.Hash)
				if e.Token != 0 {
					a.Text = append(a.Text, byte(e.Token))
				}
			})
			if err != nil {
				return err
			}
			return w.Leave(ctx)
		})
	}
	require.NoError(t, eg.Wait())
	return as
}

// Every logit's bits agree with those of one process, for any number of ranks and over any link.
func TestSameBitsOnAnyNumberOfRanks(t *testing.T) {
	m, err := model.Load(weights, nil)
	require.NoError(t, err)
	const most = 24
	want, err := Reference(context.Background(), m, prompts, most, nil)
	require.NoError(t, err)
	for _, links := range []string{"auto", "tcp"} {
		for n := 1; n <= 4; n++ {
			t.Run(fmt.Sprintf("%s/%d", links, n), func(t *testing.T) {
				require.Equal(t, want, serveAll(t, n, links, most))
			})
		}
	}
}

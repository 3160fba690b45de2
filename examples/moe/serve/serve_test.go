package serve

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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

// testConfig is a short run with sampling.
func testConfig(most int) Config {
	prompts := prompts
	if testing.Short() { // under the race detector, which makes the model ten times slower
		prompts, most = prompts[:3], (most+1)/2
	}
	return Config{Prompts: prompts, Max: most, Replicas: 2, Sampling: Sampling{Temperature: 0.7, TopK: 40, Seed: 3}}
}

func reference(t *testing.T, cfg Config) []Answer {
	t.Helper()
	m, err := model.Load(weights, nil)
	require.NoError(t, err)
	want, err := Reference(context.Background(), m, cfg, nil)
	require.NoError(t, err)
	return want
}

// serveAll serves on n ranks of this process and returns what each of them says at the end.
func serveAll(t *testing.T, n int, links string, cfgs ...Config) ([][]Answer, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, fmt.Sprintf("mem://%s-%d", t.Name(), time.Now().UnixNano()))
	require.NoError(t, err)
	ends := make([][]Answer, n)
	var eg errgroup.Group
	for r := range n {
		eg.Go(func() error {
			cfg := cfgs[r%len(cfgs)]
			m, err := Load(weights, r, n, cfg.Replicas, 16)
			if err != nil {
				return err
			}
			w, err := pg.Join(ctx, pg.Config{Rank: r, Size: n, Store: st, Links: links})
			if err != nil {
				return err
			}
			defer w.Close()
			err = Run(ctx, w, m, cfg, nil, func(e Event) {
				if e.Kind == "answer" {
					ends[r] = append(ends[r], *e.Answer)
				}
			})
			if err != nil {
				return err
			}
			return w.Leave(ctx)
		})
	}
	return ends, eg.Wait()
}

// Every logit's bits agree with those of one process, for any number of ranks and over any link, greedy and sampled.
func TestSameBitsOnAnyNumberOfRanks(t *testing.T) {
	for _, temperature := range []float64{0, 0.7} {
		cfg := testConfig(12)
		cfg.Sampling.Temperature = temperature
		want := reference(t, cfg)
		for _, links := range []string{"auto", "tcp"} {
			for n := 1; n <= 4; n++ {
				if testing.Short() && (n < 3 || temperature == 0 || (links == "tcp") == (n == 3)) || temperature == 0 && n < 4 {
					continue
				}
				t.Run(fmt.Sprintf("%v/%s/%d", temperature, links, n), func(t *testing.T) {
					ends, err := serveAll(t, n, links, cfg)
					require.NoError(t, err)
					for r := range ends {
						require.Equal(t, want, ends[r], "rank %d", r)
					}
				})
			}
		}
	}
}

// How a prompt is cut into pieces changes nothing either.
func TestSameBitsInAnyPieces(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	cfg := testConfig(6)
	want := reference(t, cfg)
	for _, rows := range []int{3, 7} { // 3: fewer than a rank has requests, so that they take turns
		cfg.Rows = rows
		ends, err := serveAll(t, 2, "auto", cfg)
		require.NoError(t, err)
		require.Equal(t, want, ends[0], "%d rows", rows)
	}
}

func TestRanksThatServeSomethingElseAreTold(t *testing.T) {
	other := testConfig(8)
	other.Sampling.Seed++
	_, err := serveAll(t, 2, "auto", testConfig(8), other)
	require.ErrorContains(t, err, "serves something else")
}

func TestConfigIsChecked(t *testing.T) {
	m, err := model.Load(weights, func(int, int) bool { return false })
	require.NoError(t, err)
	for want, cfg := range map[string]Config{
		"0 bytes for each prompt":       {Prompts: prompts},
		"prompt 1 has 512 bytes, the m": {Prompts: []string{"a", string(make([]byte, m.Context))}, Max: 1},
	} {
		_, err := Reference(context.Background(), m, cfg, nil)
		require.ErrorContains(t, err, want)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err = Reference(ctx, m, testConfig(1), nil)
	require.ErrorIs(t, err, context.Canceled)
}

// A file that is cut off, or is something else, is an error that names it.
func TestWrongWeights(t *testing.T) {
	whole, err := os.ReadFile(weights)
	require.NoError(t, err)
	for name, b := range map[string][]byte{"cut": whole[:len(whole)/2], "empty": nil, "foreign": []byte("\x7fELF and so on, which are no weights")} {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		_, err := Load(path, 0, 4, 2, 16)
		require.ErrorContains(t, err, path)
	}
}

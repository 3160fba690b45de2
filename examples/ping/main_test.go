package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/rendezvous"

	"github.com/stretchr/testify/require"
)

// The test's binary is also the program, as a rank.
func TestMain(m *testing.M) {
	if os.Getenv("RANK") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Three processes, one is killed and started again: all say who is there, and end when they are asked to.
func TestPing(t *testing.T) {
	srv, err := rendezvous.Listen(context.Background(), "127.0.0.1:0", nil)
	require.NoError(t, err)
	defer srv.Close()
	start := func(rank, again int) *harness.Proc {
		return harness.Start(t, fmt.Sprintf("rank %d", rank), "ping", nil, func(c *exec.Cmd) {
			c.Env = slices.DeleteFunc(c.Env, func(v string) bool { return strings.HasPrefix(v, "SERRY_") })
			c.Env = append(c.Env, fmt.Sprintf("RANK=%d", rank), "WORLD_SIZE=3", "SERRY_RENDEZVOUS="+srv.URL(), fmt.Sprintf("SERRY_REJOIN=%d", again))
		})
	}
	ps := []*harness.Proc{start(0, 0), start(1, 0), start(2, 0)}
	says := func(what string, among ...int) {
		t.Helper()
		for _, r := range among {
			line := regexp.MustCompile(fmt.Sprintf(`^rank %d \(pid \d+\), step \d+: %s$`, r, regexp.QuoteMeta(what)))
			for end := time.Now().Add(20 * time.Second); !slices.ContainsFunc(ps[r].Lines(), line.MatchString); time.Sleep(5 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("rank %d does not say %q, but %q, %s", r, what, ps[r].Lines(), ps[r].Stderr())
				}
			}
		}
	}
	says("3 of ranks [0 1 2] (epoch 1)", 0, 1, 2)
	ps[0].Signal(syscall.SIGKILL)
	says("2 of ranks [1 2] (epoch 2)", 1, 2)
	ps[0] = start(0, 1)
	says("3 of ranks [0 1 2] (epoch 3)", 0, 1, 2)
	for _, p := range ps {
		p.Signal(syscall.SIGTERM)
	}
	for _, p := range ps {
		_, err := p.Wait(20 * time.Second)
		require.NoError(t, err)
	}
}

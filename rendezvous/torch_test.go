package rendezvous_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/rendezvous"
	"github.com/serry-project/serry/rendezvous/storetest"
)

// python returns a python that can import torch.
var python = sync.OnceValues(func() (string, error) {
	candidates := []string{os.Getenv("SERRY_TEST_PYTHON"), "../build/venv/bin/python", "python3"}
	for _, p := range candidates {
		if p != "" && exec.Command(p, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))").Run() == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("no python that imports torch: set SERRY_TEST_PYTHON, or make venv")
})

func needPython(t *testing.T) string {
	if testing.Short() {
		t.Skip("starts python")
	}
	p, err := python()
	if err != nil {
		t.Skip(err)
	}
	return p
}

// Our client on torch's own servers.
func TestTorchServers(t *testing.T) {
	p := needPython(t)
	t.Parallel()
	cmd := exec.Command(p, "testdata/torch_servers.py")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		_ = in.Close()
		_ = cmd.Wait()
	}()
	lines := bufio.NewScanner(out)
	line := func() string {
		require.True(t, lines.Scan(), "the python process has ended")
		return lines.Text()
	}
	require.Contains(t, line(), "torch")
	var mu sync.Mutex
	for backend, suite := range map[string]func(*testing.T, storetest.Fresh){"libuv": storetest.Run, "legacy": storetest.Plain} {
		t.Run(backend, func(t *testing.T) {
			suite(t, func(t *testing.T) func() rendezvous.Store {
				mu.Lock()
				defer mu.Unlock()
				_, err := fmt.Fprintln(in, backend)
				require.NoError(t, err)
				return opener(t, "torch://127.0.0.1:"+line())
			})
			mu.Lock()
			defer mu.Unlock()
			_, err := fmt.Fprintln(in, backend)
			require.NoError(t, err)
			addr := "127.0.0.1:" + line()
			_, err = rendezvous.Open(soon(t), "tcp://"+addr)
			require.ErrorIs(t, err, rendezvous.ErrNotRendezvous)
			require.ErrorContains(t, err, "write torch://"+addr)
		})
	}
}

// Torch's own client on our server.
func TestTorchClient(t *testing.T) {
	p := needPython(t)
	t.Parallel()
	server, ctx := serve(t), soon(t)
	s := open(t, server.URL())
	require.NoError(t, s.Set(ctx, "from-go", []byte("go")))
	host, port, _ := strings.Cut(server.Addr(), ":")
	cmd := exec.Command(p, "testdata/torch_client.py", host, port)
	cmd.Env = append(os.Environ(), "TORCH_CPP_LOG_LEVEL=FATAL")
	var text strings.Builder
	cmd.Stdout, cmd.Stderr = &text, &text
	require.NoError(t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	err := s.Wait(ctx, "ready")
	if err == nil {
		require.NoError(t, s.Set(ctx, "answer", []byte("42")))
	}
	if err := <-done; err != nil || !strings.Contains(text.String(), "ok") {
		t.Fatalf("%v\n%s", err, text.String())
	}
	v, err := s.Get(ctx, "from-torch")
	require.NoError(t, err)
	require.Equal(t, "torch", string(v))
}

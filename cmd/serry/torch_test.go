package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// needPython returns a python that can import torch.
func needPython(t *testing.T) string {
	if testing.Short() {
		t.Skip("starts python")
	}
	for _, p := range []string{os.Getenv("SERRY_TEST_PYTHON"), "../../build/venv/bin/python", "python3"} {
		if p != "" && exec.Command(p, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))").Run() == nil {
			return p
		}
	}
	t.Skip("no python that imports torch: set SERRY_TEST_PYTHON, or make venv")
	return ""
}

// Programs of torch that know nothing of serry.
func TestRunTorch(t *testing.T) {
	p := needPython(t)
	t.Parallel()
	sizes := []int{2}
	if long {
		sizes = []int{1, 2, 3, 4, 8}
	}
	for _, n := range sizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := run(args("run --ranks", fmt.Sprint(n), "--", p, "testdata/allreduce.py"), &stdout, &stderr)
			require.Zero(t, code, "%s%s", &stdout, &stderr)
			for rank := range n {
				require.Contains(t, stdout.String(), fmt.Sprintf("[%d] sum %d.0 of %d\n", rank, n*(n+1)/2, n))
			}
		})
	}
}

// Go programs under torchrun find each other by its store.
func TestTorchrun(t *testing.T) {
	p := needPython(t)
	t.Parallel()
	cmd := exec.Command(p, args("-m torch.distributed.run --no-python --standalone --nproc-per-node 2", self(t), "--as rank meet")...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "met 0 of 2")
	require.Contains(t, string(out), "met 1 of 2")
}

package mutate

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// module makes a small module with the package broken and one file.
func module(t *testing.T, file string) (root string) {
	root = t.TempDir()
	write := func(name, text string) {
		p := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
	}
	write("go.mod", "module example.test/m\n\ngo 1.26\n")
	write("main.go", file)
	for _, f := range []string{"broken.go", "names.go"} {
		b, err := os.ReadFile(filepath.Join("broken", f))
		require.NoError(t, err)
		write(filepath.Join(brokenDir, f), string(b))
	}
	return root
}

const program = `// Doc.
package main

import (
	"flag"
	"fmt"
)

func main() {
	flag.Parse()
	a, b := 6, 3
	x := a + b
	y := a * b
	fmt.Println(x, y)
}
`

func plus() []Mutation {
	return []Mutation{
		{Name: "minus", Property: "P1", File: "main.go", Old: "x := a + b", New: "x := a + b\n\tif broken.Is(\"minus\") {\n\t\tx = a - b\n\t}"},
		{Name: "by", Property: "P2", File: "main.go", Old: "y := a * b", New: "y := a * b\n\tif broken.Is(\"by\") {\n\t\ty = a / b\n\t}"},
		{Name: "minus", Property: "P1", File: "main.go", Old: "fmt.Println(x, y)", New: "if broken.Is(\"minus\") {\n\t\tfmt.Print(\"minus: \")\n\t}\n\tfmt.Println(x, y)"},
	}
}

// TestWrite: one build has all mutations, and does what its flag says.
func TestWrite(t *testing.T) {
	root := module(t, program)
	overlay, err := Write(root, t.TempDir(), plus())
	require.NoError(t, err)
	bin := filepath.Join(t.TempDir(), "prog")
	run(t, root, "go", "build", "-overlay", overlay, "-o", bin, ".")
	require.Equal(t, "9 18\n", run(t, root, bin))
	require.Equal(t, "minus: 3 18\n", run(t, root, bin, "-broken", "minus"))
	require.Equal(t, "9 2\n", run(t, root, bin, "-broken", "by"))
	out, err := exec.Command(bin, "-broken", "other").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "this program has minus, by")
	b, err := os.ReadFile(filepath.Join(root, "main.go"))
	require.NoError(t, err)
	require.Equal(t, program, string(b), "the code itself is as it was")
}

// TestRefused: a table that does not fit the code is refused, with the entry named.
func TestRefused(t *testing.T) {
	root := module(t, program)
	for why, change := range map[string]func(ms []Mutation){
		"occurs 0 times":        func(ms []Mutation) { ms[1].Old = "y := a ^ b" },
		"occurs 10 times":       func(ms []Mutation) { ms[1].Old = "a" },
		"does not ask":          func(ms []Mutation) { ms[1].New = "y := 3" },
		`asks broken.Is("x")`:   func(ms []Mutation) { ms[1].New = `y := 3; _ = broken.Is("x")` },
		"no such file":          func(ms []Mutation) { ms[1].File = "other.go" },
		"needs a name":          func(ms []Mutation) { ms[1].Name = "" },
		"change the same place": func(ms []Mutation) { ms[1].Old = "a + b\n\ty := a * b" },
		"is no Go any more":     func(ms []Mutation) { ms[1].New = `y := a * (broken.Is("by")` },
	} {
		ms := plus()
		change(ms)
		_, err := Write(root, t.TempDir(), ms)
		require.ErrorContains(t, err, why)
		require.Regexp(t, `mutation "by"|mutation ""|main\.go with`, err.Error(), why)
	}
	_, err := Write(t.TempDir(), t.TempDir(), nil)
	require.ErrorContains(t, err, "no module")
}

func run(t *testing.T, dir, name string, args ...string) string {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", strings.Join(cmd.Args, " "), out)
	return string(out)
}

var all = flag.Bool("mutate.all", long, "every mutation, and all that is explored without one")

// cheap are the mutations that the ordinary run tries: those that the project promises to find in shared memory.
var cheap = []string{"counter instead of seals", "no re-check before return", "slot reused too early", "wake lost after the swap", "late plain store"}

var violation = regexp.MustCompile(`states_test\.go:\d+: (P\d+: .*)`)

// TestSharedWords: each mutation of the protocol on shared words is found in collectives' ordinary exploration of the states
// of two ranks, and without one nothing is found.
func TestSharedWords(t *testing.T) {
	root := filepath.Join("..", "..")
	overlay, err := Write(root, t.TempDir(), All())
	require.NoError(t, err)
	bin := filepath.Join(t.TempDir(), "collectives.test")
	run(t, root, "go", "test", "-overlay", overlay, "-c", "-o", bin, "./collectives")
	explore := func(name string) (out string, err error) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, bin, "-test.run", "^TestStates$/^2_ranks", "-test.failfast", "-test.v", "-broken", name)
		cmd.Dir = filepath.Join(root, "collectives")
		b, err := cmd.CombinedOutput()
		return string(b), err
	}
	names := cheap
	if *all {
		names = Names(Collectives)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			out, err := explore(name)
			found := violation.FindStringSubmatch(out)
			require.Error(t, err, "not found: %s", out)
			require.NotNil(t, found, out)
			t.Logf("found in %v: %s", time.Since(begun).Round(time.Millisecond), found[1])
		})
	}
	if *all {
		t.Run("none", func(t *testing.T) {
			out, err := explore("")
			require.NoError(t, err, out)
		})
	}
}

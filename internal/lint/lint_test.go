package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const maxLines = 600

// pure lists the packages without clock, lock, goroutine or I/O.
var pure = []string{"fault", "collectives/plan", "ep/route", "ep/eplb", "device/topo", "store/place",
	"internal/dtype", "internal/slots", "internal/history"}

// impure lists what those may not import, with everything below it.
var impure = []string{"net", "os", "sync", "context", "syscall", "log", "golang.org/x/sys", "golang.org/x/sync"}

// clock lists the functions and types of package time that read or wait for the
// clock. The rest, above all time.Duration, is arithmetic.
var clock = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker", "Timer", "Ticker"}

// environment lists the functions that read or write the environment. Environ
// is not among them: it hands all of it to a child.
var environment = []string{"Getenv", "LookupEnv", "ExpandEnv", "Setenv", "Unsetenv", "Clearenv"}

// rule returns what is wrong with a tree, one sentence each.
type rule func(t *tree) []string

var rules = map[string]rule{
	"imports":     imports,
	"pure":        purity,
	"unsafe":      unsafeFiles,
	"cgo":         cgo,
	"environment": env,
	"length":      length,
	"comment":     packageComment,
	"gofmt":       gofmt,
}

func TestRules(t *testing.T) {
	tr := mustTree(t)
	for name, r := range rules {
		t.Run(name, func(t *testing.T) {
			for _, problem := range r(tr) {
				t.Error(problem)
			}
		})
	}
}

func imports(t *tree) (bad []string) {
	o, err := parsePolicy(policy)
	if err != nil {
		return []string{err.Error()}
	}
	t.goFiles(func(f *file) {
		if f.testOnly() {
			return
		}
		if o.place(f.dir()) == "" && f.dir() != "." {
			bad = append(bad, fmt.Sprintf("%s: the policy has no place for folder %s: add it", f.path, f.dir()))
			return
		}
		for _, p := range f.imports() {
			if to, ok := t.within(p); ok && f.dir() != "." && !o.allows(f.dir(), to) {
				bad = append(bad, fmt.Sprintf("%s: %s may not import %s: see policy", f.path, f.dir(), to))
			}
		}
	})
	return bad
}

func purity(t *tree) (bad []string) {
	t.goFiles(func(f *file) {
		if f.isTest() || !slices.Contains(pure, f.dir()) {
			return
		}
		for _, p := range f.imports() {
			if to, ok := t.within(p); ok && !slices.Contains(pure, to) {
				bad = append(bad, fmt.Sprintf("%s: a pure package imports %s, which is not", f.path, to))
			}
			if slices.ContainsFunc(impure, func(i string) bool { return p == i || strings.HasPrefix(p, i+"/") }) {
				bad = append(bad, fmt.Sprintf("%s: a pure package imports %s: take a value, return an effect", f.path, p))
			}
		}
		f.uses(func(n ast.Node, pkg, name string) {
			if pkg == "time" && slices.Contains(clock, name) {
				bad = append(bad, fmt.Sprintf("%s: a pure package uses time.%s: time is an argument", f.at(n), name))
			}
		})
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if _, ok := n.(*ast.GoStmt); ok {
				bad = append(bad, fmt.Sprintf("%s: a pure package starts a goroutine", f.at(n)))
			}
			return true
		})
	})
	return bad
}

func unsafeFiles(t *tree) (bad []string) {
	t.goFiles(func(f *file) {
		name := strings.TrimSuffix(strings.TrimSuffix(f.path, ".go"), "_test")
		if slices.Contains(f.imports(), "unsafe") && !strings.HasSuffix(name, "_unsafe") && path.Dir(f.path) != "bindings/c" {
			bad = append(bad, fmt.Sprintf("%s: unsafe is imported only in *_unsafe.go", f.path))
		}
	})
	return bad
}

func cgo(t *tree) (bad []string) {
	var rdma []string
	t.goFiles(func(f *file) {
		switch {
		case !slices.Contains(f.imports(), "C"), f.dir() == "bindings/c":
		case f.dir() == "device/rdma":
			rdma = append(rdma, f.path)
		default:
			bad = append(bad, fmt.Sprintf(`%s: "C" is imported only in bindings/c and one file of device/rdma`, f.path))
		}
	})
	if len(rdma) > 1 {
		bad = append(bad, fmt.Sprintf(`"C" is imported in %d files of device/rdma, want one: %v`, len(rdma), rdma))
	}
	return bad
}

func env(t *tree) (bad []string) {
	t.goFiles(func(f *file) {
		if f.testOnly() || f.dir() == "internal/knob" {
			return
		}
		f.uses(func(n ast.Node, pkg, name string) {
			if (pkg == "os" || pkg == "syscall" || pkg == "golang.org/x/sys/unix") && slices.Contains(environment, name) {
				bad = append(bad, fmt.Sprintf("%s: %s.%s: the environment is read in internal/knob and never written",
					f.at(n), path.Base(pkg), name))
			}
		})
	})
	return bad
}

func length(t *tree) (bad []string) {
	for _, f := range t.files {
		if n := f.lines(); n > maxLines && !f.generated() {
			bad = append(bad, fmt.Sprintf("%s: %d lines, at most %d are allowed", f.path, n, maxLines))
		}
	}
	return bad
}

func packageComment(t *tree) (bad []string) {
	type pkg struct{ dir, name string }
	comments, hasCode := map[pkg][]string{}, map[pkg]bool{}
	t.goFiles(func(f *file) {
		p := pkg{f.dir(), f.ast.Name.Name}
		if f.ignored() || strings.HasSuffix(p.name, "_test") {
			return
		}
		if !f.isTest() {
			hasCode[p] = true
		}
		if _, ok := comments[p]; !ok {
			comments[p] = nil
		}
		if f.ast.Doc != nil && strings.TrimSpace(f.ast.Doc.Text()) != "" {
			comments[p] = append(comments[p], f.path)
		}
	})
	for p, files := range comments {
		switch {
		case hasCode[p] && len(files) == 0:
			bad = append(bad, fmt.Sprintf("%s: package %s has no comment that says what it is for", p.dir, p.name))
		case len(files) > 1:
			slices.Sort(files)
			bad = append(bad, fmt.Sprintf("%s: package %s has %d comments, want one: %v", p.dir, p.name, len(files), files))
		}
	}
	slices.Sort(bad)
	return bad
}

func gofmt(t *tree) (bad []string) {
	t.goFiles(func(f *file) {
		if out, err := format.Source(f.src); err != nil || !bytes.Equal(out, f.src) {
			bad = append(bad, fmt.Sprintf("%s: not formatted: run gofmt -w", f.path))
		}
	})
	return bad
}

// leaks finds what belongs to one developer's machine: paths of its home and
// mirrors of package registries. The patterns are split so that this file has
// none of them.
var leaks = []*regexp.Regexp{
	regexp.MustCompile("(^|[^A-Za-z0-9_.~/-])/(wo" + "rk|ho" + "me|ro" + "ot|Us" + "ers)/[A-Za-z0-9._-]"),
	regexp.MustCompile("(?i)pro" + `xy\.golang\.org|py` + `pi\.org|pythonho` + `sted\.org|npm` + `js\.org|crates\.` + "io"),
	regexp.MustCompile("(?i)(GOPRO" + `XY|index[-_]u` + `rl|_REGI` + `STRY)\s*[= ]\s*["']?https?://(10|127|172|192|local)`),
}

// leak returns the lines of a text that have a leak.
func leak(name string, text []byte) (bad []string) {
	if bytes.IndexByte(text, 0) >= 0 {
		return nil // not a text
	}
	for i, line := range bytes.Split(text, []byte("\n")) {
		for _, re := range leaks {
			if m := re.Find(line); m != nil {
				bad = append(bad, fmt.Sprintf("%s:%d: %q is of one machine", name, i+1, m))
			}
		}
	}
	return bad
}

// trackedFiles calls fn for each file that git tracks, with its mode in git.
func trackedFiles(t *testing.T, fn func(name, mode string)) {
	out, err := exec.Command("git", "-C", root, "ls-files", "-s", "-z").Output()
	if err != nil {
		t.Skip("not a git checkout")
	}
	for line := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		about, name, _ := strings.Cut(line, "\t")
		fn(name, strings.Fields(about)[0])
	}
}

func TestNoLeaks(t *testing.T) {
	trackedFiles(t, func(name, _ string) {
		info, err := os.Lstat(filepath.Join(root, name))
		if err != nil || !info.Mode().IsRegular() || info.Size() > 4<<20 || path.Base(name) == "go.sum" {
			return
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		for _, problem := range leak(name, text) {
			t.Error(problem)
		}
	})
}

// maxBytes bounds a tracked file; large lists those that may be larger, and how large. Binary files that are data are
// tracked under testdata or by name, in large or in data.
const maxBytes = 64 << 10

var (
	large = map[string]int64{"examples/moe/weights/model.safetensors": 8 << 20}
	data  = []string{"examples/moe/weights/reference.safetensors"}
)

// programs are how files begin that a machine runs: ELF, Mach-O of both orders and widths and of several machines, PE,
// WebAssembly, archives of objects.
var programs = []string{"\x7fELF", "\xfe\xed\xfa\xce", "\xfe\xed\xfa\xcf", "\xce\xfa\xed\xfe", "\xcf\xfa\xed\xfe",
	"\xca\xfe\xba\xbe", "MZ", "\x00asm", "!<arch>\n"}

// tracked says what is wrong with a tracked file: it was built, or it is too large.
func tracked(name, mode string, size int64, head []byte) (bad []string) {
	_, isLarge := large[name]
	binary := bytes.IndexByte(head, 0) >= 0
	switch {
	case slices.ContainsFunc(programs, func(p string) bool { return bytes.HasPrefix(head, []byte(p)) && (p != "MZ" || binary) }):
		bad = append(bad, name+": a program that was built: only its source is tracked")
	case mode == "100755" && !bytes.HasPrefix(head, []byte("#!")):
		bad = append(bad, name+": executable, and no script")
	case binary && !isLarge && !slices.Contains(data, name) && !strings.Contains("/"+name, "/testdata/"):
		bad = append(bad, name+": not a text: if it is data, name it in internal/lint")
	}
	if limit := max(maxBytes, large[name]); size > limit {
		bad = append(bad, fmt.Sprintf("%s: %d bytes, at most %d are allowed", name, size, limit))
	}
	return bad
}

func TestTrackedFiles(t *testing.T) {
	trackedFiles(t, func(name, mode string) {
		f, err := os.Open(filepath.Join(root, name))
		if err != nil {
			return // removed, and not yet in git
		}
		defer f.Close()
		info, err := f.Stat()
		require.NoError(t, err)
		if !info.Mode().IsRegular() {
			return
		}
		head := make([]byte, 8<<10)
		n, err := io.ReadFull(f, head)
		if err != io.EOF && err != io.ErrUnexpectedEOF {
			require.NoError(t, err)
		}
		for _, problem := range tracked(name, mode, info.Size(), head[:n]) {
			t.Error(problem)
		}
	})
}

//go:build ignore

// Check runs the checks of the project one after the other, whatever the outcome of each, and ends with what they found:
//
//	go run scripts/check.go scripts/gotest.go [-p 2] [-pkg ./...] [-fuzztime 20s] step...
//
// Everything printed also goes to build/check.log. The last line is plain: "312 passed, 0 failed, 3 skipped", of tests
// and of checks that are not tests.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

var (
	parallel           = flag.Int("p", 2, "packages tested at once")
	packages           = flag.String("pkg", "./...", "packages, separated by spaces")
	fuzzTime           = flag.String("fuzztime", "20s", "time for each fuzz target")
	out      io.Writer = os.Stdout
)

// result is what a step found. A step that is not made of tests counts as one.
type result struct {
	passed, failed, skipped int
	packages                int
	reasons                 []string // of what was skipped or failed, for the end
}

func (r *result) add(x result) {
	r.passed += x.passed
	r.failed += x.failed
	r.skipped += x.skipped
	r.packages += x.packages
	r.reasons = append(r.reasons, x.reasons...)
}

func pass() result { return result{passed: 1} }

func fail(reason string, args ...any) result {
	return result{failed: 1, reasons: []string{"failed: " + fmt.Sprintf(reason, args...)}}
}

func skip(reason string, args ...any) result {
	return result{skipped: 1, reasons: []string{"skipped: " + fmt.Sprintf(reason, args...)}}
}

type step struct {
	name, what string
	budget     time.Duration
	run        func(*step) result
}

var steps = []step{
	{"build", "everything compiles", 5 * time.Minute, build},
	{"fmt", "gofmt has nothing to change", time.Minute, gofmt},
	{"vet", "go vet", 4 * time.Minute, vet},
	{"staticcheck", "staticcheck", 5 * time.Minute, staticcheck},
	{"lint", "the rules of the house (tests of internal/lint)", 3 * time.Minute, lint},
	{"nocgo", "everything compiles without cgo", 3 * time.Minute, nocgo},
	{"cross", "everything compiles for other systems", 6 * time.Minute, cross},
	{"test", "the Go tests", 8 * time.Minute, test},
	{"tags", "the tests that need a build tag", 4 * time.Minute, tags},
	{"race", "the tests of packages with goroutines, short (kills at some points with each link), under the race detector", 6 * time.Minute, race},
	{"long", "the Go tests with the build tag long: the whole matrix of the proof, soaks", time.Hour, long},
	{"longrace", "the same of packages with goroutines, under the race detector", 2 * time.Hour, longRace},
	{"fuzz", "every fuzz target for -fuzztime", time.Hour, fuzz},
}

func main() {
	flag.Parse()
	var todo []step
	for _, name := range flag.Args() {
		i := slices.IndexFunc(steps, func(s step) bool { return s.name == name })
		if i < 0 {
			fmt.Fprintf(os.Stderr, "check: no step %q\n", name)
			os.Exit(2)
		}
		todo = append(todo, steps[i])
	}
	if len(todo) == 0 {
		fmt.Fprintln(os.Stderr, "check: no steps; these are known:")
		for _, s := range steps {
			fmt.Fprintf(os.Stderr, "  %-12s %s\n", s.name, s.what)
		}
		os.Exit(2)
	}
	if err := os.MkdirAll("build", 0o777); err == nil {
		if log, err := os.Create("build/check.log"); err == nil {
			defer log.Close()
			out = io.MultiWriter(os.Stdout, log)
		}
	}
	var total result
	var table, reasons []string
	for i := range todo {
		s := &todo[i]
		fmt.Fprintf(out, "=== %s: %s\n", s.name, s.what)
		begin := time.Now()
		r := s.run(s)
		total.add(r)
		line := fmt.Sprintf("%-12s %4d passed %4d failed %4d skipped %8v", s.name, r.passed, r.failed, r.skipped, time.Since(begin).Round(100*time.Millisecond))
		if r.packages > 0 {
			line += fmt.Sprintf("  %d packages", r.packages)
		}
		table = append(table, line)
		for _, x := range r.reasons {
			reasons = append(reasons, fmt.Sprintf("%s: %s", s.name, x))
		}
	}
	fmt.Fprintln(out, "=== summary")
	for _, list := range [][]string{reasons, table} {
		for _, line := range list {
			fmt.Fprintln(out, line)
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	if total.failed > 0 {
		os.Exit(1)
	}
}

// command runs a program to its end or the end of the step's budget. What it prints goes to w.
func (s *step) command(w io.Writer, env []string, name string, args ...string) error {
	if len(env) > 0 {
		fmt.Fprintf(out, "%s ", strings.Join(env, " "))
	}
	fmt.Fprintf(out, "%s %s\n", name, strings.Join(args, " "))
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(interrupt)
	group := -cmd.Process.Pid
	select {
	case err := <-done:
		syscall.Kill(group, syscall.SIGKILL) // what it left behind
		return err
	case sig := <-interrupt:
		syscall.Kill(group, syscall.SIGKILL)
		fmt.Fprintf(out, "check: %v\n", sig)
		os.Exit(130)
	case <-time.After(s.budget):
		syscall.Kill(group, syscall.SIGQUIT) // Go programs print their stacks
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			syscall.Kill(group, syscall.SIGKILL)
			<-done
		}
		syscall.Kill(group, syscall.SIGKILL)
		return fmt.Errorf("ran over its budget of %v", s.budget)
	}
	return nil
}

// simple is a step that is one command.
func (s *step) simple(env []string, name string, args ...string) result {
	if err := s.command(out, env, name, args...); err != nil {
		return fail("%s %s: %v", name, strings.Join(args, " "), err)
	}
	return pass()
}

func pkgs() []string { return strings.Fields(*packages) }

func with(args ...string) []string { return append(args, pkgs()...) }

func build(s *step) result { return s.simple(nil, "go", with("build")...) }

func vet(s *step) result { return s.simple(nil, "go", with("vet")...) }

func staticcheck(s *step) result { return s.simple(nil, "go", with("tool", "staticcheck")...) }

func nocgo(s *step) result { return s.simple([]string{"CGO_ENABLED=0"}, "go", with("build")...) }

func cross(s *step) (r result) {
	for _, target := range []string{"linux/arm64", "darwin/arm64"} {
		goos, goarch, _ := strings.Cut(target, "/")
		env := []string{"CGO_ENABLED=0", "GOOS=" + goos, "GOARCH=" + goarch}
		r.add(s.simple(env, "go", with("build")...))
		r.add(s.simple(env, "go", with("vet")...)) // the tests too
	}
	return r
}

func gofmt(s *step) (r result) {
	count := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (name[0] == '.' || slices.Contains([]string{"build", "bin", "dist", "out", "testdata"}, name)) {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		count++
		if want, err := format.Source(text); err != nil || !bytes.Equal(text, want) {
			r.add(fail("gofmt -w %s", path))
		}
		return nil
	})
	if err != nil {
		r.add(fail("%v", err))
	}
	fmt.Fprintf(out, "%d files\n", count)
	if r.failed == 0 {
		return pass()
	}
	return r
}

func lint(s *step) result {
	if _, err := os.Stat("internal/lint"); err != nil {
		return skip("there is no internal/lint")
	}
	return s.goTest(nil, "./internal/lint/...")
}

func test(s *step) result { return s.goTest(nil, pkgs()...) }

func long(s *step) result { return s.goTest([]string{"-tags", "long", "-count", "1"}, pkgs()...) }

// tagNames are the build tags that change what is tested.
var tagNames = []string{"faultpoint", "noasm"}

// tags tests, for each tag, the packages that have a file which asks for it.
func tags(s *step) (r result) {
	all, err := list()
	if err != nil {
		return fail("%v", err)
	}
	for _, tag := range tagNames {
		word := regexp.MustCompile(`(?m)^//go:build .*\b` + tag + `\b|needs -tags ` + tag)
		var chosen []string
		for _, p := range all {
			if p.anyFile(func(name string, text []byte) bool { return word.Match(text) }) {
				chosen = append(chosen, p.ImportPath)
			}
		}
		if len(chosen) > 0 {
			r.add(s.goTest([]string{"-tags", tag}, chosen...))
		}
	}
	return r
}

// race is short: of pg/proof's points it is those that -short chooses, some of each kind of link, killed in processes that
// the race detector watches too.
func race(s *step) result { return s.race("-short") }

func longRace(s *step) result { return s.race("-tags", "long") }

func (s *step) race(args ...string) result {
	if _, err := exec.LookPath("gcc"); err != nil {
		return skip("the race detector needs gcc, which is missing (make deps)")
	}
	all, err := list()
	if err != nil {
		return fail("%v", err)
	}
	var chosen []string
	for _, p := range all {
		if p.tested() && p.anyFile(startsGoroutines) {
			chosen = append(chosen, p.ImportPath)
		}
	}
	if len(chosen) == 0 {
		return skip("no package starts goroutines")
	}
	return s.goTest(append([]string{"-race"}, args...), chosen...)
}

// startsGoroutines says whether a file has a go statement, or a call of a method Go (sync.WaitGroup has one).
func startsGoroutines(name string, text []byte) (found bool) {
	f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return true // the compiler will say more
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Go" {
				found = true
			}
		}
		return !found
	})
	return found
}

func fuzz(s *step) (r result) {
	all, err := list()
	if err != nil {
		return fail("%v", err)
	}
	target := regexp.MustCompile(`(?m)^func (Fuzz\w*)\(`)
	for _, p := range all {
		p.anyFile(func(name string, text []byte) bool {
			if strings.HasSuffix(name, "_test.go") {
				for _, m := range target.FindAllSubmatch(text, -1) {
					r.add(s.simple(nil, "go", "test", "-run", "^$", "-fuzz", "^"+string(m[1])+"$", "-fuzztime", *fuzzTime, p.ImportPath))
				}
			}
			return false
		})
	}
	if r.passed+r.failed == 0 {
		return skip("there are no fuzz targets")
	}
	return r
}

//go:build ignore

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// goPackage is a part of what go list -json prints.
type goPackage struct {
	Dir, ImportPath                                      string
	GoFiles, CgoFiles, IgnoredGoFiles, SFiles            []string
	TestGoFiles, XTestGoFiles, IgnoredOtherFiles, HFiles []string
}

// list returns the packages to check. What does not even parse is listed too.
func list() (all []*goPackage, err error) {
	cmd := exec.Command("go", with("list", "-e", "-json")...)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for dec := json.NewDecoder(bytes.NewReader(text)); ; {
		p := new(goPackage)
		if err := dec.Decode(p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		all = append(all, p)
	}
}

func (p *goPackage) tested() bool { return len(p.TestGoFiles)+len(p.XTestGoFiles) > 0 }

// anyFile says whether fn is true of one of the package's files.
func (p *goPackage) anyFile(fn func(name string, text []byte) bool) bool {
	names := slices.Concat(p.GoFiles, p.CgoFiles, p.IgnoredGoFiles, p.SFiles, p.TestGoFiles, p.XTestGoFiles, p.IgnoredOtherFiles)
	return slices.ContainsFunc(names, func(name string) bool {
		text, err := os.ReadFile(filepath.Join(p.Dir, name))
		return err == nil && fn(name, text)
	})
}

// event is a line of go test -json.
type event struct {
	Action, Package, ImportPath, Test, Output string
}

// goTest runs go test and prints its lines about packages as they come, and everything about tests that fail.
func (s *step) goTest(args []string, packages ...string) result {
	c := &counter{begin: time.Now(), text: map[string][]string{}, running: map[string]bool{}, latest: map[string]string{}, parts: map[string]int{}, failedIn: map[string]int{}}
	stop := make(chan struct{})
	go c.heartbeat(stop)
	r, w := io.Pipe()
	read := make(chan struct{})
	go func() {
		defer close(read)
		c.read(r)
	}()
	all := append([]string{"test", "-json", "-p", fmt.Sprint(*parallel), "-timeout", (s.budget / 2).String()}, args...)
	err := s.command(w, nil, "go", append(all, packages...)...)
	w.Close()
	<-read
	close(stop)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.interrupted()
	if err != nil && c.failed == 0 {
		c.add(fail("go test: %v", err))
	}
	return c.result
}

// counter is the state of a run of go test.
type counter struct {
	mu       sync.Mutex
	begin    time.Time
	text     map[string][]string // output so far of each test (package + space + name) and package
	running  map[string]bool     // packages
	latest   map[string]string   // test that was heard of last, by package
	parts    map[string]int      // that have ended, of each test (as text)
	failedIn map[string]int      // tests that failed, by package
	result
}

func (c *counter) read(r io.Reader) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			c.mu.Lock()
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				c.event(&e)
			} else {
				out.Write(line)
			}
			c.mu.Unlock()
		}
		if err != nil {
			return
		}
	}
}

func (c *counter) event(e *event) {
	top, _, sub := strings.Cut(e.Test, "/")
	key := e.Package
	if top != "" {
		key += " " + top // a test's output is kept with that of its parts
	}
	switch e.Action {
	case "start":
		c.running[e.Package] = true
	case "run":
		c.latest[e.Package] = top
	case "build-output":
		fmt.Fprint(out, e.Output)
	case "output":
		if e.Test == "" && aboutPackage(e.Output) {
			fmt.Fprint(out, e.Output)
			return
		}
		c.text[key] = append(c.text[key], e.Output)
	case "pass", "skip", "fail":
		if sub {
			c.latest[e.Package] = top
			c.parts[key]++
			return
		}
		if top == "" {
			c.ended(e)
			delete(c.text, key)
			return
		}
		switch e.Action {
		case "pass":
			c.passed++
		case "skip":
			c.skipped++
			c.reasons = append(c.reasons, fmt.Sprintf("skipped: %s %s: %s", e.Package, top, reason(c.text[key])))
		case "fail":
			c.failed++
			c.failedIn[e.Package]++
			c.reasons = append(c.reasons, fmt.Sprintf("failed: %s %s", e.Package, top))
			c.dump(key)
		}
		delete(c.text, key)
	}
}

// ended counts a package.
func (c *counter) ended(e *event) {
	delete(c.running, e.Package)
	if e.Action == "skip" { // no test files
		return
	}
	c.packages++
	if e.Action == "fail" && c.failedIn[e.Package] == 0 {
		c.failed++
		c.reasons = append(c.reasons, fmt.Sprintf("failed: %s as a whole", e.Package))
	}
	if e.Action == "fail" {
		for key := range c.text { // tests that a panic or a timeout cut short
			if strings.HasPrefix(key, e.Package+" ") {
				c.dump(key)
				delete(c.text, key)
			}
		}
		c.dump(e.Package)
	}
}

// interrupted shows what was under way when go test was stopped.
func (c *counter) interrupted() {
	for p := range c.running {
		for key := range c.text {
			if key == p || strings.HasPrefix(key, p+" ") {
				c.dump(key)
			}
		}
		c.failed++
		c.reasons = append(c.reasons, fmt.Sprintf("failed: %s did not end", p))
	}
}

func (c *counter) dump(key string) {
	for _, line := range c.text[key] {
		fmt.Fprint(out, line)
	}
}

// aboutPackage says whether a line is go test's own about a package.
func aboutPackage(line string) bool {
	for _, start := range []string{"ok  \t", "FAIL\t", "?   \t", "---\t"} {
		if strings.HasPrefix(line, start) {
			return true
		}
	}
	return false
}

// reason is the last line that a skipped test printed before the one about itself.
func reason(lines []string) string {
	for _, line := range slices.Backward(lines) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "---") && !strings.HasPrefix(line, "===") {
			return line
		}
	}
	return "no reason given"
}

// heartbeat shows that something is going on.
func (c *counter) heartbeat(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(30 * time.Second):
		}
		c.mu.Lock()
		var names []string
		for p := range c.running {
			name, test := p[strings.LastIndexByte(p, '/')+1:], c.latest[p]
			if n := c.parts[p+" "+test]; n > 0 {
				name += fmt.Sprintf(" (%s: %d parts)", test, n)
			}
			names = append(names, name)
		}
		slices.Sort(names)
		fmt.Fprintf(out, "... %v: %d passed, %d failed, %d skipped; running: %s\n", time.Since(c.begin).Round(time.Second), c.passed, c.failed, c.skipped, strings.Join(names, ", "))
		c.mu.Unlock()
	}
}

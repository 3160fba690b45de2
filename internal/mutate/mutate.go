// Package mutate breaks production code one line at a time, to see whether the checkers notice. The code has no hooks for
// that: Write makes changed copies of its files, and "go build -overlay" or "go test -overlay" builds with them.
//
// The mutations of a table are all in one build, and one of them, or none, is chosen at run time (package broken).
package mutate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Mutation breaks one line. Several entries of one Name are one mutation, in several places.
type Mutation struct {
	Name     string // what the checker is asked to find
	Property string // the promise that it breaks: P1 to P10
	File     string // relative to the root of the module
	Old      string // occurs exactly once in File
	New      string // what stands there instead: Go source that does what Old does unless broken.Is(Name)
}

func (m *Mutation) String() string { return fmt.Sprintf("mutation %q of %s", m.Name, m.File) }

// Names lists the names of a table, each once, in its order: the number of a mutation is its place here, from 1 on.
func Names(ms []Mutation) (names []string) {
	for _, m := range ms {
		if !slices.Contains(names, m.Name) {
			names = append(names, m.Name)
		}
	}
	return names
}

const brokenDir = "internal/mutate/broken"

// Write writes the files of the module at root with all these mutations in them to dir, and the overlay that puts them in
// the place of the originals. An entry that does not fit the code any more is an error that names it.
func Write(root, dir string, ms []Mutation) (overlay string, err error) {
	if root, err = filepath.Abs(root); err != nil {
		return "", err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", err
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return "", fmt.Errorf("mutate: no module at %s: %w", root, err)
	}
	path := regexp.MustCompile(`(?m)^module (\S+)`).FindSubmatch(mod)
	if path == nil {
		return "", fmt.Errorf("mutate: %s names no module", filepath.Join(root, "go.mod"))
	}
	names := Names(ms)
	files := map[string][]edit{}
	var order []string
	for i := range ms {
		e, err := locate(root, &ms[i], names)
		if err != nil {
			return "", err
		}
		f := ms[i].File
		if files[f] == nil {
			order = append(order, f)
		}
		files[f] = append(files[f], e)
	}
	replace := map[string]string{}
	put := func(file string, text []byte) error {
		to := filepath.Join(dir, filepath.FromSlash(file))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		replace[filepath.Join(root, filepath.FromSlash(file))] = to
		return os.WriteFile(to, text, 0o644)
	}
	for _, f := range order {
		text, err := apply(root, f, string(path[1]), files[f])
		if err == nil {
			err = put(f, text)
		}
		if err != nil {
			return "", err
		}
	}
	if err := put(brokenDir+"/names.go", fmt.Appendf(nil, "package broken\n\nvar names = %#v\n", names)); err != nil {
		return "", err
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, b, 0o644)
}

// edit is a mutation as it is made.
type edit struct {
	m    *Mutation
	at   int
	text string
}

var asks = regexp.MustCompile(`\bbroken\.Is\("([^"]*)"\)`)

// locate finds the place of a mutation, and writes the question whether it is in force as a comparison.
func locate(root string, m *Mutation, names []string) (e edit, err error) {
	if m.Name == "" || m.Property == "" {
		return e, fmt.Errorf("mutate: %v: it needs a name and the property that it breaks", m)
	}
	src, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(m.File)))
	if err != nil {
		return e, fmt.Errorf("mutate: %v: %w", m, err)
	}
	if n := strings.Count(string(src), m.Old); m.Old == "" || n != 1 {
		return e, fmt.Errorf("mutate: %v: what it replaces occurs %d times, not once: fit the table to the code: %q", m, n, m.Old)
	}
	found := asks.FindAllStringSubmatch(m.New, -1)
	if len(found) == 0 {
		return e, fmt.Errorf("mutate: %v: its new text does not ask broken.Is(%q), so it would always be in force", m, m.Name)
	}
	for _, f := range found {
		if f[1] != m.Name {
			return e, fmt.Errorf("mutate: %v: its new text asks broken.Is(%q)", m, f[1])
		}
	}
	is := fmt.Sprintf("(broken.Chosen == %d)", slices.Index(names, m.Name)+1)
	return edit{m, strings.Index(string(src), m.Old), asks.ReplaceAllString(m.New, is)}, nil
}

// apply makes the edits of one file. The import stands on the line of the package clause, so that lines keep their numbers
// down to the first edit.
func apply(root, file, module string, es []edit) ([]byte, error) {
	src, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(file)))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(es, func(a, b edit) int { return a.at - b.at })
	var out bytes.Buffer
	at := 0
	for i, e := range es {
		if e.at < at {
			return nil, fmt.Errorf("mutate: %v and %v change the same place: make one Old of it, or narrow one", es[i-1].m, e.m)
		}
		out.Write(src[at:e.at])
		out.WriteString(e.text)
		at = e.at + len(e.m.Old)
	}
	out.Write(src[at:])
	clause := regexp.MustCompile(`(?m)^package \w+`).FindIndex(out.Bytes())
	if clause == nil {
		return nil, fmt.Errorf("mutate: %s has no package clause", file)
	}
	text := slices.Concat(out.Bytes()[:clause[1]], fmt.Appendf(nil, "; import %q", module+"/"+brokenDir), out.Bytes()[clause[1]:])
	if _, err := format.Source(text); err != nil {
		return nil, fmt.Errorf("mutate: %s with its mutations is no Go any more: %w", file, err)
	}
	return text, nil
}

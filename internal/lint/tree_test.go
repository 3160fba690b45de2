package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// file is one file of the repository.
type file struct {
	path string // slash-separated, from the root
	src  []byte
	ast  *ast.File // Go only
	fset *token.FileSet
}

func (f *file) dir() string  { return path.Dir(f.path) }
func (f *file) isGo() bool   { return f.ast != nil }
func (f *file) isTest() bool { return strings.HasSuffix(f.path, "_test.go") }
func (f *file) lines() int   { return bytes.Count(f.src, []byte("\n")) }
func (f *file) generated() bool {
	return f.isGo() && ast.IsGenerated(f.ast) || generatedMark.Match(f.src)
}

// testOnly: a test file, or a folder that exists for tests.
func (f *file) testOnly() bool {
	return f.isTest() || strings.HasSuffix(f.dir(), "test") || f.dir() == "internal/harness"
}

// ignored: a program that is run by name and built with nothing.
func (f *file) ignored() bool { return ignoreTag.Match(f.src) }

var (
	generatedMark = regexp.MustCompile(`(?m)^(//|#|--|/\*) ?Code generated .* DO NOT EDIT\.`)
	ignoreTag     = regexp.MustCompile(`(?m)^//go:build ignore$`)
)

func (f *file) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", f.path, f.fset.Position(n.Pos()).Line)
}

// imports lists the import paths.
func (f *file) imports() []string {
	var all []string
	for _, s := range f.ast.Imports {
		p, _ := strconv.Unquote(s.Path.Value)
		all = append(all, p)
	}
	return all
}

// uses calls fn for each pkg.Name of an imported package.
func (f *file) uses(fn func(n ast.Node, pkg, name string)) {
	local := map[string]string{}
	for _, s := range f.ast.Imports {
		p, _ := strconv.Unquote(s.Path.Value)
		name := path.Base(p)
		if s.Name != nil {
			name = s.Name.Name
		}
		local[name] = p
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			// A variable that hides the package would have an object.
			if x, ok := sel.X.(*ast.Ident); ok && x.Obj == nil && local[x.Name] != "" {
				fn(n, local[x.Name], sel.Sel.Name)
			}
		}
		return true
	})
}

// tree is the repository.
type tree struct {
	module string
	files  []*file
}

// goFiles calls fn for each Go file.
func (t *tree) goFiles(fn func(f *file)) {
	for _, f := range t.files {
		if f.isGo() {
			fn(f)
		}
	}
}

// within is the folder of this module that an import path names.
func (t *tree) within(importPath string) (dir string, ok bool) {
	return strings.CutPrefix(importPath, t.module+"/")
}

func parseFile(name string, src []byte) (*file, error) {
	f := &file{path: name, src: src, fset: token.NewFileSet()}
	if strings.HasSuffix(name, ".go") {
		var err error
		if f.ast, err = parser.ParseFile(f.fset, name, src, parser.ParseComments); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// outputs are the folders at the root that builds write to.
var outputs = map[string]bool{"build": true, "out": true, "dist": true, "bin": true, "shared": true}

// sources are the endings of files that people write and the rules read.
var sources = map[string]bool{".go": true, ".s": true, ".c": true, ".h": true, ".cc": true, ".cpp": true, ".hpp": true,
	".cu": true, ".py": true, ".sh": true}

func loadTree(root string) (*tree, error) {
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return nil, err
	}
	t := &tree{module: strings.Fields(string(mod))[1]}
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			_, noNested := os.Stat(filepath.Join(p, "go.mod"))
			if rel != "." && (strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_") ||
				d.Name() == "testdata" || d.Name() == "node_modules" || outputs[rel] || noNested == nil) {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || !sources[path.Ext(rel)] {
			return nil
		}
		src, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := parseFile(rel, src)
		if err != nil {
			return err
		}
		t.files = append(t.files, f)
		return nil
	})
	return t, err
}

const root = "../.."

func mustTree(t *testing.T) *tree {
	t.Helper()
	tr, err := loadTree(root)
	require.NoError(t, err)
	require.NotEmpty(t, tr.files)
	return tr
}

// treeOf is a tree of the given files, for tests of the rules.
func treeOf(t *testing.T, files map[string]string) *tree {
	t.Helper()
	tr := &tree{module: "example.org/m"}
	for name, src := range files {
		f, err := parseFile(name, []byte(src))
		require.NoError(t, err)
		tr.files = append(tr.files, f)
	}
	return tr
}

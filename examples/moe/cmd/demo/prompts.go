package main

// prompts are beginnings of Go code, as the model's training text is; none is a line of it.
var prompts = []string{
	"// Package tree implements a balanced binary tree.\npackage tree\n\nimport (\n",
	"// ReadLine reads one line from r, without its end.\nfunc ReadLine(r io.Reader) (line []byte, err error) {\n",
	"// String returns the name of the color.\nfunc (c Color) String() string {\n\tswitch c {\n",
	"type Server struct {\n\tmu      sync.Mutex\n\tclients map[string]*Client\n",
	"func TestQueue(t *testing.T) {\n\tq := NewQueue()\n\tfor i := 0; i < 10; i++ {\n",
	"// Copyright 2021 The Go Authors. All rights reserved.\n",
	"func (b *Buffer) Write(p []byte) (n int, err error) {\n\tif b.err != nil {\n",
	"// Sum returns the sum of the elements of x.\nfunc Sum(x []int) int {\n\ts := 0\n\tfor ",
	"var errTooLong = errors.New(\"token too long\")\n\nfunc ",
	"func main() {\n\tflag.Parse()\n\tif flag.NArg() != 1 {\n",
	"// A Matrix is a dense matrix of float64 values.\ntype Matrix struct {\n",
	"\tcase reflect.Slice:\n\t\tfor i := 0; i < v.Len(); i++ {\n",
}

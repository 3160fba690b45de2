// Package lint holds the rules of the house as tests: which package may import
// which, what is pure, where unsafe, cgo and the environment may be used, how
// long a file may be, what git may track. They run on whatever packages there
// are.
package lint

// Package chaos runs ranks as processes through a program that is drawn from a seed, does to them what can happen to
// processes, hosts and networks, and checks with package history that every promise was kept. It is `serry chaos`, and
// what the tests in pg/proof drive.
package chaos

import "errors"

// CalmSteps is after how many steps a rank says how often it has come to each fault point.
const CalmSteps = 10

// ErrNoFaultpoints: this binary cannot die at a named point.
var ErrNoFaultpoints = errors.New("chaos: to die at named points takes a binary that is built with them: go build -tags faultpoint -o serry-faultpoint ./cmd/serry, then use that, or name it with --faultpoint")

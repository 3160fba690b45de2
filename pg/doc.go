// Package pg is the process group: the order of operations, their deadlines, asynchronous Work, subgroups, what a loss
// does to them (Raise and Continue), and how processes come and go (Join, Leave, Boundary).
//
// A World is this process's membership. Its Group holds all ranks; Sub makes others. Operations of a group run in the
// order in which they are issued, inline on the calling goroutine.
package pg

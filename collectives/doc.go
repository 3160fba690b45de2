// Package collectives runs the operations of one group: it publishes this rank's contribution, waits for the others',
// has the outcome decided by one compare-and-swap on the host's word, pulls what it needs from where the peers published
// it, and checks that the words still say so.
//
// It knows nothing of membership. A Comm is given Versions: the connected members of one version of the group, and, once
// a version has ended, the cut. A step of an operation never blocks; who waits (pg) steps, then sleeps on the group's
// generation word.
//
// An operation k of version v ends in one of two ways, alike on all members of the next version: completed in v (every
// member had published, and k is at or below the cut), or not, and then it moves to the next version, where pg redoes it
// or fails it.
package collectives

// Package fault is the pure machine that decides who is a member: evidence comes in, and agreed views, each with the cut
// of every group that lost a member, come out. It has no clock, goroutine, lock or I/O: Step takes the time and an event
// and returns effects, which a host (fault/agent, or a simulation) carries out in order.
package fault

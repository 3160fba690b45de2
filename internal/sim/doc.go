// Package sim runs whole worlds of processes in one thread, by a seed: pg, fault/agent, fault, collectives and device/stream
// as production runs them, on simulated hosts, memory, connections and clocks. The same seed gives the same run, to the
// last access to a shared word.
//
// # What is simulated
//
// A process is a loop (its mesh's thread), a caller that runs a program of operations, and sometimes a second driver for
// what the caller does not wait for. Each is a coroutine; one runs at a time. It gives way where it waits, and, by the
// dice, before any load, store or swap of a shared word, in the middle of a copy, and between two accesses to a board:
// then anybody runs, or somebody dies. Hosts have memory that their processes share. Connections carry bytes between two
// stream links: late, cut off in the middle, or with a wrong bit. Each process has a clock of its own.
//
// What is not: how processes find each other (mesh's dialling, rendezvous, pg.Join up to the first question to a member),
// and goroutines that wait for each other inside of a process. Real processes prove that (serry chaos).
package sim

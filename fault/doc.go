// Package fault is the pure machine that decides who is a member: evidence comes in, and agreed views, each with the cut
// of every group that lost a member, come out. It has no clock, goroutine, lock or I/O: Step takes the time and an event
// and returns effects, which a host (fault/agent, or the simulation in the tests) carries out in order. The same events
// at the same times give the same effects.
//
// # A change of the view
//
// View e+1 is chosen by the members of view e, by one instance of Paxos. A member is an acceptor as (slot, incarnation).
//
//	suspecting member      coordinator (lowest      other members
//	                       one not suspected)
//	     |---- suspect --------->|                        |
//	     |                       |---- prepare(b, who) -->|   publish the promise on the Board, Close the groups
//	     |                       |<--- promise -----------|   that have a suspect as member, read the Board
//	     |                       |       what is accepted on its host, how far each process of its host is in each
//	     |                       |       closed group, for which dead it votes, whom it does not hear
//	     |                       |---- accept(b, value) ->|   publish the acceptance, read the Board again
//	     |                       |<--- accepted ----------|
//	     |<----------------------|---- commit(value) ---->|   Install; Reopen what was closed and has no cut
//
// The value is the members, and a Cut for each group that lost or gained one or is failed. A coordinator that finds an
// accepted value proposes that one, whatever it wanted; what it still wants is for the next epoch. It drops only whom its
// prepare named, for only then were their groups closed: more suspects, a new ballot. A ballot that turns out to have no
// reason is brought to its end all the same, as a change without losses: until an epoch is decided, a lower ballot's value
// may be chosen, so nothing that was closed is reopened earlier. A coordinator that is silent for BallotTimeout is
// overtaken by a higher ballot, which excludes nobody; one that only waits says so (patience).
//
// Quorum: more than half of view e, or exactly half with its lowest slot (with a witness, below: exactly half with its
// vote). Who reaches none for 3/8 of HeartbeatLimit ends with NoQuorum. A dead member counts only through a living process
// of its host that has the kernel's word (Died). That proxy reports the highest acceptance on its host's Board, read after
// its own promise is there; and with an acceptance it claims the dead only if no process of the host has promised a higher
// ballot, read after its own acceptance is there. So of two proxies of one dead process at least one sees the other, and
// two quorums always share a vote. A proxy that sees a record of a later view claims nobody.
//
// Cut: the furthest that any member of the next view has got. It needs word of each of them, their own or that of a
// living process of their host. Who gives none for HeartbeatLimit is dropped by a new ballot. What the dropped returned
// from does not bind, but for one who leaves. A group that no promise knew, and that lost a member, is cut by a change
// of its own.
//
// Who missed a commit is told it in answer to anything that it sends from an older epoch; messages of a newer epoch wait.
//
// # Two halves and a witness
//
// With Config.Witness one more acceptor stands outside of the world, a register that changes only by compare-and-set
// (package witness keeps it). Of n members, n even, it makes n+1 acceptors, and a quorum is more than half of those: more
// than half of the members, whatever it says, or exactly half of them with its vote, whichever half that is. Two of these
// share an acceptor. It is asked only by a ballot that has exactly half, and no hope of more; a world that never loses half
// at once works as well without it.
//
//	coordinator of a half                               witness
//	     |---- AskWitness: promised < b  ->  promised b --->|   after the promises of exactly half
//	     |<--- Witnessed: what it holds --------------------|   promised == b: its promise, with what it has accepted
//	     |---- AskWitness:    ->  accepted (b, value) ----->|   after the acceptances of exactly half
//	     |<--- Witnessed: what it holds --------------------|   accepted == b: chosen
//
// It holds (epoch, promised, accepted, value) like any acceptor, and not merely who came first: who came first may die
// before another knows the value, and the other half, or another of the same, must find out what may have been chosen. Who
// finds an accepted value there proposes that one; who finds a higher promise yields, and comes back with a higher ballot.
// So if a whole half is lost after the witness has accepted its value, the other does not go on: that one may have decided.
//
// The contents only go up, in (epoch, promised, accepted), so they are never the same twice, and a vote is known by what
// is held. Therefore an answer may come late, twice or never, a question whose answer is lost is asked again, and a swap
// that arrives after its sender's death is a vote for an old ballot, or fails.
//
// One register serves all epochs: who votes in epoch e has installed it, so what was held for an earlier one is decided and
// may be overwritten. Who asks in epoch e and finds a later one gets no vote in e, ever, which is no worse than a witness
// that has crashed. The same goes for a register that is not there: the founder makes it, before anybody else can know
// the world, and no member ever makes it again, so it may be removed, or expire, and at worst a half stops.
//
// A half that has no answer for WitnessLimit ends with NoQuorum, and tells the rest of it (noQuorum), whose machines are
// no half without it. One that learns at the witness that it is out, and reaches nobody who is in, ends with NoQuorum too.
//
// # Evidence
//
// Died is proof. Silent counts only if everybody on that host is silent, and nobody else hears it; a member that others
// hear has a broken link to us, and unlink decides who goes. An operation whose deadline is over (Overdue) starts a chase
// along the wait-for graph: its sink is late and is dropped; a ring is a deadlock, is asked a second time, and fails its
// groups. Time that passed while this process itself was stopped counts against nobody.
//
// # Growth
//
//	joiner              coordinator                members
//	  |---- Join ---------->|                         |      at any member, which passes it on; again every 50 ms
//	  |                     |---- growAsk ----------->|      Hold{0}: stop in the next Boundary
//	  |                     |<--- growCount ----------|      Boundaries entered
//	  |                     |---- growAt(B) --------->|      Hold{B}, B = the highest count + 1
//	  |                     |<--- growReady ----------|      Quiet{B}: it stands there, all is completed
//	  |                     |---- prepare .. commit --|      promised only by members that stand there, by all of them
//	  |<--- Welcome --------|-------------------------|      from every member; the first counts
//
// A change meanwhile, a joiner that is gone, or a member that does not come ends a growth; the joiner still asks. A slot
// that has a member is freed first, by an ordinary change. Incarnations are numbered by View.Incs, which outlives them.
//
// # What a host must hold to
//
//   - Died comes only when no thread of that process can publish on the Board or send any more.
//   - Close is the last effect of a step but for a Timer, and Closed is the next event. Groups that this process does not
//     know may be named; say of them what the host's memory tells, or leave them out.
//   - A word that is closed for a Ballot that is Void in the installed epoch may be reopened by whoever sees it.
//   - Created comes before anything can be decided in the group here. Its Epoch is the parent's version in which the
//     operation completed: that is the same on all members, the epoch of the moment is not.
//   - After Evicted, Left and NoQuorum the machine is over.
package fault

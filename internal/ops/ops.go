// Package ops names what a group does and how that ends, for whoever tells people or other programs of it: metrics, the
// flight recorder, the state of a group. The names never change; the numbers are good within one process.
package ops

import "strconv"

// Op is an operation of a group. The zero value is none.
type Op uint8

// The operations. Up to Exchange the numbers are those of collectives.Kind.
const (
	Barrier Op = iota + 1
	AllReduce
	AllGather
	AllToAll
	Broadcast
	Exchange // dispatch and combine
	ReduceScatter
	Reduce
	Gather
	Scatter
	Send
	Recv
	Boundary
	NumOps // one more than the last
)

var opNames = [NumOps]string{Barrier: "barrier", AllReduce: "all_reduce", AllGather: "all_gather", AllToAll: "all_to_all",
	Broadcast: "broadcast", Exchange: "exchange", ReduceScatter: "reduce_scatter", Reduce: "reduce", Gather: "gather",
	Scatter: "scatter", Send: "send", Recv: "recv", Boundary: "boundary"}

func (o Op) String() string {
	if o > 0 && o < NumOps {
		return opNames[o]
	}
	return "operation " + strconv.Itoa(int(o))
}

// Local says that the operation has no place in the order of its group: Send and Recv.
func (o Op) Local() bool { return o == Send || o == Recv }

// Outcome is how an operation ended. The zero value: not yet.
type Outcome uint8

// The outcomes.
const (
	OK         Outcome = iota + 1
	RankLost           // the first operations after a cut, in a Raise group
	SourceLost         // the only source of the data was lost
	Failed             // the group is failed for good
	Late               // the deadline of a Send or Recv
	Evicted            // the others have gone on without this process
	NoQuorum           // too few members can be reached
	AllGone            // no member lives any more
	Closed             // closed, left, or given up here
	NumOutcomes
)

var outcomeNames = [NumOutcomes]string{OK: "ok", RankLost: "rank_lost", SourceLost: "source_lost", Failed: "failed", Late: "late",
	Evicted: "evicted", NoQuorum: "no_quorum", AllGone: "all_gone", Closed: "closed"}

func (o Outcome) String() string {
	if o > 0 && o < NumOutcomes {
		return outcomeNames[o]
	}
	return "outcome " + strconv.Itoa(int(o))
}

// Package history is what the processes of a world have seen, each of its own operations and views, and the checker of
// the promises P1 to P10 over it. It shares no code with the protocol: it knows what is promised, not how it is kept.
//
// A process tells its history as [Event]s: when it came in, each view, each group that it was made a member of, and for
// each operation a call (Issue) and how it ended (Return). The checker gets the histories of all processes, those that
// were killed included, what was done to them ([Deed]), and a function that says what a result must be.
//
// Who is bound by a promise is what makes this more than a comparison. "No two members of the next view": a process that
// was killed, or evicted, may have returned from its last operations with what the others redid without it. So what a
// process returned in version v of a group counts if it is a member of the group's next version, or, if there is none,
// if it lives at the end. Whatever counts or not: a result is whole (P2), and views are everybody's (P3).
package history

import (
	"github.com/serry-project/serry/internal/slots"
)

// Set is a set of slots of the world.
type Set = slots.Set

// Kind is what an event is of.
type Kind uint8

// The kinds, with the fields of Event that they use beside Time.
const (
	Joined Kind = iota + 1 // the process is a member: Epoch (of the first view that has it), N (the Boundary), Inc
	View                   // a view was installed: Epoch, Set (its members), Size
	Lost                   // who is not in the view before it: Epoch, Set (slots), Why
	Made                   // a group: Group, Set (its slots, with members or not)
	Issue                  // an operation was called: Group, Op, Call, Peer
	Return                 // it ended: those of Issue, Outcome, and by outcome Seq, Epoch, Set, Sum, N, Why
	Ended                  // the process ends by itself: Outcome, Why
)

// Op is an operation.
type Op uint8

// The operations.
const (
	Barrier Op = iota + 1
	AllReduce
	AllGather
	Broadcast
	AllToAll
	ReduceScatter
	Pair // dispatch and combine
	Step // of package ep: pairs until one succeeds
	Send
	Recv
	Sub
	Close
	Boundary
)

// Alike says that all members get the same bits.
func (o Op) Alike() bool {
	return o == Barrier || o == AllReduce || o == AllGather || o == Broadcast
}

// Local says that the operation has no place in the order of its group, and that its outcome is its own.
func (o Op) Local() bool { return o == Send || o == Recv }

// ordered says that the operation has a sequence, an epoch and a set.
func (o Op) ordered() bool { return o != 0 && o < Send }

// Outcome is how an operation, or a process, ended.
type Outcome uint8

// The outcomes.
const (
	OK         Outcome = iota + 1
	RankLost           // Epoch, Set (the slots that were lost)
	SourceLost         // the only source of the data was lost
	Failed             // the group is failed for good
	Late               // of Send and Recv: its deadline
	Evicted            // the others have gone on without this process
	NoQuorum           // too few can be reached
	AllGone            // nobody is left to join
	ClosedHere         // by the process itself
	Left               // of a process: in order
	Other              // anything else: always a violation
)

// over says that the process is out of the group, or the world, with it.
func (o Outcome) over() bool { return o >= Evicted && o <= ClosedHere }

// Event is one thing that a process saw. It is a plain value.
type Event struct {
	Time    int64 // nanoseconds on a clock that all processes of the history share
	Kind    Kind
	Op      Op
	Outcome Outcome
	Peer    int16  // of Send and Recv: the other's slot
	Inc     uint32 // of Joined
	N       uint32 // of Send and Recv: messages that went; of Joined and Boundary: its number
	Size    uint32 // of View: ranks of the world, 0 if that was not told
	Group   uint64
	Call    uint64 // the operation's place in the program: rising, and alike on all members
	Seq     uint64
	Epoch   uint64
	Sum     uint64 // of what came out
	Set     Set
	Why     string // of what is no success
}

// Process is one process and its history, in the order in which it was seen.
type Process struct {
	Slot   int
	Inc    uint32 // 0: it was never let in, or died before it could say so
	Host   int    // processes of one host see each other's deaths
	Events []Event
	Killed int64 // when; 0: it was not
	// Doomed: it is neither alive at the end nor killed, and may have said nothing more: it was left stopped, say.
	Doomed bool
}

// Done is what was done to a process.
type Done uint8

// The deeds.
const (
	Kill     Done = iota + 1
	Stop          // from Time to Until
	Cut           // from the others, from Time to Until
	Slow          // what it says or does is late
	Leave         // it was asked to
	Minority      // so many others are out of its reach that it may end with NoQuorum
)

// Deed is something that was done to a process.
type Deed struct {
	Time, Until int64 // Until 0: to the end
	What        Done
	Proc        int  // index in Run.Procs
	Fair        bool // the process may be excluded for it
}

// Run is all that a checker needs to know.
type Run struct {
	Procs []Process
	Deeds []Deed
	World uint64 // the group of all ranks
	End   int64  // when the histories end

	// Want is the sum of what an operation that succeeded must have given the process in a slot, from the set that it
	// reports (of Recv: from N); ok is false where nothing is known. Nil: nothing is.
	Want func(slot int, e *Event) (sum uint64, ok bool)

	// Detect (detection and agreement) and Deadline (the longest) bound a call: (f+1) x Detect + Deadline, with one more
	// Deadline for each stop, where f is what was done meanwhile. Detect 0: only calls without an end are found.
	Detect, Deadline int64

	// Frames: data may travel in frames. What was under way to a process when it was excluded may complete its operation.
	Frames bool
	// Witness: a tie may be decided for the half without the lowest slot.
	Witness bool
	// Live: the run went on after the last deed until it was told to end, so whoever is left must have completed an
	// operation of the world since, unless it was told of a minority.
	Live bool
	// Continue: groups redo what a loss interrupts, and messages between the living are not lost.
	Continue func(group uint64) bool
}

// Ref names an event: Run.Procs[Proc].Events[Index].
type Ref struct{ Proc, Index int }

// Violation is a promise that was not kept.
type Violation struct {
	Property string // P1 to P10
	Text     string
	Events   []Ref
}

func (v Violation) String() string { return v.Property + ": " + v.Text }

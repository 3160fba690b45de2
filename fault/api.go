package fault

import "time"

// Time is a reading of the host's monotonic clock. Readings of different machines are never compared.
type Time = time.Duration

// ID is a numbered process: the slot, and how many processes have held it (from 1).
type ID struct {
	Slot int
	Inc  uint32
}

// Nonce names a process that no view has numbered yet: 128 random bits.
type Nonce [16]byte

// Member is a process of a view.
type Member struct {
	ID
	Nonce Nonce
	Host  uint64 // equal for processes that see each other's deaths by the kernel and share memory for the Board
	Addr  []byte // opaque to the machine: how mesh reaches it
}

// View is an agreed membership. Epoch 1 is the founding.
type View struct {
	Epoch    uint64
	Size     int      // slots in use so far; grows only at a Boundary
	Capacity int      // slots that can ever be used
	Members  []Member // by slot, ascending
	Incs     []uint32 // by slot: the last incarnation ever numbered, also of a slot that is vacant now (missing: none)
}

// Group is what the machine knows of a group: a set of slots, and its history of losses.
type Group struct {
	ID      uint64 // equal on all members, and of no other group ever; that of the world's group is 1
	Slots   Set    // as created: also slots without a living member
	Active  Set    // Slots that the view has
	Version uint64 // epoch of the last change that removed or added one of its members
	Cut     uint64 // sequence up to which operations belong to earlier versions
	Failed  string // not empty: failed for good, alike on all members, and why

	floor uint64 // no cut falls below: newcomers have begun there
}

// Done is how far one living process of this host has got in a group: it has, or may already have, returned
// successfully from every operation up to Seq. The host reads it from shared memory after it closed the group's word.
type Done struct {
	Slot int
	Seq  uint64
}

// Ballot orders attempts to change one view. Higher Num wins; ties go to the higher Slot.
type Ballot struct {
	Num  uint32
	Slot uint16
}

// Value is what a ballot proposes, and what a commit installs.
type Value struct {
	Epoch   uint64
	Members []Member // of the next view
	Size    int
	Cuts    []Cut  // one for each group that lost or gained a member, or failed
	At      uint64 // growth: the Boundary at which the newcomers enter; else 0
	Why     string // for people: who is dropped or comes, and for what reason
}

// Cut ends a version of a group.
type Cut struct {
	Group uint64
	Seq   uint64 // operations up to here succeed with the old set, later ones belong to the new version
	Fail  string // not empty: the group is failed for good (deadlock, mismatch, abort), and why
	Slots Set    // of the group, for who does not know it
}

// Record is a process's vote, as others of its host read it from its memory, also after its death.
type Record struct {
	Epoch    uint64 // of the view that the vote is about to end
	Promised Ballot
	Accepted Ballot // zero: none
	Value    []byte // encoded Value, if Accepted is not zero
	// Past are the encoded Values of the last changes, oldest first, up to the one that made the view of Epoch: who has
	// missed them, and has only the dead to ask, learns them here.
	Past [][]byte
}

// Board is the votes of one host's processes in shared memory. Publish stores the record of this process so that it is
// seen by every later Read of another, and Read(slot) returns the last published record of that member's incarnation
// (ok false: never published). All operations are sequentially consistent. With it a living process votes for the dead
// of its host: it publishes its own promise first and then reads, and one that accepts publishes first and then reads
// the promises, so that of two proxies at least one sees the other.
type Board interface {
	Publish(Record)
	Read(ID) (Record, bool)
}

// Config makes a Machine.
type Config struct {
	Self   ID
	View   View    // the view it starts in, with itself as a member
	Groups []Group // the groups of the slot (the world's at least)
	Change Value   // a newcomer's: Welcome.Change
	Gained Set     // a newcomer's: Welcome.Gained
	Board  Board   // nil: this process alone on its host

	// Witness: of two halves the one decides that has the vote of the world's witness, not the one with the lowest slot.
	// Alike on all members, or two halves may decide.
	Witness bool

	HeartbeatLimit time.Duration // a silent unvouched member is dropped after this (default 1 s)
	BallotTimeout  time.Duration // a silent coordinator is overtaken after this (default 20 ms, doubling)
	AskTimeout     time.Duration // a rank that does not answer a wait-for question in this time is a sink (default 200 ms)
	WitnessLimit   time.Duration // a witness that does not answer a half this long has no vote (default 3/8 of HeartbeatLimit)

	bug bug // a rule to break; tests only
}

// Event is something that happened. One of the types below.
type Event interface{ event() }

type (
	// Received is a message of a member, or of a joiner (From.Inc 0, Nonce set).
	Received struct {
		From  ID
		Nonce Nonce
		Msg   Msg
	}
	// Died is the kernel's proof that a member of this host is gone.
	Died struct{ ID ID }
	// Silent says that nothing was heard of a member of another host for HeartbeatLimit (the link is down or mute).
	Silent struct{ ID ID }
	// Heard takes Silent back.
	Heard struct{ ID ID }
	// Closed answers Close: for each group named there how far each living process of this host has got, and how far
	// this process has issued.
	Closed struct {
		Ballot Ballot
		Groups []GroupDone
	}
	// Created tells of a group that an operation of its parent made, with the epoch at which that operation was decided:
	// cuts since then are applied to it at once. One that lost a member since, without a cut, gets one with the next change.
	Created struct {
		Group Group
		Epoch uint64
	}
	// Dropped tells that this process has left a group for good (after a Fail of it, or a collective close).
	Dropped struct{ Group uint64 }
	// Overdue says that an operation's deadline is over here while Missing have not arrived at it.
	Overdue struct {
		Group, Seq uint64
		Missing    Set
	}
	// Waiting says what the caller of this process waits for now (Group 0: nothing); the host reports it when asked by
	// the AskWaiting effect.
	Waiting struct {
		Token      uint64
		Group, Seq uint64
		Missing    Set
		Arrived    uint64 // the highest sequence of the asked group at which this process has arrived
		Held       bool   // the caller stands in a Boundary, until Release or Install
	}
	// Abort fails a group for good on all members (mismatch, abort, collective close); Group 1 is this rank's loss.
	Abort struct {
		Group  uint64
		Reason string
	}
	// Leave asks to be taken out of the view after everything this process issued has completed.
	Leave struct{}
	// JoinAsk is a process that wants in: it is linked to every member of the view with the given epoch.
	JoinAsk struct {
		Member Member // Slot -1: any free one; Inc is ignored
		Epoch  uint64 // of the view whose members it is linked to
	}
	// Entered says that the caller has entered Boundary number Count.
	Entered struct{ Count uint64 }
	// Quiet says that the caller stands in Boundary number Count, has completed everything it issued in every group, and
	// what it attaches for the newcomer.
	Quiet struct {
		Count  uint64
		Attach []byte
		Groups []GroupDone
	}
	// Witnessed answers AskWitness: what the witness holds now, swapped or not (nothing: it has no record of this world),
	// or why it did not answer. An answer that comes late, twice or never does no harm.
	Witnessed struct {
		Held []byte
		Err  string
	}
	// Tick is the passing of time: due when a Timer effect says so, harmless at any other time.
	Tick struct{}
)

// GroupDone is the state of a group on this host.
type GroupDone struct {
	Group  uint64
	Done   []Done // of every living member of the group on this host, this process included
	Issued uint64 // by this process
}

// Effect is something for the host to do, in the order returned. One of the types below.
type Effect interface{ effect() }

type (
	// Send delivers a message (to a joiner: To.Inc 0, Nonce set). Messages may be lost with a process, not reordered.
	Send struct {
		To    ID
		Nonce Nonce
		Msg   Msg
	}
	// Close stops decisions in these groups: swap "closed, ballot" into the words, then call Step with Closed at once.
	Close struct {
		Ballot Ballot
		Groups []uint64
	}
	// Reopen takes a Close back for groups that in the end lost nobody (or whose ballot is void): same version, same
	// place.
	Reopen struct {
		Ballot Ballot
		Groups []uint64
	}
	// Install is the next view. For each cut the host re-arms the word as (Version = View.Epoch, Seq, undecided), ends or
	// redoes what lies after it, and completes what lies before it with the old set.
	Install struct {
		View   View
		Cuts   []Cut
		Lost   []Member // of the old view, not in the new one
		Joined []Member
		At     uint64 // growth: the Boundary
		Why    string // "rank 2 died (SIGKILL seen by rank 1's kernel)", for people
	}
	// Timer asks for a Tick at this time (only the last one counts; 0: none).
	Timer struct{ At Time }
	// AskWaiting asks the host for a Waiting event with this token about Group.
	AskWaiting struct {
		Token uint64
		Group uint64
	}
	// AskWitness is a compare-and-set of what the world's witness holds: New if it is Old, byte for byte. The host does it
	// meanwhile, and answers with Witnessed. One that is lost is asked again.
	AskWitness struct{ Old, New []byte }
	// Hold stops the caller in its next Boundary (Count 0), or in Boundary Count, until Release or Install.
	Hold struct{ Count uint64 }
	// Release lets the caller go on: the growth is off for now.
	Release struct{}
	// Evicted says that the others have gone on without this process.
	Evicted struct {
		Epoch uint64
		Why   string
	}
	// NoQuorum says that too few members of the view can be reached; the machine is over.
	NoQuorum struct{ Why string }
	// Left says that this process's Leave is done.
	Left struct{}
	// Note is for the log.
	Note struct{ Text string }
)

// Msg is a message between machines; AppendMsg and ParseMsg are its wire form.
type Msg interface{ msg() }

package fault

// The messages between machines. Each carries the epoch of its sender's view; what is of an older epoch is answered with
// the commits that its sender missed, what is of a newer one is held until the view is learned.

type head struct{ Epoch uint64 }

func (h head) epoch() uint64 { return h.Epoch }

// kind is why somebody is suspected.
type kind uint8

const (
	kDied     kind = 1 + iota // the kernel's proof, on its host
	kSilent                   // silent, and so is everybody of its host
	kLink                     // alive, but not mutually connected with the rest
	kSlow                     // gave no word for a cut in HeartbeatLimit, and nobody gave it in its place
	kLate                     // did not arrive before an operation's deadline
	kReplaced                 // a new process asks for its slot
	kLeft                     // asked to leave
	kAbort                    // aborted the world
	kEnd
)

// suspicion is evidence that a member should be dropped.
type suspicion struct {
	ID         ID
	Kind       kind
	Group, Seq uint64 // kLate: the operation
	Why        string
}

// failing asks for a cut of a group that loses nobody: it fails for good, or (Why empty) it missed the cut that it
// should have had, because no member that promised knew it.
type failing struct {
	Group uint64
	Why   string
}

// report is what one member knows against others. N grows, the last one counts.
type report struct {
	From     ID
	N        uint32
	Silent   Set
	Suspects []suspicion
	Fails    []failing
}

// held is the state of a closed group, with its slots, for a coordinator that does not know it.
type held struct {
	GroupDone
	Slots Set
	Order uint32 // its place among the groups of who reports
}

type (
	hello struct{ head } // "I am in this view": answered by whoever knows a later one

	behind struct { // the answer to who is too far behind to be told
		head
		At  uint64 // the epoch that it was in when it sent what this answers
		Why string
	}

	prepare struct {
		head
		Ballot   Ballot
		Suspects []suspicion
		Groups   []uint64 // to close besides those that have a suspect as member
		Token    uint64   // growth
		At       uint64   // growth: the Boundary
		Joiners  []Member // growth: numbered
	}

	promise struct {
		head
		Ballot   Ballot
		Accepted Ballot // the highest of all records on its host
		Value    Value  // if Accepted is not zero
		Groups   []held
		Dead     []ID // members of its host that it votes for
		Gone     []ID // members of its host that are dead, voted for or not
		Reports  []report
	}

	nack struct {
		head
		Ballot   Ballot // refused
		Promised Ballot
	}

	accept struct {
		head
		Ballot Ballot
		Value  Value
	}

	accepted struct {
		head
		Ballot Ballot
		Dead   []ID // members of its host that it votes for
	}

	patience struct { // the coordinator works, it only waits
		head
		Ballot Ballot
	}

	commit struct{ Value Value }

	suspect struct {
		head
		Reports []report
	}

	ask struct { // is this member of your host alive?
		head
		ID ID
	}

	vouch struct {
		head
		ID   ID
		Dead bool
	}

	askStatus struct {
		head
		Token, Group, Seq uint64
	}

	status struct {
		head
		Token, Group, Seq  uint64 // as asked
		Arrived            uint64
		WaitGroup, WaitSeq uint64
		Missing            Set
		Over               bool // the deadline of what it waits for is over
		Held               bool // stands in a Boundary, where a growth or a change keeps it
	}

	joinFwd struct { // a Join, passed on to the coordinator
		head
		Member Member
	}

	growAsk struct {
		head
		Token uint64
	}

	growCount struct {
		head
		Token, Count uint64
	}

	growAt struct {
		head
		Token, At uint64
	}

	growReady struct {
		head
		Token, At uint64
	}

	growNo struct { // a member does not stand in that Boundary any more
		head
		Token uint64
	}

	growOff struct { // the coordinator gives up, for now
		head
		Token uint64
	}

	noQuorum struct { // the machine of who sends this is over: it votes no more
		head
		Why string
	}
)

// Join is a joiner's request, sent to any member: it is what JoinAsk is as an event.
type Join struct {
	Member Member // Slot -1: any free one; Inc is ignored
	Epoch  uint64 // of the view whose members it is linked to
}

// Welcome tells a joiner that it is a member. Every member sends one; the first counts. Its host makes a Machine with
// Config.Self = Self, View and Groups.
type Welcome struct {
	Self   ID
	View   View
	Groups []Group // of its slot, as the view's cuts list them; Cut is the last sequence that is completed
	At     uint64  // the Boundary at which it enters
	Attach []byte  // what the member that sends this attached for it
	Gained Set     // slots of those who enter there, this one too
	Change Value   // that made View: who missed it may have nobody else to hear it from
}

// Refused tells a joiner that it cannot become a member, and why.
type Refused struct{ Reason string }

// Stale tells a joiner that the members are others by now: it links to them and asks again.
type Stale struct{ View View }

func (hello) msg()     {}
func (behind) msg()    {}
func (prepare) msg()   {}
func (promise) msg()   {}
func (nack) msg()      {}
func (accept) msg()    {}
func (accepted) msg()  {}
func (patience) msg()  {}
func (commit) msg()    {}
func (suspect) msg()   {}
func (ask) msg()       {}
func (vouch) msg()     {}
func (askStatus) msg() {}
func (status) msg()    {}
func (joinFwd) msg()   {}
func (growAsk) msg()   {}
func (growCount) msg() {}
func (growAt) msg()    {}
func (growReady) msg() {}
func (growNo) msg()    {}
func (growOff) msg()   {}
func (noQuorum) msg()  {}
func (Join) msg()      {}
func (Welcome) msg()   {}
func (Refused) msg()   {}
func (Stale) msg()     {}

func (Received) event()  {}
func (Died) event()      {}
func (Silent) event()    {}
func (Heard) event()     {}
func (Closed) event()    {}
func (Created) event()   {}
func (Dropped) event()   {}
func (Overdue) event()   {}
func (Waiting) event()   {}
func (Abort) event()     {}
func (Leave) event()     {}
func (JoinAsk) event()   {}
func (Entered) event()   {}
func (Quiet) event()     {}
func (Witnessed) event() {}
func (Tick) event()      {}

func (Send) effect()       {}
func (Close) effect()      {}
func (Reopen) effect()     {}
func (Install) effect()    {}
func (Timer) effect()      {}
func (AskWaiting) effect() {}
func (AskWitness) effect() {}
func (Hold) effect()       {}
func (Release) effect()    {}
func (Evicted) effect()    {}
func (NoQuorum) effect()   {}
func (Left) effect()       {}
func (Note) effect()       {}

package ep

import (
	"context"
	"errors"
	"fmt"

	"github.com/serry-project/serry/ep/route"
)

// Group is what ep needs of a process group. *pg.Group is one, through a thin adapter (pg.go).
//
// Ranks are positions in the group, 0..Size()-1; they never move, also when their process dies. Each method that blocks
// ends when its context does; whether that ends only the waiting, so that the call may be repeated, or the group (pg: it
// is this rank's Abort) is the group's to say.
type Group interface {
	// Rank is this process's rank.
	Rank() int
	// Size is the number of ranks, active or not. It may grow between two operations.
	Size() int
	// Depth is how many pairs may be under way at a time.
	Depth() int
	// SlotBytes bounds the sum of Exchange.Sizes of one half. It is the same on all ranks.
	SlotBytes() int
	// Active returns the active ranks and the version of the group in which the next pair will run, unless that fails with
	// *RankLost. After *RankLost was returned, it is that of the survivors.
	Active() (active route.Ranks, version uint64)
	// StartPair publishes the dispatch half of the next operation. It waits for peers at most until their slots are free.
	// If the group's version is not x.Version, nothing is sent and the error is ErrMoved. x must stay untouched until
	// Dispatched has returned without an error, or the pair is over.
	StartPair(ctx context.Context, x *Exchange) (Pair, error)
}

// Pair is one dispatch and combine: one operation with one outcome. Either all survivors get success from Combined, or
// all get *RankLost for the pair, at the call that they are in then or at their next.
type Pair interface {
	// Dispatched waits until all active members have published their dispatch half, then calls Take. What was taken is
	// provisional until Combined returns.
	Dispatched(ctx context.Context) error
	// StartCombine publishes the combine half. Only after Dispatched.
	StartCombine(ctx context.Context, x *Exchange) error
	// Combined waits until all active members have published their combine half, calls Take, and returns the outcome. Pairs
	// are combined in the order in which they were started.
	Combined(ctx context.Context) (Result, error)
	// Abandon gives the pair up without a word to others. Only after *RankLost, or when the group is over.
	Abandon()
}

// Exchange is one half of a pair as one rank sees it: what it gives to each active rank and what it takes from each.
// Every active rank takes part, with nothing to give too.
type Exchange struct {
	Version uint64 // of the group, for which Sizes were computed; StartCombine ignores it
	Sizes   []int  // [Size()]: bytes for each rank, multiples of 16; ignored where a rank is not active
	// Fill writes the part for rank r: dst has Sizes[r] bytes and is shared memory or the frame to send. It is called
	// once for each active rank, this one too, before StartPair or StartCombine returns.
	Fill func(r int, dst []byte)
	// Take reads what the ranks gave: parts[r] is the part of rank r for this one, nil if it is not active, for at least
	// Size ranks. It is called when all have arrived. Parts are valid during the call, may be shared memory, and are not to
	// be written. It may be called again, if the parts changed under its hands: the last call counts.
	Take func(parts [][]byte)
	// Digest is equal on all ranks: else the group is failed for good, on all.
	Digest uint64
}

// Result is the outcome of a pair, the same on all ranks.
type Result struct {
	Seq    uint64      // number of the operation in its group
	Epoch  uint64      // version of the group in which it ran
	Active route.Ranks // the ranks that took part
}

// ErrMoved is returned by Group.StartPair, and by calls on a Pair, if the version is not the group's any more.
var ErrMoved = errors.New("ep: the group has a new version")

// RankLost says that ranks died. All survivors get it alike, for the first operation after the loss.
type RankLost struct {
	Lost  []int  // the ranks that are gone
	Epoch uint64 // the version of the group without them
	Err   error  // the group's own error, if it has one: errors.As finds *pg.RankLost through it
}

func (e *RankLost) Error() string {
	if e.Err != nil {
		return e.Err.Error()
	}
	return fmt.Sprintf("ep: ranks %v lost, version %d goes on without them", e.Lost, e.Epoch)
}

func (e *RankLost) Unwrap() error { return e.Err }

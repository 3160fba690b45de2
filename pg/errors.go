package pg

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Errors that can be asked for with errors.Is.
var (
	// ErrEvicted: the others have gone on without this process. Its last results may have been redone without it and
	// must not be published.
	ErrEvicted = errors.New("serry: evicted")
	// ErrNoQuorum: too few of the members can be reached to go on.
	ErrNoQuorum = errors.New("serry: no quorum")
	// ErrFailed: the group is failed for good, alike on all its members. errors.As a *GroupFailed for the reason.
	ErrFailed = errors.New("serry: group failed")
	// ErrAllGone: no member lives any more whom this process could join. The world is over; it has to be founded anew.
	ErrAllGone = errors.New("serry: all members are gone")
	// ErrClosed: the world or group was closed, left or aborted here.
	ErrClosed = errors.New("serry: closed")
	// ErrMoved: the group has another version than the caller has computed for.
	ErrMoved = errors.New("serry: the group has a new version")
	// ErrOutOfStep: the call does not fit what is open in the group (a pair that is not combined yet).
	ErrOutOfStep = errors.New("serry: out of step")
)

// during says in what an error came; "serry: " stands once.
func during(what string, err error) error { return &duringError{what, err} }

type duringError struct {
	what string
	err  error
}

func (e *duringError) Error() string { return "serry: " + e.what + ": " + bare(e.err) }

func (e *duringError) Unwrap() error { return e.err }

func bare(err error) string { return strings.TrimPrefix(err.Error(), "serry: ") }

// RankLost is what all survivors get alike for the first operation after a cut of a Raise group. The call after the one
// that returned it goes on over the survivors.
type RankLost struct {
	Lost  []int // ranks of the group
	Slots []int // slots of the world
	Epoch uint64
	Why   string
}

func (e *RankLost) Error() string {
	return fmt.Sprintf("serry: lost %s in epoch %d: %s", ranks(e.Lost), e.Epoch, e.Why)
}

func ranks(r []int) string {
	if len(r) == 1 {
		return fmt.Sprintf("rank %d", r[0])
	}
	s := make([]string, len(r))
	for i, x := range r {
		s[i] = fmt.Sprint(x)
	}
	return "ranks " + strings.Join(s, ", ")
}

// GroupFailed says why a group is failed for good: a mismatch between ranks, a deadlock, an Abort.
type GroupFailed struct {
	Group  uint64
	Epoch  uint64
	Reason string
}

func (e *GroupFailed) Error() string {
	return fmt.Sprintf("serry: group %x is failed for good in epoch %d: %s", e.Group, e.Epoch, e.Reason)
}

// Is makes errors.Is(err, ErrFailed) true, and ErrMismatch or ErrDeadlock by the kind of reason.
func (e *GroupFailed) Is(target error) bool {
	switch target {
	case ErrFailed:
		return true
	case ErrMismatch:
		return reasonOf.MatchString(e.Reason)
	case ErrDeadlock:
		return strings.HasPrefix(e.Reason, "deadlock: ")
	}
	return false
}

// mismatchReason is what an Abort for a mismatch begins with; the machine puts in front who aborted.
const mismatchReason = "mismatch: "

var reasonOf = regexp.MustCompile(`^(aborted by rank \d+: )?` + mismatchReason)

// Kinds of GroupFailed, for errors.Is.
var (
	// ErrMismatch: the ranks do not run the same program; the reason names rank and field.
	ErrMismatch = errors.New("serry: mismatch between ranks")
	// ErrDeadlock: ranks wait for each other in a cycle, which the reason names.
	ErrDeadlock = errors.New("serry: deadlock")
)

// JoinError says what stopped a Join, and what to do.
type JoinError struct {
	Rank int
	What string
	Err  error
}

func (e *JoinError) Error() string {
	s := fmt.Sprintf("serry: rank %d cannot join", e.Rank)
	if e.What != "" {
		s += ": " + e.What
	}
	if e.Err != nil {
		s += ": " + bare(e.Err)
	}
	return s
}

func (e *JoinError) Unwrap() error { return e.Err }

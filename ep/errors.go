package ep

import (
	"errors"
	"fmt"

	"github.com/serry-project/serry/ep/route"
)

// Errors of the program that calls. Nothing was sent, and the handle is as before.
var (
	// ErrStale: the handle was released, or the version that it belongs to is over.
	ErrStale = errors.New("ep: stale handle: it was released, or its version of the group is over")
	// ErrUsed: Result or Fail has ended the handle before.
	ErrUsed = errors.New("ep: the result of this handle was taken before")
	// ErrOutOfStep: the calls on a handle came in another order than StartDispatch, Recv, StartCombine, Result.
	ErrOutOfStep = errors.New("ep: out of step")
	// ErrNoBuffer: Config.Handles handles (or the group's depth) are live. Release one.
	ErrNoBuffer = errors.New("ep: too many live handles")
	// ErrDType: the call is for the other Config.DType.
	ErrDType = errors.New("ep: call for another type of rows than Config.DType")
	// ErrClosed: the Buffer was closed.
	ErrClosed = errors.New("ep: closed")
	// ErrGrown: the group has more ranks than the placement: SetPlacement first.
	ErrGrown = errors.New("ep: the group has more ranks than the placement")
	// ErrSelf: the group does not count this rank as active.
	ErrSelf = errors.New("ep: this rank is not active in its group")
)

// ErrInvalidExpert names the entry of experts that is no expert.
type ErrInvalidExpert = route.ErrInvalidExpert

// ErrTooManyTokens: a batch is longer than agreed, or its rows do not fit in the group's slot. The step fails on all.
type ErrTooManyTokens struct {
	Tokens, Max int // Max is Config.MaxTokens
	Bytes, Slot int // or, if it is 0, the bytes needed and the slot's
}

func (e *ErrTooManyTokens) Error() string {
	if e.Bytes > 0 {
		return fmt.Sprintf("ep: %d tokens need %d bytes, the group's slot has %d", e.Tokens, e.Bytes, e.Slot)
	}
	return fmt.Sprintf("ep: %d tokens, at most %d are agreed", e.Tokens, e.Max)
}

// ErrShape: a slice has the wrong length.
type ErrShape struct {
	Arg       string
	Len, Want int
}

func (e *ErrShape) Error() string {
	return fmt.Sprintf("ep: %s has %d elements, want %d", e.Arg, e.Len, e.Want)
}

// ErrUncovered: with Config.Uncovered = Error, an entry names an expert that no active rank holds.
type ErrUncovered struct{ Token, K, Expert int }

func (e *ErrUncovered) Error() string {
	return fmt.Sprintf("ep: token %d, choice %d: no active rank holds expert %d", e.Token, e.K, e.Expert)
}

// ErrOverflow: a rank was sent more rows than it can give back.
type ErrOverflow struct{ Rows, Max int }

func (e *ErrOverflow) Error() string {
	return fmt.Sprintf("ep: received %d rows, at most %d fit (Config.MaxRows, or the group's slot)", e.Rows, e.Max)
}

// ErrCorrupt: a part that this rank received is not well formed.
type ErrCorrupt struct {
	Rank int
	Why  string
}

func (e *ErrCorrupt) Error() string {
	return fmt.Sprintf("ep: corrupt part of rank %d: %s", e.Rank, e.Why)
}

// ErrMismatch: two ranks do not run the same configuration. All ranks return the same one.
type ErrMismatch struct {
	Rank         int    // the lowest rank that differs from the lowest active one
	Field        string // of Config, or "Placement", "half", "version"
	Theirs, Want uint64 // its value, and that of the lowest active rank (digests, for a placement)
}

func (e *ErrMismatch) Error() string {
	return fmt.Sprintf("ep: rank %d has %s %d, the lowest rank has %d", e.Rank, e.Field, e.Theirs, e.Want)
}

// Reason says why a rank gave a step up.
type Reason uint8

// The reasons.
const (
	ReasonNone          Reason = iota
	ReasonTooManyTokens        // *ErrTooManyTokens there
	ReasonInvalidExpert        // *ErrInvalidExpert there
	ReasonShape                // *ErrShape there
	ReasonUncovered            // *ErrUncovered there
	ReasonOverflow             // *ErrOverflow there
	ReasonCorrupt              // *ErrCorrupt there
	ReasonFailed               // Handle.Fail, or the compute function of Step returned an error
	ReasonReleased             // Handle.Release before Result
	ReasonConfig               // its configuration is invalid
	ReasonMismatch             // *ErrMismatch there
	reasons
)

func (r Reason) String() string {
	switch r {
	case ReasonTooManyTokens:
		return "too many tokens"
	case ReasonInvalidExpert:
		return "invalid expert"
	case ReasonShape:
		return "wrong shape"
	case ReasonUncovered:
		return "uncovered expert"
	case ReasonOverflow:
		return "overflow"
	case ReasonCorrupt:
		return "corrupt part"
	case ReasonFailed:
		return "computation failed"
	case ReasonReleased:
		return "handle released"
	case ReasonConfig:
		return "invalid configuration"
	case ReasonMismatch:
		return "mismatch"
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// ErrPoisoned: a rank could not do its part of the step and said so. The step fails on all ranks with the same Rank and
// Reason, out is not written, and the group and the Buffer go on with the next step.
type ErrPoisoned struct {
	Rank   int
	Reason Reason
	A, B   uint32 // details of the reason: what was found and what is allowed
	Err    error  // this rank's own complaint, if it has one: errors.As finds *ErrTooManyTokens and the like
}

func (e *ErrPoisoned) Error() string {
	s := fmt.Sprintf("ep: rank %d gave the step up: %v", e.Rank, e.Reason)
	switch e.Reason {
	case ReasonTooManyTokens, ReasonOverflow:
		s += fmt.Sprintf(" (%d, at most %d)", e.A, e.B)
	case ReasonInvalidExpert: // may be negative
		s += fmt.Sprintf(" (%d, want -1 to %d)", int32(e.A), e.B)
	case ReasonShape:
		s += fmt.Sprintf(" (%d elements, want %d)", e.A, e.B)
	case ReasonUncovered:
		s += fmt.Sprintf(" (%d)", e.A)
	}
	if e.Err != nil {
		s += "; here: " + e.Err.Error()
	}
	return s
}

func (e *ErrPoisoned) Unwrap() error { return e.Err }

// ErrRerun is what *RankLost becomes with Policy = Rerun: repeat the step with the same input. All survivors get it
// alike, and in an operation that they repeat at the same place of their order; but if steps overlap, one rank may meet
// it in StartDispatch of a later step where another meets it in Result of an earlier one. So then: start nothing new, ask
// each live handle (Recv, StartCombine, Result), oldest first, and repeat those that are lost, in order. They are the
// last ones. Step does all this where nothing overlaps.
type ErrRerun struct {
	Epoch uint64 // the version without the lost ranks
	Lost  []int  // ranks
	Err   error  // the group's error
}

func (e *ErrRerun) Error() string {
	return fmt.Sprintf("ep: ranks %v lost, repeat the step in version %d", e.Lost, e.Epoch)
}

func (e *ErrRerun) Unwrap() error { return e.Err }

package ep

import (
	"errors"
	"fmt"

	"github.com/serry-project/serry/ep/route"
	"github.com/serry-project/serry/internal/dtype"
)

// DType is the type of a row's elements: F32 or BF16. Sums are made in f32 for both.
type DType = dtype.DType

// The types.
const (
	F32  = dtype.F32
	BF16 = dtype.BF16
)

// Policy says what a step does when ranks die in it.
type Policy uint8

// The policies. What happens to experts without a living replica, in both, is Config.Uncovered.
const (
	Fail  Policy = iota // the group's *RankLost comes out as it is; out is not written
	Rerun               // it becomes *ErrRerun: the caller, or Step, repeats the step on the survivors
)

// Uncovered says what becomes of an entry whose expert no active rank holds.
type Uncovered uint8

// The choices.
const (
	Drop  Uncovered = iota // it contributes nothing, and is counted in Output.Missing and LostMass
	Error                  // *ErrUncovered on the rank that named it, *ErrPoisoned on all
)

// Layout is the form of the received rows. In both the order is (expert, source rank, token, k).
type Layout uint8

// The layouts.
const (
	Flat        Layout = iota // no gaps
	ExpertMajor               // each local expert's block starts, and ends, at a multiple of Config.Align rows
)

// Config is equal on all ranks, but for Joining. Open checks that.
type Config struct {
	Experts   int              // E, the number of logical experts
	TopK      int              // K, choices per token
	Hidden    int              // H, elements of a row
	DType     DType            // of rows; 0 is F32
	MaxTokens int              // T of a batch is at most this; 0: what the group's slot holds
	Placement *route.Placement // over all ranks of the group; not to be changed any more

	Policy      Policy
	Uncovered   Uncovered
	Renormalise bool // scale the weights of a token that lost experts: w*sum(w)/sum(live w)
	Layout      Layout
	Align       int // rows, for ExpertMajor; 0 is 1

	// MaxRows bounds the rows that a rank receives in a step (*ErrOverflow beyond; padding does not count). 0: as many as
	// the group's slot can carry back.
	MaxRows int
	// Handles is the number of steps that may be under way (or not yet released) at a time; 0 is the group's depth, and it
	// is at most that.
	Handles int
	// Joining is set by a process that joined a running group, whose members do not call Open again: its configuration is
	// then checked at the first step.
	Joining bool
}

const (
	maxHidden  = 1 << 24
	maxTopK    = 1<<16 - 1
	maxEntries = 1<<31 - 1 // tokens times choices, and rows
)

func (c *Config) align() int {
	if c.Layout == ExpertMajor && c.Align > 1 {
		return c.Align
	}
	return 1
}

func (c *Config) rowBytes() int { return c.Hidden * c.DType.Size() }

// Validate returns every complaint about c for a group of the given size, joined, or nil.
func (c *Config) Validate(ranks int) error {
	var errs []error
	in := func(name string, v, lo, hi int) {
		if v < lo || v > hi {
			errs = append(errs, fmt.Errorf("ep: %s is %d, want %d to %d", name, v, lo, hi))
		}
	}
	in("Experts", c.Experts, 1, route.MaxExperts)
	in("TopK", c.TopK, 1, maxTopK)
	in("Hidden", c.Hidden, 1, maxHidden)
	if c.DType != F32 && c.DType != BF16 {
		errs = append(errs, fmt.Errorf("ep: DType is %v, want f32 or bf16", c.DType))
	}
	in("MaxTokens", c.MaxTokens, 0, maxEntries/max(c.TopK, 1))
	in("Policy", int(c.Policy), int(Fail), int(Rerun))
	in("Uncovered", int(c.Uncovered), int(Drop), int(Error))
	in("Layout", int(c.Layout), int(Flat), int(ExpertMajor))
	in("Align", c.Align, 0, 1<<20)
	in("MaxRows", c.MaxRows, 0, 1<<31-1)
	in("Handles", c.Handles, 0, 1<<10)
	return errors.Join(append(errs, c.checkPlacement(c.Placement, ranks))...)
}

func (c *Config) checkPlacement(p *route.Placement, ranks int) error {
	if err := p.Validate(); err != nil {
		return err
	}
	if p.Experts != c.Experts || p.Ranks != ranks {
		return fmt.Errorf("ep: the placement is of %d experts on %d ranks, want %d on %d", p.Experts, p.Ranks, c.Experts, ranks)
	}
	return nil
}

// DispatchBytes is what the dispatch half of a batch of MaxTokens tokens takes at most of a slot.
func (c *Config) DispatchBytes(ranks int) int { return c.dispatchBytes(ranks, c.MaxTokens) }

func (c *Config) dispatchBytes(ranks, tokens int) int {
	// Worst: every token goes to as many ranks as it can, each part is rounded up.
	return ranks*(headerBytes+partAlign) + tokens*(c.TopK*entryBytes+min(c.TopK, ranks)*c.rowBytes())
}

// SlotBytes is the slot size with which no step can overflow: every entry of every rank may come to one. It grows with
// the number of ranks; a smaller slot, at least DispatchBytes, bounds the imbalance that a step can have.
func (c *Config) SlotBytes(ranks int) int {
	rows := ranks * c.MaxTokens * c.TopK
	if c.MaxRows > 0 {
		rows = min(rows, c.MaxRows)
	}
	return max(c.DispatchBytes(ranks), ranks*(headerBytes+partAlign)+rows*c.rowBytes(), openBytes(ranks))
}

// maxRows is how many rows a rank can give back through a slot.
func (c *Config) maxRows(ranks, slot int) int {
	n := max(0, slot-ranks*(headerBytes+partAlign)) / c.rowBytes()
	if c.MaxRows > 0 {
		n = min(n, c.MaxRows)
	}
	return min(n, maxEntries)
}

// field is one thing that must be equal on all ranks.
type field struct {
	name  string
	value uint64
}

const nFields = 12

func (c *Config) fields() [nFields]field {
	var renorm, placement uint64
	if c.Renormalise {
		renorm = 1
	}
	if c.Placement != nil {
		placement = c.Placement.Digest()
	}
	return [nFields]field{
		{"Experts", uint64(c.Experts)},
		{"TopK", uint64(c.TopK)},
		{"Hidden", uint64(c.Hidden)},
		{"DType", uint64(c.DType)},
		{"MaxTokens", uint64(c.MaxTokens)},
		{"Policy", uint64(c.Policy)},
		{"Uncovered", uint64(c.Uncovered)},
		{"Renormalise", renorm},
		{"Layout", uint64(c.Layout)},
		{"Align", uint64(c.align())},
		{"MaxRows", uint64(c.MaxRows)},
		{"Placement", placement},
	}
}

// digest is a hash of all fields but the placement, which has its own and may change.
func (c *Config) digest() uint64 {
	h := uint64(14695981039346656037)
	f := c.fields()
	for _, v := range f[:nFields-1] {
		for i := range 8 {
			h = (h ^ v.value>>(8*i)&255) * 1099511628211
		}
	}
	return h
}

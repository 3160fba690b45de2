package ep

import "testing"

func TestPoisonSaysWhat(t *testing.T) {
	for want, e := range map[string]*ErrPoisoned{
		"ep: rank 2 gave the step up: invalid expert (-7, want -1 to 63)": {Rank: 2, Reason: ReasonInvalidExpert, A: 0xfffffff9, B: 63},
		"ep: rank 0 gave the step up: wrong shape (5 elements, want 6)":   {Reason: ReasonShape, A: 5, B: 6},
		"ep: rank 1 gave the step up: overflow (9, at most 8)":            {Rank: 1, Reason: ReasonOverflow, A: 9, B: 8},
		"ep: rank 1 gave the step up: uncovered expert (3)":               {Rank: 1, Reason: ReasonUncovered, A: 3},
	} {
		if got := e.Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

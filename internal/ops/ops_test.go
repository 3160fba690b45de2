package ops

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNames(t *testing.T) {
	good := regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
	seen := map[string]bool{}
	check := func(s string) {
		require.Regexp(t, good, s)
		require.False(t, seen[s], "%s twice", s)
		seen[s] = true
	}
	for o := Op(1); o < NumOps; o++ {
		check(o.String())
		require.Equal(t, o == Send || o == Recv, o.Local())
	}
	for o := Outcome(1); o < NumOutcomes; o++ {
		check(o.String())
	}
	require.Equal(t, "operation 0", Op(0).String())
	require.Equal(t, "operation 200", Op(200).String())
	require.Equal(t, "outcome 0", Outcome(0).String())
}

package proof

import (
	"strings"
	"testing"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/pg"

	"github.com/stretchr/testify/require"
)

// TestChecksBite gives each check what it must find, and what it must let pass.
func TestChecksBite(t *testing.T) {
	four, three := []int{0, 1, 2, 3}, []int{0, 1, 2}
	ok := func(step, at int, seq, epoch uint64, active []int) record {
		return record{Step: step, At: at, Group: "W", Kind: "all_reduce", Result: "ok", Seq: seq, Epoch: epoch, Active: active}
	}
	lost := func(step, at int, epoch uint64) record {
		return record{Step: step, At: at, Group: "W", Kind: "all_reduce", Result: "lost", Epoch: epoch, Active: []int{3}}
	}
	found := func(t *testing.T, bad []string, want string) {
		t.Helper()
		if want == "" {
			require.Empty(t, bad)
			return
		}
		require.Contains(t, strings.Join(bad, "\n"), want)
	}
	for name, c := range map[string]struct {
		records []record
		want    string
	}{
		"a loss":                {[]record{ok(0, 0, 1, 1, four), lost(0, 1, 2), ok(0, 2, 2, 2, three)}, ""},
		"waited for backwards":  {[]record{ok(0, 1, 2, 2, three), ok(0, 0, 1, 1, four)}, ""},
		"the epoch falls":       {[]record{ok(0, 0, 1, 2, four), ok(0, 1, 2, 1, four)}, "falls back"},
		"after a loss":          {[]record{lost(0, 0, 2), ok(0, 1, 1, 1, four)}, "falls back"},
		"the sequence stays":    {[]record{ok(0, 0, 1, 1, four), ok(0, 1, 1, 1, four)}, "sequence 1 after 1"},
		"two sets of one epoch": {[]record{ok(0, 0, 1, 1, four), ok(0, 1, 2, 1, three)}, "two sets"},
	} {
		t.Run(name, func(t *testing.T) { found(t, checkOrder(survivor{records: c.records}, map[string]record{}), c.want) })
	}

	o := &op{Step: 5, At: 7, Group: "W", Kind: "p2p", DType: dtype.U8, N: 3, Root: 1, To: 3, Messages: 2}
	send := record{Step: 5, At: 7, Group: "W", Kind: "send", Result: "ok", Got: 2}
	recv := record{Step: 5, At: 7, Group: "W", Kind: "recv", Result: "ok", Got: 2, Sum: sum(append(o.message(0), o.message(1)...))}
	with := func(r record, f func(*record)) record { f(&r); return r }
	gone := func(r *record) { r.Result, r.Got, r.Sum = "lost", 0, 0 }
	swapped := func(r *record) { r.Sum = sum(append(o.message(1), o.message(0)...)) }
	half := func(r *record) { r.Result, r.Got, r.Sum = "lost", 1, sum(o.message(0)) }
	late := func(r *record) { r.Result, r.Got, r.Sum = "late", 0, 0 }
	both := []survivor{{slot: 1, records: []record{send}}, {slot: 3, records: []record{recv}}}
	for name, c := range map[string]struct {
		mode pg.Mode
		rs   map[int]record
		ss   []survivor
		want string
	}{
		"all well":              {pg.Continue, map[int]record{1: send, 3: recv}, both, ""},
		"in another order":      {pg.Raise, map[int]record{1: send, 3: with(recv, swapped)}, both, "received"},
		"lost by one":           {pg.Raise, map[int]record{1: send, 3: with(recv, gone)}, both, ""},
		"lost though both live": {pg.Continue, map[int]record{1: send, 3: with(recv, half)}, both, "that live"},
		"one end":               {pg.Continue, map[int]record{1: with(send, gone)}, both[:1], ""},
		"half of it":            {pg.Continue, map[int]record{3: with(recv, half)}, both[1:], ""},
		"a deadline":            {pg.Continue, map[int]record{3: with(recv, late)}, both[1:], "late"},
		"silence":               {pg.Raise, map[int]record{1: send}, both, "rank 3 has nothing"},
	} {
		t.Run(name, func(t *testing.T) { found(t, checkP2P(rankArgs{Mode: c.mode}, o, c.rs, c.ss), c.want) })
	}

	ops := map[place]*op{{5, 7}: o}
	for name, c := range map[string]struct {
		records []record
		want    string
	}{
		"to a member":               {[]record{ok(5, 1, 1, 1, four), send}, ""},
		"to one who is gone":        {[]record{ok(5, 1, 1, 2, three), send}, "which is gone"},
		"and it says so":            {[]record{ok(5, 1, 1, 2, three), with(send, gone)}, ""},
		"who was gone a step ago":   {[]record{ok(4, 1, 1, 2, three), send}, ""},
		"who is not gone from here": {[]record{with(ok(5, 1, 1, 2, three), func(r *record) { r.Group = "A" }), send}, ""},
	} {
		t.Run(name, func(t *testing.T) { found(t, checkGone(survivor{records: c.records}, ops), c.want) })
	}
}

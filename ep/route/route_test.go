package route

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func contiguous(t testing.TB, experts, ranks, replicas int) *Placement {
	p, err := Contiguous(experts, ranks, replicas)
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
	return p
}

// Every size that fits in the head: valid, balanced, primaries contiguous, distinct ranks.
func TestContiguousIsBalanced(t *testing.T) {
	for ranks := 1; ranks <= 12; ranks++ {
		for experts := 1; experts <= 70; experts++ {
			for replicas := 1; replicas <= min(ranks, 4); replicas++ {
				p := contiguous(t, experts, ranks, replicas)
				if err := p.Validate(); err != nil {
					t.Fatalf("%d/%d/%d: %v", experts, ranks, replicas, err)
				}
				limit := (replicas*experts + ranks - 1) / ranks
				total := 0
				for r := range ranks {
					n := len(p.Resident(r))
					total += n
					if n > limit {
						t.Errorf("%d experts, %d ranks, %d replicas: rank %d holds %d, limit %d", experts, ranks, replicas, r, n, limit)
					}
				}
				if total != replicas*experts {
					t.Errorf("%d/%d/%d: %d copies", experts, ranks, replicas, total)
				}
				for e, l := range p.Replicas {
					if l[0] != e*ranks/experts {
						t.Errorf("primary of %d is %d", e, l[0])
					}
				}
			}
		}
	}
}

// The rows of a dead rank fall on all others, not on one.
func TestContiguousSpreadsADeadRank(t *testing.T) {
	p := contiguous(t, 64, 5, 2)
	for dead := range 5 {
		heirs := make([]int, 5)
		active := All(5)
		active.Del(dead)
		for e, l := range p.Replicas {
			if l[0] == dead {
				heirs[p.Owner(e, active, dead)]++
			}
		}
		for r, n := range heirs {
			if r != dead && (n < 2 || n > 5) {
				t.Errorf("dead %d: heirs %v", dead, heirs)
			}
		}
	}
	if l := p.Lost(All(5)); l != nil {
		t.Errorf("lost %v", l)
	}
}

func TestContiguousRefuses(t *testing.T) {
	for _, c := range [][3]int{{0, 1, 1}, {1, 0, 1}, {4, 2, 3}, {4, 2, 0}, {MaxExperts + 1, 2, 1}, {4, MaxRanks + 1, 1}} {
		if _, err := Contiguous(c[0], c[1], c[2]); err == nil {
			t.Errorf("%v accepted", c)
		}
	}
}

func TestValidateNamesEveryComplaint(t *testing.T) {
	p := &Placement{Experts: 4, Ranks: 2, Replicas: [][]int{{0, 0}, {}, {2}}}
	err := p.Validate()
	if err == nil {
		t.Fatal("valid")
	}
	for _, want := range []string{"replicas of 3 experts, want 4", "expert 0 is on rank 0 twice", "expert 1 is on no rank", "expert 2 is on rank 2 of 2"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	if (&Placement{}).Validate() == nil || (*Placement)(nil).Validate() == nil {
		t.Error("the empty placement is valid")
	}
}

func TestFromPhysical(t *testing.T) {
	p, err := FromPhysical([]int{0, 1, 2, 0, 3, 3, 1, -1}, 4, 4)
	if err != nil {
		t.Fatal(err)
	}
	want := [][]int{{0, 1}, {0, 3}, {1}, {2}}
	for e := range want {
		if !slices.Equal(p.Replicas[e], want[e]) {
			t.Errorf("expert %d on %v, want %v", e, p.Replicas[e], want[e])
		}
	}
	for _, bad := range [][]int{{}, {0, 1, 2}, {0, 9}, {0, -2}, {0, 0}} {
		if _, err := FromPhysical(bad, 2, 2); err == nil {
			t.Errorf("%v accepted", bad)
		}
	}
}

func TestDigestTellsPlacementsApart(t *testing.T) {
	seen := map[uint64]bool{}
	for ranks := 1; ranks < 6; ranks++ {
		for experts := 1; experts < 20; experts++ {
			for replicas := 1; replicas <= ranks; replicas++ {
				d := contiguous(t, experts, ranks, replicas).Digest()
				if seen[d] {
					t.Fatal("collision")
				}
				seen[d] = true
			}
		}
	}
	a, b := contiguous(t, 8, 4, 2), contiguous(t, 8, 4, 2)
	b.Replicas[3][0], b.Replicas[3][1] = b.Replicas[3][1], b.Replicas[3][0]
	if a.Digest() == b.Digest() {
		t.Error("the order of replicas counts")
	}
	if a.Digest() != contiguous(t, 8, 4, 2).Digest() {
		t.Error("not a function of the placement")
	}
}

func TestOwner(t *testing.T) {
	p := &Placement{Experts: 2, Ranks: 4, Replicas: [][]int{{0, 2}, {3}}}
	all := All(4)
	no := func(dead ...int) Ranks {
		s := all
		for _, d := range dead {
			s.Del(d)
		}
		return s
	}
	for _, c := range []struct {
		e      int
		active Ranks
		src    int
		want   int
	}{
		{0, all, 0, 0}, {0, all, 2, 2}, // at home
		{0, all, 1, 2}, {0, all, 3, 2}, // by turns
		{1, all, 0, 3},
		{0, no(2), 1, 0}, {0, no(0), 1, 2}, {0, no(0, 2), 1, -1}, {1, no(3), 3, -1},
	} {
		if got := p.Owner(c.e, c.active, c.src); got != c.want {
			t.Errorf("expert %d from rank %d: owner %d, want %d", c.e, c.src, got, c.want)
		}
	}
	if l := p.Lost(no(0, 2)); !slices.Equal(l, []int{0}) {
		t.Errorf("lost %v", l)
	}
}

// Owner is active, holds the expert, and does not move when another rank dies.
func TestOwnerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 6).Draw(t, "ranks")
		experts := rapid.IntRange(1, 17).Draw(t, "experts")
		p, err := Contiguous(experts, ranks, rapid.IntRange(1, ranks).Draw(t, "replicas"))
		if err != nil {
			t.Fatal(err)
		}
		var active Ranks
		for r := range ranks {
			if rapid.Bool().Draw(t, "active") {
				active.Add(r)
			}
		}
		lost := p.Lost(active)
		dead := rapid.IntRange(0, ranks-1).Draw(t, "dead")
		after := active
		after.Del(dead)
		for e := range experts {
			for src := range ranks {
				o := p.Owner(e, active, src)
				if (o < 0) != slices.Contains(lost, e) {
					t.Fatalf("owner %d, lost %v", o, lost)
				}
				if o >= 0 && (!active.Has(o) || !slices.Contains(p.Replicas[e], o)) {
					t.Fatalf("expert %d has owner %d", e, o)
				}
				if !slices.Contains(p.Replicas[e], dead) && p.Owner(e, after, src) != o {
					t.Fatalf("expert %d moved though rank %d has none of it", e, dead)
				}
			}
		}
	})
}

// The plan against the definition, entry by entry.
func TestPlanAgainstDefinition(t *testing.T) {
	var plan Plan
	var tab Table
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 5).Draw(t, "ranks")
		experts := rapid.IntRange(1, 17).Draw(t, "experts")
		tokens, topK := rapid.IntRange(0, 9).Draw(t, "T"), rapid.IntRange(1, 4).Draw(t, "K")
		p, err := Contiguous(experts, ranks, rapid.IntRange(1, min(2, ranks)).Draw(t, "replicas"))
		if err != nil {
			t.Fatal(err)
		}
		src := rapid.IntRange(0, ranks-1).Draw(t, "src")
		active := All(ranks)
		active.Del(rapid.IntRange(0, ranks).Draw(t, "dead"))
		ids := rapid.SliceOfN(rapid.Int32Range(-1, int32(experts-1)), tokens*topK, tokens*topK).Draw(t, "ids")
		w := rapid.SliceOfN(rapid.Float32Range(0, 1), tokens*topK, tokens*topK).Draw(t, "w")
		tab.Reset(p, active, src)
		if err := plan.Build(&tab, tokens, topK, ids); err != nil {
			t.Fatal(err)
		}
		missing := 0
		for r := range ranks {
			var rows []int32
			distinct := map[int]bool{}
			for i, id := range ids {
				if id >= 0 && p.Owner(int(id), active, src) == r {
					rows = append(rows, int32(i))
					distinct[i/topK] = true
				}
			}
			if !slices.Equal(plan.Rows(r), rows) || plan.Count(r) != len(rows) || plan.TokenCount(r) != len(distinct) {
				t.Fatalf("rank %d gets %v of %d tokens, want %v of %d", r, plan.Rows(r), plan.TokenCount(r), rows, len(distinct))
			}
		}
		miss, mass := make([]uint8, tokens), make([]float32, tokens)
		tainted := plan.Loss(w, miss, mass)
		for tk := range tokens {
			n, m := 0, float32(0)
			for k := range topK {
				id := ids[tk*topK+k]
				switch o := plan.Owner[tk*topK+k]; {
				case id < 0 && o != None, id >= 0 && o == None:
					t.Fatalf("id %d, owner %d", id, o)
				case o == Lost:
					n, m = n+1, m+w[tk*topK+k]
				}
			}
			if miss[tk] != uint8(n) || mass[tk] != m {
				t.Fatalf("token %d: missing %d, mass %v, want %d, %v", tk, miss[tk], mass[tk], n, m)
			}
			if n > 0 {
				tainted--
			}
			missing += n
		}
		if missing != plan.Missing || tainted != 0 {
			t.Fatalf("missing %d, want %d; tokens off by %d", plan.Missing, missing, tainted)
		}
	})
}

func TestInvalidExpertIsNamed(t *testing.T) {
	var tab Table
	tab.Reset(contiguous(t, 4, 2, 1), All(2), 0)
	var plan Plan
	for _, id := range []int32{4, -2, math.MaxInt32, math.MinInt32} {
		err := plan.Build(&tab, 2, 2, []int32{0, -1, 3, id})
		var ie *ErrInvalidExpert
		if !errors.As(err, &ie) || *ie != (ErrInvalidExpert{Token: 1, K: 1, ID: id, Experts: 4}) {
			t.Errorf("id %d: %v", id, err)
		}
		if plan.Count(0)+plan.Count(1) != 0 || len(plan.Owner) != 0 {
			t.Error("the plan is not empty")
		}
	}
}

func TestRenormalise(t *testing.T) {
	p := &Placement{Experts: 3, Ranks: 2, Replicas: [][]int{{0}, {1}, {0}}}
	var tab Table
	active := All(1)
	tab.Reset(p, active, 0)
	if tab.LostExperts() != 1 || tab.Owner(1) != Lost {
		t.Fatal("expert 1 should be lost")
	}
	var plan Plan
	nan := float32(math.NaN())
	ids := []int32{
		0, 2, -1, // nothing lost: untouched
		0, 1, 2,
		1, 1, -1, // all lost
		0, 1, -1, // live sum is 0
	}
	w := []float32{.25, .5, nan, .25, .5, .25, .5, .5, nan, 0, 1, nan}
	if err := plan.Build(&tab, 4, 3, ids); err != nil {
		t.Fatal(err)
	}
	miss, mass := make([]uint8, 4), make([]float32, 4)
	if n := plan.Loss(w, miss, mass); n != 3 || !slices.Equal(miss, []uint8{0, 1, 2, 1}) || !slices.Equal(mass, []float32{0, .5, 1, 1}) {
		t.Errorf("%d tokens, %v, %v", n, miss, mass)
	}
	plan.Renormalise(w)
	for i, want := range []float32{.25, .5, nan, .5, .5, .5, .5, .5, nan, 0, 1, nan} {
		if w[i] != want && want == want {
			t.Errorf("w[%d] = %v, want %v", i, w[i], want)
		}
	}
}

func TestMoreThan255Missing(t *testing.T) {
	var tab Table
	tab.Reset(contiguous(t, 1, 2, 1), Ranks{}, 0)
	var plan Plan
	if err := plan.Build(&tab, 1, 300, make([]int32, 300)); err != nil {
		t.Fatal(err)
	}
	miss := make([]uint8, 1)
	if plan.Loss(make([]float32, 300), miss, nil); miss[0] != 255 || plan.Missing != 300 {
		t.Errorf("missing %d of %d", miss[0], plan.Missing)
	}
}

func TestBuildDoesNotAllocate(t *testing.T) {
	p := contiguous(t, 16, 4, 2)
	ids := make([]int32, 64*4)
	for i := range ids {
		ids[i] = int32(i * 7 % 16)
	}
	var tab Table
	var plan Plan
	step := func() {
		tab.Reset(p, All(4), 1)
		if err := plan.Build(&tab, 64, 4, ids); err != nil {
			t.Fatal(err)
		}
	}
	step()
	if n := testing.AllocsPerRun(100, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkBuild(b *testing.B) {
	p := contiguous(b, 256, 8, 2)
	ids := make([]int32, 4096*8)
	for i := range ids {
		ids[i] = int32(i * 2654435761 >> 3 & 255)
	}
	var tab Table
	tab.Reset(p, All(8), 1)
	var plan Plan
	for b.Loop() {
		if err := plan.Build(&tab, 4096, 8, ids); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(ids)), "ns/entry")
}

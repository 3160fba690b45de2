package model

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPrefillEqualsSingleSteps(t *testing.T) {
	m := loadShared(t)
	sample, err := openReference(t).Bytes("sample", -1)
	require.NoError(t, err)
	tokens := Prompt(string(sample[:m.Context-1]))
	want := prefill(t, m, tokens, 1)
	for _, chunk := range []int{7, 64, m.Context} {
		sameBits(t, want, prefill(t, m, tokens, chunk), "chunked prefill")
	}
}

// TestRandomBatchMixes serves several sequences in random batches of prompt
// chunks, single steps, repetitions and rewinds; every row must have the bits it
// has alone.
func TestRandomBatchMixes(t *testing.T) {
	if testing.Short() {
		t.Skip("long, and no goroutine in it")
	}
	m := loadShared(t)
	b := m.NewBatch()
	rapid.Check(t, func(t *rapid.T) {
		type seq struct {
			tokens []byte
			want   []float32
			cache  *Cache
		}
		var seqs []*seq
		for range rapid.IntRange(1, 4).Draw(t, "sequences") {
			s := &seq{cache: m.NewCache()}
			s.tokens = rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "tokens")
			lone := m.NewCache()
			for p, tok := range s.tokens {
				logits, err := m.Step(b, []Row{{Cache: lone, Pos: p, Token: tok}})
				require.NoError(t, err)
				s.want = append(s.want, logits...)
			}
			seqs = append(seqs, s)
		}
		for left := true; left; {
			var rows []Row
			var want []float32
			left = false
			for _, s := range rapid.Permutation(seqs).Draw(t, "order") {
				if s.cache.Len() == len(s.tokens) {
					continue
				}
				left = true
				from := max(0, s.cache.Len()-rapid.SampledFrom([]int{0, 0, 0, 3}).Draw(t, "back"))
				to := min(len(s.tokens), s.cache.Len()+rapid.IntRange(0, 9).Draw(t, "chunk"))
				for p := from; p < to; p++ {
					rows = append(rows, Row{Cache: s.cache, Pos: p, Token: s.tokens[p]})
					want = append(want, s.want[p*m.Vocab:(p+1)*m.Vocab]...)
				}
			}
			got, err := m.Step(b, rows)
			require.NoError(t, err)
			sameBits(t, want, got, "mixed batch")
		}
	})
}

// TestSpreadExperts runs the stages by hand with the experts spread over four
// partial models, each call's rows in another order and cut in two, and
// compares with Step.
func TestSpreadExperts(t *testing.T) {
	if testing.Short() {
		t.Skip("long, and no goroutine in it")
	}
	m := loadShared(t)
	const members = 4
	var parts [members]*Model
	for i := range parts {
		var err error
		parts[i], err = Load(weightsPath, func(_, e int) bool { return e%members == i })
		require.NoError(t, err)
		require.Equal(t, m.ResidentExpertBytes()/members, parts[i].ResidentExpertBytes())
		require.Equal(t, m.Digest, parts[i].Digest)
	}
	tokens := Prompt("func f(a, b int) int {\n\treturn a")
	want := prefill(t, m, tokens, len(tokens))

	n, h, k := len(tokens), m.Hidden, m.TopK
	var rows []Row
	c := m.NewCache()
	for p, tok := range tokens {
		rows = append(rows, Row{Cache: c, Pos: p, Token: tok})
	}
	x, xn, y := make([]float32, n*h), make([]float32, n*h), make([]float32, n*k*h)
	experts, weights := make([]int32, n*k), make([]float32, n*k)
	dense := parts[0]
	b, worker := dense.NewBatch(), parts[1].NewBatch()
	require.NoError(t, b.Begin(rows))
	dense.Embed(rows, x)
	used := 0
	for l := range m.Layers {
		dense.Attend(b, l, x)
		dense.Route(b, l, x, xn, experts, weights)
		for e := range m.Experts {
			var in []float32
			var slots []int
			for s := len(experts) - 1; s >= 0; s-- { // the other way round than Step
				if int(experts[s]) == e {
					in = append(in, xn[s/k*h:(s/k+1)*h]...)
					slots = append(slots, s)
				}
			}
			used += min(len(slots), 1)
			out := make([]float32, len(in))
			half := len(slots) / 2 * h
			require.NoError(t, parts[e%members].Expert(worker, l, e, in[:half], out[:half]))
			require.NoError(t, parts[e%members].Expert(worker, l, e, in[half:], out[half:]))
			for i, s := range slots {
				copy(y[s*h:(s+1)*h], out[i*h:(i+1)*h])
			}
		}
		dense.Combine(x, y, weights)
	}
	logits := make([]float32, n*m.Vocab)
	dense.Head(b, x[:h], logits[:m.Vocab]) // the head too row by row and in bulk
	dense.Head(b, x[h:], logits[m.Vocab:])
	b.Commit()
	sameBits(t, want, logits, "spread experts")
	require.Equal(t, n, c.Len())
	require.Greater(t, used, m.Layers*m.Experts/2, "most experts should have had rows")
}

func TestRouteIsASoftmaxOverTheChosen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		logits := rapid.SliceOfN(rapid.Float32Range(-20, 20), 8, 16).Draw(t, "logits")
		experts, weights := make([]int32, 3), make([]float32, 3)
		topK(experts, weights, logits)
		var sum float32
		for k, e := range experts {
			sum += weights[k]
			for other, v := range logits {
				earlier := false
				for _, taken := range experts[:k] {
					earlier = earlier || int(taken) == other
				}
				if !earlier {
					require.True(t, v < logits[e] || v == logits[e] && other >= int(e), "expert %d chosen before %d", e, other)
				}
			}
		}
		require.InDelta(t, 1, sum, 1e-6)
	})
}

func TestMissingExpert(t *testing.T) {
	m, err := Load(weightsPath, func(l, e int) bool { return l != 2 })
	require.NoError(t, err)
	require.False(t, m.HasExpert(2, 0))
	require.True(t, m.HasExpert(1, 0))
	require.False(t, m.HasExpert(9, 0))

	b, c := m.NewBatch(), m.NewCache()
	row := make([]float32, m.Hidden)
	err = m.Expert(b, 2, 5, row, row)
	require.ErrorIs(t, err, ErrNotResident)
	require.EqualError(t, err, "layer 2, expert 5: expert not resident; load it with LoadExperts or send its rows to a process that holds it")
	require.ErrorContains(t, m.Expert(b, 4, 0, row, row), "layer 4, expert 0: the model has 4 layers of 16 experts")

	_, err = m.Step(b, []Row{{Cache: c}})
	require.ErrorIs(t, err, ErrNotResident)
	require.Equal(t, 0, c.Len(), "a failed pass commits nothing")

	// The experts come while the process runs; the pass is repeated.
	require.NoError(t, m.LoadExperts(func(l, _ int) bool { return l == 2 }))
	got, err := m.Step(b, []Row{{Cache: c}})
	require.NoError(t, err)
	sameBits(t, prefill(t, loadShared(t), []byte{0}, 1), got, "after LoadExperts")
	require.Equal(t, loadShared(t).ResidentExpertBytes(), m.ResidentExpertBytes())

	m.DropExperts(func(l, e int) bool { return e > 0 })
	require.Equal(t, int64(m.Layers)*m.ExpertBytes(), m.ResidentExpertBytes())
}

func TestBeginRefuses(t *testing.T) {
	m := loadShared(t)
	b := m.NewBatch()
	c, d := m.NewCache(), m.NewCache()
	for _, tc := range []struct {
		rows []Row
		want string
	}{
		{[]Row{{}}, "row 0: its cache was not made by this model's NewCache"},
		{[]Row{{Cache: &Cache{}}}, "row 0: its cache was not made by this model's NewCache"},
		{[]Row{{Cache: c, Pos: 512}}, "row 0: position 512 lies outside the context of 512; end the sequence"},
		{[]Row{{Cache: c, Pos: -1}}, "row 0: position -1 lies outside the context of 512; end the sequence"},
		{[]Row{{Cache: d}, {Cache: c, Pos: 1}}, "row 1: position 1 leaves a gap, the cache holds 0; send the missing rows first"},
		{[]Row{{Cache: c}, {Cache: d}, {Cache: c, Pos: 2}}, "row 2: position 2, but the sequence's previous row in the batch wants 1 next"},
		{[]Row{{Cache: c}, {Cache: c}}, "row 1: position 0, but the sequence's previous row in the batch wants 1 next"},
	} {
		require.EqualError(t, b.Begin(tc.rows), tc.want)
		_, err := m.Step(b, tc.rows)
		require.EqualError(t, err, tc.want)
	}
	require.Zero(t, c.Len())
	require.PanicsWithValue(t, "model: Embed: x has 1 values, want 128", func() {
		m.Embed([]Row{{Cache: c}}, make([]float32, 1))
	})
}

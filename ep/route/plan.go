package route

import "fmt"

// What Plan.Owner holds in place of a rank.
const (
	None = -1 // the entry names no expert (id -1)
	Lost = -2 // no active rank holds the expert
)

// ErrInvalidExpert says which entry names an expert that does not exist. (-1 is not one: it means no expert.)
type ErrInvalidExpert struct {
	Token, K int   // the entry: experts[Token][K]
	ID       int32 // what it says
	Experts  int   // ids 0..Experts-1 are valid
}

func (e *ErrInvalidExpert) Error() string {
	return fmt.Sprintf("route: token %d, choice %d names expert %d, there are %d", e.Token, e.K, e.ID, e.Experts)
}

// Table is Owner of every expert for one rank's tokens and one active set.
type Table struct {
	owner []int32 // [experts], a rank or Lost
	ranks int
	lost  int
}

// Reset computes the table anew; it allocates only if the number of experts grew.
func (t *Table) Reset(p *Placement, active Ranks, src int) {
	t.owner = grow(t.owner, p.Experts)
	t.ranks, t.lost = p.Ranks, 0
	for e := range t.owner {
		if o := p.Owner(e, active, src); o >= 0 {
			t.owner[e] = int32(o)
		} else {
			t.owner[e] = Lost
			t.lost++
		}
	}
}

// Owner of an expert: a rank or Lost.
func (t *Table) Owner(e int) int { return int(t.owner[e]) }

// LostExperts counts the experts that no active rank holds.
func (t *Table) LostExperts() int { return t.lost }

// Plan is where the rows of one rank's tokens go. A row is an entry (token, k) whose expert has an owner; entries are
// numbered token*TopK+k. Build it as often as you like: in the steady state it allocates nothing.
type Plan struct {
	Tokens, TopK int
	Owner        []int32 // [Tokens*TopK] a rank, None or Lost
	Missing      int     // number of entries whose expert is lost

	entries []int32 // by rank, ascending
	start   []int32 // [ranks+1] into entries
	tokens  []int32 // [ranks] distinct tokens
	cursor  []int32 // [ranks] scratch
}

// Build routes tokens*topK expert ids ([tokens][topK], row by row). It fails with *ErrInvalidExpert, and p is then
// empty. len(experts) must be tokens*topK.
func (p *Plan) Build(tab *Table, tokens, topK int, experts []int32) error {
	p.reset(tab.ranks, tokens, topK)
	owners := tab.owner
	i := 0
	for t := range tokens {
		for k := range topK {
			id := experts[i]
			if uint(id) >= uint(len(owners)) { // negative ids too
				if id != -1 {
					p.reset(tab.ranks, 0, topK)
					return &ErrInvalidExpert{Token: t, K: k, ID: id, Experts: len(owners)}
				}
				p.Owner[i] = None
				i++
				continue
			}
			o := owners[id]
			p.Owner[i] = o
			i++
			if o < 0 {
				p.Missing++
				continue
			}
			p.start[o+1]++
			if p.cursor[o] != int32(t)+1 {
				p.cursor[o] = int32(t) + 1
				p.tokens[o]++
			}
		}
	}
	for r := range tab.ranks {
		p.start[r+1] += p.start[r]
		p.cursor[r] = p.start[r]
	}
	p.entries = grow(p.entries, int(p.start[tab.ranks]))
	for i, o := range p.Owner {
		if o >= 0 {
			p.entries[p.cursor[o]] = int32(i)
			p.cursor[o]++
		}
	}
	return nil
}

func (p *Plan) reset(ranks, tokens, topK int) {
	p.Tokens, p.TopK, p.Missing = tokens, topK, 0
	p.Owner = grow(p.Owner, tokens*topK)
	p.start = grow(p.start, ranks+1)
	p.tokens = grow(p.tokens, ranks)
	p.cursor = grow(p.cursor, ranks)
	clear(p.start)
	clear(p.tokens)
	clear(p.cursor)
	p.entries = p.entries[:0]
}

// Rows lists the entries (token*TopK+k) that go to a rank, ascending, which is the order (token, k).
func (p *Plan) Rows(rank int) []int32 { return p.entries[p.start[rank]:p.start[rank+1]] }

// Count is len(Rows(rank)).
func (p *Plan) Count(rank int) int { return int(p.start[rank+1] - p.start[rank]) }

// TokenCount is the number of distinct tokens among Rows(rank).
func (p *Plan) TokenCount(rank int) int { return int(p.tokens[rank]) }

// Loss fills missing[t], the number of entries of token t whose expert is lost (255 stands for more), and mass[t], the
// sum of their weights in f32 in the order of k. Either may be nil, and has one element per token otherwise. It returns
// the number of tokens that miss something. weights is [Tokens*TopK]; those of live entries are not read.
func (p *Plan) Loss(weights []float32, missing []uint8, mass []float32) (tokens int) {
	if p.Missing == 0 {
		clear(missing)
		clear(mass)
		return 0
	}
	i := 0
	for t := range p.Tokens {
		n, m := 0, float32(0)
		for range p.TopK {
			if p.Owner[i] == Lost {
				n++
				m += weights[i]
			}
			i++
		}
		if n > 0 {
			tokens++
		}
		if missing != nil {
			missing[t] = uint8(min(n, 255))
		}
		if mass != nil {
			mass[t] = m
		}
	}
	return tokens
}

// Renormalise changes the weights of every token that lost something, and only those: w becomes w*S/L, where S is the
// sum of the weights of all entries that name an expert, L of the live ones, both in f32 in the order of k. Where L is 0
// the weights stay. weights is [Tokens*TopK].
func (p *Plan) Renormalise(weights []float32) {
	if p.Missing == 0 {
		return
	}
	for t := range p.Tokens {
		row := p.Owner[t*p.TopK : (t+1)*p.TopK]
		w := weights[t*p.TopK : (t+1)*p.TopK]
		var all, live float32
		lost := false
		for k, o := range row {
			switch {
			case o >= 0:
				all += w[k]
				live += w[k]
			case o == Lost:
				all += w[k]
				lost = true
			}
		}
		if !lost || live == 0 {
			continue
		}
		for k, o := range row {
			if o >= 0 {
				w[k] = float32(w[k]*all) / live
			}
		}
	}
}

// grow returns s with length n, its contents undefined.
func grow[T any](s []T, n int) []T {
	if cap(s) >= n {
		return s[:n]
	}
	return make([]T, n, n+n/4)
}

package model

import (
	"errors"
	"fmt"
)

// ErrNotResident is wrapped by the errors of Expert and Step for an expert that
// this process does not hold.
var ErrNotResident = errors.New("expert not resident")

// Cache holds the keys and values of one sequence. It belongs to one Batch at a
// time.
type Cache struct {
	n      int
	keys   []quad // [layer][head][Context/4][HeadDim] of four positions
	values []quad // [layer][head][HeadDim/4][Context] of four dimensions
	pend   int    // rows that Begin has counted
}

// NewCache returns an empty cache for one sequence; it takes
// 8*Layers*Context*Hidden bytes.
func (m *Model) NewCache() *Cache {
	n := m.cacheQuads()
	return &Cache{keys: make([]quad, n), values: make([]quad, n)}
}

func (m *Model) cacheQuads() int { return m.Layers * m.Context * m.Hidden / lanes }

// Len returns how many positions the cache holds.
func (c *Cache) Len() int { return c.n }

// Truncate forgets all positions from n on; it does nothing when the cache is
// not longer. Truncate(0) readies the cache for another sequence.
func (c *Cache) Truncate(n int) { c.n = min(c.n, max(n, 0)) }

// Row is one token of one sequence: the token stands at position Pos of the
// sequence in Cache, and the logits of the row foretell position Pos+1.
type Row struct {
	Cache *Cache
	Pos   int
	Token byte
}

// Batch is the scratch memory of one goroutine's passes over a model. It grows
// to the largest batch and is reused; the zero Batch is not usable, see
// [Model.NewBatch].
type Batch struct {
	m       *Model
	rows    []Row
	a, b    []float32 // [n][Hidden]
	q, k, v []float32 // [n][Hidden]
	s       []float32 // scores, Context
	inner   []float32 // [rows of one expert][FFN]
	nonzero []sparse
	step    stepScratch
}

// NewBatch returns scratch memory for passes over m.
func (m *Model) NewBatch() *Batch {
	return &Batch{m: m, s: make([]float32, m.Context), nonzero: make([]sparse, 0, m.FFN)}
}

func grow(s *[]float32, n int) []float32 {
	if cap(*s) < n {
		*s = make([]float32, n+n/2)
	}
	return (*s)[:n]
}

// Begin starts a pass over the rows and keeps the slice until Commit. The rows
// of one cache must stand in ascending order of position without gaps, the
// first at most at Cache.Len: a smaller position goes back to it and overwrites
// what followed. Any mix of sequences, of prompt chunks and of single steps is
// a batch. An error names the row; then no pass has begun. A pass may be given
// up at any stage by another Begin: the caches count only committed rows.
func (b *Batch) Begin(rows []Row) error {
	m := b.m
	for i, r := range rows {
		if r.Cache == nil || len(r.Cache.keys) != m.cacheQuads() {
			return fmt.Errorf("row %d: its cache was not made by this model's NewCache", i)
		}
		r.Cache.pend = -1
	}
	for i, r := range rows {
		c := r.Cache
		switch {
		case r.Pos < 0 || r.Pos >= m.Context:
			return fmt.Errorf("row %d: position %d lies outside the context of %d; end the sequence", i, r.Pos, m.Context)
		case c.pend < 0 && r.Pos > c.n:
			return fmt.Errorf("row %d: position %d leaves a gap, the cache holds %d; send the missing rows first", i, r.Pos, c.n)
		case c.pend >= 0 && r.Pos != c.pend:
			return fmt.Errorf("row %d: position %d, but the sequence's previous row in the batch wants %d next", i, r.Pos, c.pend)
		}
		c.pend = r.Pos + 1
	}
	b.rows = rows
	return nil
}

// Commit ends the pass: each cache of the batch now ends after its last row.
func (b *Batch) Commit() {
	for _, r := range b.rows {
		r.Cache.n = r.Pos + 1
	}
	b.rows = nil
}

// Embed sets x [n][Hidden] to the embeddings of the rows' tokens.
func (m *Model) Embed(rows []Row, x []float32) {
	h := m.Hidden
	mustLen("Embed: x", len(x), len(rows)*h)
	for i, r := range rows {
		copy(x[i*h:(i+1)*h], m.embed[int(r.Token)*h:])
	}
}

// Attend adds to x [n][Hidden], the rows of b's pass, the attention of the
// layer, and writes the rows' keys and values into their caches.
func (m *Model) Attend(b *Batch, layer int, x []float32) {
	h, d, n := m.Hidden, m.HeadDim(), len(b.rows)
	mustLen("Attend: x", len(x), n*h)
	l := &m.layers[layer]
	xn, out := grow(&b.a, n*h), grow(&b.b, n*h)
	q, k, v := grow(&b.q, n*h), grow(&b.k, n*h), grow(&b.v, n*h)
	for i := range n {
		rms(xn[i*h:(i+1)*h], x[i*h:(i+1)*h], l.attnNorm, m.Eps)
	}
	l.q.mul(q, xn)
	l.k.mul(k, xn)
	l.v.mul(v, xn)
	for i, r := range b.rows {
		cos, sin := m.cos[r.Pos*d/2:(r.Pos+1)*d/2], m.sin[r.Pos*d/2:(r.Pos+1)*d/2]
		for at := i * h; at < (i+1)*h; at += d {
			rms(q[at:at+d], q[at:at+d], l.qNorm, m.Eps)
			rope(q[at:at+d], cos, sin)
			rms(k[at:at+d], k[at:at+d], l.kNorm, m.Eps)
			rope(k[at:at+d], cos, sin)
		}
		m.store(r, layer, k[i*h:(i+1)*h], v[i*h:(i+1)*h])
	}
	for i, r := range b.rows {
		for head := range m.Heads {
			at := i*h + head*d
			m.attendHead(b, r, layer, head, q[at:at+d], xn[at:at+d])
		}
	}
	l.o.mul(out, xn)
	for i, v := range out {
		x[i] += v
	}
}

// headCache returns the keys [Context/4][HeadDim] and the values
// [HeadDim/4][Context] of one head.
func (m *Model) headCache(c *Cache, layer, head int) (keys, values []quad) {
	n := m.Context * m.HeadDim() / lanes
	at := (layer*m.Heads + head) * n
	return c.keys[at : at+n], c.values[at : at+n]
}

// store writes a row's keys and values [Hidden] into its cache.
func (m *Model) store(r Row, layer int, k, v []float32) {
	d := m.HeadDim()
	for head := range m.Heads {
		keys, values := m.headCache(r.Cache, layer, head)
		for i := range d {
			keys[r.Pos/lanes*d+i][r.Pos%lanes] = k[head*d+i]
			values[i/lanes*m.Context+r.Pos][i%lanes] = v[head*d+i]
		}
	}
}

// attendHead sets out [HeadDim] to one head's attention of a row over the
// positions 0 to r.Pos. The keys lie in panels of four positions, the values in
// panels of four dimensions, so both products are dot's.
func (m *Model) attendHead(b *Batch, r Row, layer, head int, q, out []float32) {
	d, n := m.HeadDim(), r.Pos+1
	keys, values := m.headCache(r.Cache, layer, head)
	for p := 0; p < n; p += lanes { // the last panel may reach past n: not read below
		dot((*quad)(b.s[p:]), q, keys[p/lanes*d:])
	}
	s := b.s[:n]
	for i := range s {
		s[i] *= m.scale
	}
	inv := 1 / softmax(s)
	for i := 0; i < d; i += lanes {
		dot((*quad)(out[i:]), s, values[i/lanes*m.Context:])
	}
	for i := range out {
		out[i] *= inv
	}
}

// Route chooses the experts of x [n][Hidden]: it sets xn [n][Hidden] to the
// normed rows, which are the experts' input, experts [n][TopK] to the chosen
// experts, the best first and the lower number first among equals, and weights
// [n][TopK] to their shares, which sum to one.
func (m *Model) Route(b *Batch, layer int, x, xn []float32, experts []int32, weights []float32) {
	h, e, k := m.Hidden, m.Experts, m.TopK
	n := len(x) / h
	mustLen("Route: xn", len(xn), n*h)
	mustLen("Route: experts", len(experts), n*k)
	mustLen("Route: weights", len(weights), n*k)
	l := &m.layers[layer]
	for i := range n {
		rms(xn[i*h:(i+1)*h], x[i*h:(i+1)*h], l.ffnNorm, m.Eps)
	}
	logits := grow(&b.a, n*e)
	l.router.mul(logits, xn)
	for i := range n {
		topK(experts[i*k:(i+1)*k], weights[i*k:(i+1)*k], logits[i*e:(i+1)*e])
	}
}

// topK picks the largest logits and turns them into a softmax over themselves,
// which equals the softmax over all, renormalised.
func topK(experts []int32, weights, logits []float32) {
	for k := range experts {
		best := -1
	next:
		for e, v := range logits {
			if best >= 0 && v <= logits[best] {
				continue
			}
			for _, taken := range experts[:k] {
				if int(taken) == e {
					continue next
				}
			}
			best = e
		}
		experts[k], weights[k] = int32(best), logits[best]
	}
	inv := 1 / softmax(weights)
	for k := range weights {
		weights[k] *= inv
	}
}

// Expert sets out [m][Hidden] to the expert's results for the rows in
// [m][Hidden], which Route has normed. It returns an error wrapping
// ErrNotResident when this process does not hold the expert.
func (m *Model) Expert(b *Batch, layer, e int, in, out []float32) error {
	if layer < 0 || layer >= m.Layers || e < 0 || e >= m.Experts {
		return fmt.Errorf("layer %d, expert %d: the model has %d layers of %d experts", layer, e, m.Layers, m.Experts)
	}
	x := m.layers[layer].experts[e].Load()
	if x == nil {
		return fmt.Errorf("layer %d, expert %d: %w; load it with LoadExperts or send its rows to a process that holds it", layer, e, ErrNotResident)
	}
	n := len(in) / m.Hidden
	mustLen("Expert: in", len(in), n*m.Hidden)
	mustLen("Expert: out", len(out), len(in))
	inner := grow(&b.inner, n*m.FFN)
	x.up.mul(inner, in)
	for r := range n {
		nz := reluSquare(b.nonzero[:0], inner[r*m.FFN:(r+1)*m.FFN])
		for o := 0; o < m.Hidden; o += lanes {
			dotSparse((*quad)(out[r*m.Hidden+o:]), nz, x.down.panel(o))
		}
	}
	return nil
}

// Combine adds to x [n][Hidden] each row's sum of weights [n][TopK] times its
// experts' results y [n][TopK][Hidden], taken in the order of k.
func (m *Model) Combine(x, y, weights []float32) {
	h, k := m.Hidden, m.TopK
	n := len(x) / h
	mustLen("Combine: y", len(y), n*k*h)
	mustLen("Combine: weights", len(weights), n*k)
	for r := range n {
		row := x[r*h : (r+1)*h]
		for i := range row {
			var acc float32
			for j := range k {
				acc += float32(weights[r*k+j] * y[(r*k+j)*h+i])
			}
			row[i] += acc
		}
	}
}

// Head sets logits [n][Vocab] to the scores of the byte that follows each of
// the rows x [n][Hidden]. Rows whose logits nobody wants may be left out.
func (m *Model) Head(b *Batch, x, logits []float32) {
	h := m.Hidden
	n := len(x) / h
	mustLen("Head: x", len(x), n*h)
	mustLen("Head: logits", len(logits), n*m.Vocab)
	xn := grow(&b.a, n*h)
	for i := range n {
		rms(xn[i*h:(i+1)*h], x[i*h:(i+1)*h], m.norm, m.Eps)
	}
	m.head.mul(logits, xn)
}

// mustLen panics on a slice of the wrong length: an error of the caller's code.
func mustLen(what string, got, want int) {
	if got != want {
		panic(fmt.Sprintf("model: %s has %d values, want %d", what, got, want))
	}
}

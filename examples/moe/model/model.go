// Package model runs a small byte-level mixture-of-experts transformer on the
// CPU in pure Go, shaped for expert-parallel serving.
//
// Every row of a batch (one token of one sequence) is computed by itself: the
// bits of its results depend on its own inputs and the weights, not on the rows
// beside it, the size of the batch, how a prompt was cut into chunks or which
// process ran an expert. So the stages below, run anywhere and in any mix, give
// exactly the bits of [Model.Step], which runs them in one process.
//
// A pass over n rows is:
//
//	b.Begin(rows)                      // checks the rows
//	m.Embed(rows, x)                   // x [n][Hidden]
//	for each layer {
//		m.Attend(b, layer, x)      // x += attention
//		m.Route(b, layer, x, xn, experts, weights)
//		// row r's k-th expert: y[r][k] = Expert(layer, experts[r][k], xn[r])
//		m.Combine(x, y, weights)   // x += sum over k of weights[k]*y[k]
//	}
//	m.Head(b, x, logits)
//	b.Commit()                         // the caches now hold the rows
//
// All arrays are row-major slices of float32 (experts int32) owned by the
// caller; no stage allocates per row. A token is a byte; every sequence begins
// with a zero byte.
package model

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"os"
	"sync/atomic"
)

// Config holds the dimensions of a model. It is read from the "config" entry of
// the weight file's metadata.
type Config struct {
	Vocab    int     `json:"vocab"`     // always 256: a token is a byte
	Hidden   int     `json:"hidden"`    // width of a row
	Layers   int     `json:"layers"`    // attention + experts each
	Heads    int     `json:"heads"`     // attention heads
	Experts  int     `json:"experts"`   // experts of a layer
	TopK     int     `json:"top_k"`     // experts a row is sent to
	FFN      int     `json:"ffn"`       // inner width of an expert
	Context  int     `json:"context"`   // most positions of a sequence
	RopeBase float64 `json:"rope_base"` // base of the rotary angles
	Eps      float64 `json:"eps"`       // of the RMS norms
}

// HeadDim returns the width of one attention head.
func (c Config) HeadDim() int { return c.Hidden / c.Heads }

func (c Config) check() error {
	dim := func(name string, v, multiple, most int) error {
		if v < multiple || v > most || v%multiple != 0 {
			return fmt.Errorf("%s is %d, want a multiple of %d up to %d", name, v, multiple, most)
		}
		return nil
	}
	for _, d := range []struct {
		name           string
		v, unit, bound int
	}{
		{"vocab", c.Vocab, 256, 256}, {"hidden", c.Hidden, lanes, 4096}, {"layers", c.Layers, 1, 64},
		{"heads", c.Heads, 1, 64}, {"experts", c.Experts, lanes, 256}, {"top_k", c.TopK, 1, 16},
		{"ffn", c.FFN, lanes, 16384}, {"context", c.Context, lanes, 8192},
	} {
		if err := dim(d.name, d.v, d.unit, d.bound); err != nil {
			return err
		}
	}
	if c.Hidden%c.Heads != 0 || c.HeadDim()%lanes != 0 {
		return fmt.Errorf("hidden %d over %d heads: want a multiple of %d for each head", c.Hidden, c.Heads, lanes)
	}
	if c.TopK > c.Experts {
		return fmt.Errorf("top_k is %d, want at most the %d experts", c.TopK, c.Experts)
	}
	if !(c.RopeBase > 1 && c.RopeBase < 1e9) || !(c.Eps > 0 && c.Eps < 1) {
		return fmt.Errorf("rope_base %v and eps %v: want 1 < rope_base < 1e9 and 0 < eps < 1", c.RopeBase, c.Eps)
	}
	return nil
}

// Model is a loaded model. Its weights do not change after Load, apart from the
// experts that LoadExperts and DropExperts bring and remove; all methods are
// safe for concurrent use, each goroutine with its own Batch.
type Model struct {
	Config
	// Digest is the SHA-256 of the weight file: members that serve one model
	// together must agree on it.
	Digest [sha256.Size]byte

	path     string
	embed    []float32 // [Vocab][Hidden]
	norm     []float32
	head     matrix
	layers   []layer
	cos, sin []float32 // [Context][HeadDim/2]
	resident atomic.Int64
	scale    float32 // of the attention scores
}

type layer struct {
	attnNorm, ffnNorm []float32
	qNorm, kNorm      []float32
	q, k, v, o        matrix
	router            matrix
	experts           []atomic.Pointer[expert]
}

type expert struct{ up, down matrix }

// Load reads the model at path (safetensors, written by examples/moe/train).
// Of the experts only those for which keep returns true are read and held; a
// nil keep holds all. Errors name the file, the tensor, what was wanted and
// what was found.
func Load(path string, keep func(layer, expert int) bool) (*Model, error) {
	t, f, err := OpenTensors(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m := &Model{path: path}
	if m.Config, err = readConfig(t); err != nil {
		return nil, err
	}
	if m.Digest, err = digest(path); err != nil {
		return nil, err
	}
	if err := m.checkNames(t); err != nil {
		return nil, err
	}
	if err := m.loadDense(t); err != nil {
		return nil, err
	}
	if keep == nil {
		keep = func(int, int) bool { return true }
	}
	if err := m.loadExperts(t, keep); err != nil {
		return nil, err
	}
	m.rotary()
	return m, nil
}

// LoadExperts reads, from the file the model was loaded from, those experts for
// which keep returns true and which are not resident yet. It refuses a file
// whose content is no longer that of Digest. Passes may run meanwhile.
func (m *Model) LoadExperts(keep func(layer, expert int) bool) error {
	d, err := digest(m.path)
	if err != nil {
		return err
	}
	if d != m.Digest {
		return fmt.Errorf("%s: the weights changed since they were loaded: SHA-256 %x, want %x; restore the file or load the model anew", m.path, d, m.Digest)
	}
	t, f, err := OpenTensors(m.path)
	if err != nil {
		return err
	}
	defer f.Close()
	return m.loadExperts(t, keep)
}

// DropExperts forgets those experts for which drop returns true.
func (m *Model) DropExperts(drop func(layer, expert int) bool) {
	for l := range m.layers {
		for e := range m.layers[l].experts {
			if drop(l, e) && m.layers[l].experts[e].Swap(nil) != nil {
				m.resident.Add(-m.ExpertBytes())
			}
		}
	}
}

// HasExpert reports whether the expert is resident. An index outside the model
// is not.
func (m *Model) HasExpert(layer, e int) bool {
	return layer >= 0 && layer < m.Layers && e >= 0 && e < m.Experts && m.layers[layer].experts[e].Load() != nil
}

// ExpertBytes returns the memory of one expert's weights in bytes.
func (m *Model) ExpertBytes() int64 { return int64(2*m.Hidden*m.FFN) * 4 }

// ResidentExpertBytes returns the memory of all resident experts' weights in
// bytes.
func (m *Model) ResidentExpertBytes() int64 { return m.resident.Load() }

func digest(path string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, fmt.Errorf("hashing the weights: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, fmt.Errorf("hashing the weights %s: %w", path, err)
	}
	h.Sum(sum[:0])
	return sum, nil
}

func readConfig(t *Tensors) (c Config, err error) {
	text, ok := t.Metadata["config"]
	if !ok {
		return c, fmt.Errorf("%s: the metadata have no \"config\": not a file written by examples/moe/train", t.name)
	}
	if err := strictDecode([]byte(text), &c); err != nil {
		return c, fmt.Errorf("%s: the metadata's config %s: %w", t.name, text, err)
	}
	if err := c.check(); err != nil {
		return c, fmt.Errorf("%s: the metadata's config: %w", t.name, err)
	}
	return c, nil
}

// checkNames refuses tensors that are no part of the model.
func (m *Model) checkNames(t *Tensors) error {
	known := map[string]bool{"embed": true, "norm": true, "head": true}
	for l := range m.Layers {
		for _, n := range []string{"attn_norm", "ffn_norm", "q_norm", "k_norm", "wq", "wk", "wv", "wo", "router"} {
			known[layerName(l, n)] = true
		}
		for e := range m.Experts {
			known[expertName(l, e, "up")] = true
			known[expertName(l, e, "down")] = true
		}
	}
	for _, n := range t.Names() {
		if !known[n] {
			return fmt.Errorf("%s: tensor %q is no part of a model of %d layers with %d experts: not these weights", t.name, n, m.Layers, m.Experts)
		}
	}
	return nil
}

func layerName(l int, name string) string { return fmt.Sprintf("layers.%d.%s", l, name) }

func expertName(l, e int, name string) string {
	return fmt.Sprintf("layers.%d.experts.%d.%s", l, e, name)
}

// reader collects the first error of a run of reads.
type reader struct {
	t   *Tensors
	err error
}

func (r *reader) vec(name string, shape ...int) []float32 {
	if r.err != nil {
		return nil
	}
	var v []float32
	v, r.err = r.t.Float32(name, shape...)
	return v
}

func (r *reader) mat(name string, out, in int) matrix {
	v := r.vec(name, out, in)
	if r.err != nil {
		return matrix{}
	}
	return pack(v, out, in)
}

func (m *Model) loadDense(t *Tensors) error {
	r := &reader{t: t}
	h := m.Hidden
	m.embed = r.vec("embed", m.Vocab, h)
	m.norm = r.vec("norm", h)
	m.head = r.mat("head", m.Vocab, h)
	m.layers = make([]layer, m.Layers)
	for i := range m.layers {
		l := &m.layers[i]
		l.attnNorm = r.vec(layerName(i, "attn_norm"), h)
		l.ffnNorm = r.vec(layerName(i, "ffn_norm"), h)
		l.qNorm = r.vec(layerName(i, "q_norm"), m.HeadDim())
		l.kNorm = r.vec(layerName(i, "k_norm"), m.HeadDim())
		l.q = r.mat(layerName(i, "wq"), h, h)
		l.k = r.mat(layerName(i, "wk"), h, h)
		l.v = r.mat(layerName(i, "wv"), h, h)
		l.o = r.mat(layerName(i, "wo"), h, h)
		l.router = r.mat(layerName(i, "router"), m.Experts, h)
		l.experts = make([]atomic.Pointer[expert], m.Experts)
	}
	return r.err
}

func (m *Model) loadExperts(t *Tensors, keep func(layer, expert int) bool) error {
	for l := range m.layers {
		for e := range m.layers[l].experts {
			// Also of an expert that stays out the header must be right.
			for _, c := range []struct {
				name    string
				out, in int
			}{{"up", m.FFN, m.Hidden}, {"down", m.Hidden, m.FFN}} {
				if _, err := t.check(expertName(l, e, c.name), []string{"F16", "BF16", "F32"}, c.out, c.in); err != nil {
					return err
				}
			}
			if !keep(l, e) || m.layers[l].experts[e].Load() != nil {
				continue
			}
			r := &reader{t: t}
			x := &expert{up: r.mat(expertName(l, e, "up"), m.FFN, m.Hidden)}
			x.down = r.mat(expertName(l, e, "down"), m.Hidden, m.FFN)
			if r.err != nil {
				return r.err
			}
			if m.layers[l].experts[e].CompareAndSwap(nil, x) {
				m.resident.Add(m.ExpertBytes())
			}
		}
	}
	return nil
}

// rotary fills the tables of the rotary embedding.
func (m *Model) rotary() {
	d := m.HeadDim()
	m.cos = make([]float32, m.Context*d/2)
	m.sin = make([]float32, m.Context*d/2)
	for i := range d / 2 {
		inv := math.Pow(m.RopeBase, -float64(2*i)/float64(d))
		for p := range m.Context {
			a := float64(p) * inv
			m.cos[p*d/2+i] = float32(math.Cos(a))
			m.sin[p*d/2+i] = float32(math.Sin(a))
		}
	}
	m.scale = float32(1 / math.Sqrt(float64(d)))
}

package model

import "fmt"

// stepScratch is what Step needs beside the stages' own scratch.
type stepScratch struct {
	x, xn, y, w, logits []float32
	in, out             []float32
	experts             []int32
	slots               [][]int32 // of each expert: the row*TopK+k it serves
}

// Step runs one whole pass over the rows in this process and commits it: the
// reference that any distribution of the stages must equal bit for bit. It
// returns the logits [n][Vocab], valid until b's next use. On an error, which
// names the row or the missing expert, no cache has changed its length.
func (m *Model) Step(b *Batch, rows []Row) ([]float32, error) {
	if err := b.Begin(rows); err != nil {
		return nil, err
	}
	n, h, k := len(rows), m.Hidden, m.TopK
	s := &b.step
	x, xn, y := grow(&s.x, n*h), grow(&s.xn, n*h), grow(&s.y, n*k*h)
	w := grow(&s.w, n*k)
	if cap(s.experts) < n*k {
		s.experts = make([]int32, n*k)
	}
	experts := s.experts[:n*k]
	m.Embed(rows, x)
	for l := range m.Layers {
		m.Attend(b, l, x)
		m.Route(b, l, x, xn, experts, w)
		if err := m.runExperts(b, l, xn, experts, y); err != nil {
			return nil, err
		}
		m.Combine(x, y, w)
	}
	logits := grow(&s.logits, n*m.Vocab)
	m.Head(b, x, logits)
	b.Commit()
	return logits, nil
}

// runExperts gathers each expert's rows, runs it once and spreads its results.
func (m *Model) runExperts(b *Batch, layer int, xn []float32, experts []int32, y []float32) error {
	h, k, s := m.Hidden, m.TopK, &b.step
	if s.slots == nil {
		s.slots = make([][]int32, m.Experts)
	}
	for e := range s.slots {
		s.slots[e] = s.slots[e][:0]
	}
	for i, e := range experts {
		s.slots[e] = append(s.slots[e], int32(i))
	}
	for e, slots := range s.slots {
		if len(slots) == 0 {
			continue
		}
		in, out := grow(&s.in, len(slots)*h), grow(&s.out, len(slots)*h)
		for i, slot := range slots {
			r := int(slot) / k
			copy(in[i*h:(i+1)*h], xn[r*h:(r+1)*h])
		}
		if err := m.Expert(b, layer, e, in, out); err != nil {
			return err
		}
		for i, slot := range slots {
			copy(y[int(slot)*h:(int(slot)+1)*h], out[i*h:(i+1)*h])
		}
	}
	return nil
}

// Argmax returns the index of the largest of one row's logits, the lowest among
// equals.
func Argmax(logits []float32) byte {
	best := 0
	for i, v := range logits {
		if v > logits[best] {
			best = i
		}
	}
	return byte(best)
}

// Prompt returns the tokens of a text: a zero byte and the text's own bytes.
func Prompt(text string) []byte { return append([]byte{0}, text...) }

// Greedy continues the text by up to n bytes, always the likeliest one. It ends
// sooner when the model foretells the end of the text (a zero byte, not
// returned) or the context is full. An error says that the prompt does not fit
// the context or which expert is missing.
func (m *Model) Greedy(text string, n int) ([]byte, error) {
	tokens := Prompt(text)
	if len(tokens) > m.Context {
		return nil, fmt.Errorf("the prompt of %d bytes does not fit the context of %d; shorten it to %d", len(text), m.Context, m.Context-1)
	}
	b, c := m.NewBatch(), m.NewCache()
	var rows []Row
	for i, t := range tokens {
		rows = append(rows, Row{Cache: c, Pos: i, Token: t})
	}
	var out []byte
	for len(out) < n {
		logits, err := m.Step(b, rows)
		if err != nil {
			return nil, err
		}
		next := Argmax(logits[len(logits)-m.Vocab:])
		if next == 0 {
			break
		}
		out = append(out, next)
		if c.Len() == m.Context {
			break
		}
		rows = append(rows[:0], Row{Cache: c, Pos: c.Len(), Token: next})
	}
	return out, nil
}

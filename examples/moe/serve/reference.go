package serve

import (
	"context"

	"github.com/serry-project/serry/examples/moe/model"
)

// Answer is what a prompt's continuation is: its bytes, and the hash of the logits that each came from. Where the model
// foretells the end of the text, Hashes has one more than Text has bytes.
type Answer struct {
	Text   []byte   `json:"text"`
	Hashes []uint64 `json:"hashes"`
	Lost   float64  `json:"lost_mass"` // sum of the weights of experts that nobody had when a row was sent to them
}

// Reference answers the prompts in this process, one after the other, a row at a time after the prompt: with the same
// model code, and nothing of serry.
func Reference(ctx context.Context, m *model.Model, cfg Config, progress func(done int)) ([]Answer, error) {
	if err := cfg.fill(m); err != nil {
		return nil, err
	}
	b := m.NewBatch()
	as := make([]Answer, len(cfg.Prompts))
	for i, p := range cfg.Prompts {
		c := m.NewCache()
		var rows []model.Row
		for pos, t := range model.Prompt(p) {
			rows = append(rows, model.Row{Cache: c, Pos: pos, Token: t})
		}
		for a := &as[i]; len(a.Text) < cfg.most(m, i); {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			logits, err := m.Step(b, rows)
			if err != nil {
				return nil, err
			}
			logits = logits[len(logits)-m.Vocab:]
			next := cfg.Sampling.pick(logits, i, len(a.Text))
			a.Hashes = append(a.Hashes, hash(logits))
			if next == 0 {
				break
			}
			a.Text = append(a.Text, next)
			rows = append(rows[:0], model.Row{Cache: c, Pos: c.Len(), Token: next})
		}
		if progress != nil {
			progress(i + 1)
		}
	}
	return as, nil
}

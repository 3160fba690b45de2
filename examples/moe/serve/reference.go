package serve

import (
	"context"

	"github.com/serry-project/serry/examples/moe/model"
)

// Answer is what a prompt's continuation is: its bytes, and the hash of the logits that each came from. Where the model
// foretells the end of the text, Hashes has one more than Text has bytes.
type Answer struct {
	Text   []byte
	Hashes []uint64
}

// Reference answers the prompts in this process, one after the other, a row at a time after the prompt: with the same
// model code, and nothing of serry.
func Reference(ctx context.Context, m *model.Model, prompts []string, most int, progress func(done int)) ([]Answer, error) {
	b := m.NewBatch()
	as := make([]Answer, len(prompts))
	for i, p := range prompts {
		c := m.NewCache()
		var rows []model.Row
		toks := model.Prompt(p)
		for pos, t := range toks {
			rows = append(rows, model.Row{Cache: c, Pos: pos, Token: t})
		}
		for limit := min(most, m.Context-len(toks)); len(as[i].Text) < limit; {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			logits, err := m.Step(b, rows)
			if err != nil {
				return nil, err
			}
			logits = logits[len(logits)-m.Vocab:]
			next := model.Argmax(logits)
			as[i].Hashes = append(as[i].Hashes, hash(logits))
			if next == 0 {
				break
			}
			as[i].Text = append(as[i].Text, next)
			rows = append(rows[:0], model.Row{Cache: c, Pos: c.Len(), Token: next})
		}
		if progress != nil {
			progress(i + 1)
		}
	}
	return as, nil
}

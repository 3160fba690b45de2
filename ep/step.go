package ep

import (
	"context"
	"errors"
)

// Step runs one whole step: it dispatches x, calls compute for the received rows, and combines what that wrote into y,
// which is [h.Rows(), Hidden]. Shapes are those of StartDispatch and Output. With Policy = Rerun it repeats the step on
// the survivors, with their live replicas, whenever ranks are lost, so compute may be called more than once: it must not
// change x, and its output for a row must depend on that row (and expert) alone if a covered loss is to change no bit.
//
// An error of compute fails the step on all ranks: there it is *ErrPoisoned, here too, with the error inside. Other
// errors are those of Recv and Result. y is not initialised.
func Step(ctx context.Context, b *Buffer, x []float32, experts []int32, weights []float32,
	compute func(h Handle, y []float32) error, out *Output) (Report, error) {
	for reruns := 0; ; reruns++ {
		rep, err := b.once(ctx, x, experts, weights, compute, out)
		rep.Reruns = reruns
		if err == nil {
			return rep, nil
		}
		var again *ErrRerun
		if !errors.As(err, &again) {
			return rep, err
		}
		if ctx.Err() != nil {
			return rep, errors.Join(ctx.Err(), err)
		}
	}
}

func (b *Buffer) once(ctx context.Context, x []float32, experts []int32, weights []float32,
	compute func(h Handle, y []float32) error, out *Output) (Report, error) {
	h, err := b.Dispatch(ctx, x, experts, weights)
	if err != nil {
		return Report{}, err
	}
	defer h.Release()
	s := h.s
	s.yf = grow(s.yf, s.rows*b.cfg.Hidden)
	if err := compute(h, s.yf); err != nil {
		return Report{}, h.Fail(ctx, err)
	}
	return b.Combine(ctx, h, s.yf, out)
}

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
// errors are those of Recv and Result. y is not initialised; padding in it is not read.
func Step(ctx context.Context, b *Buffer, x []float32, experts []int32, weights []float32,
	compute func(h Handle, y []float32) error, out *Output) (Report, error) {
	return again(ctx, func() (Report, error) {
		h, err := b.Dispatch(ctx, x, experts, weights)
		if err != nil {
			return Report{}, err
		}
		defer h.Release()
		h.s.yf = grow(h.s.yf, h.Rows()*b.cfg.Hidden)
		if err := compute(h, h.s.yf); err != nil {
			return Report{}, h.Fail(ctx, err)
		}
		return b.Combine(ctx, h, h.s.yf, out)
	})
}

// StepBF16 is Step for BF16 rows.
func StepBF16(ctx context.Context, b *Buffer, x []uint16, experts []int32, weights []float32,
	compute func(h Handle, y []uint16) error, out *Output) (Report, error) {
	return again(ctx, func() (Report, error) {
		h, err := b.DispatchBF16(ctx, x, experts, weights)
		if err != nil {
			return Report{}, err
		}
		defer h.Release()
		h.s.yh = grow(h.s.yh, h.Rows()*b.cfg.Hidden)
		if err := compute(h, h.s.yh); err != nil {
			return Report{}, h.Fail(ctx, err)
		}
		return b.CombineBF16(ctx, h, h.s.yh, out)
	})
}

// again repeats once as long as it says so and ctx lasts.
func again(ctx context.Context, once func() (Report, error)) (Report, error) {
	for reruns := 0; ; reruns++ {
		rep, err := once()
		rep.Reruns = reruns
		if err == nil {
			return rep, nil
		}
		var rr *ErrRerun
		if !errors.As(err, &rr) {
			return rep, err
		}
		if ctx.Err() != nil {
			return rep, errors.Join(ctx.Err(), err)
		}
	}
}

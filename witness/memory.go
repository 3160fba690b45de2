package witness

import (
	"bytes"
	"context"
	"errors"
	"sync"
)

// Memory is the registers of worlds in this process. It is for tests: what dies with one of the halves is no witness.
type Memory struct {
	mu   sync.Mutex
	down error
	held map[string][]byte
}

// NewMemory makes one without registers.
func NewMemory() *Memory { return &Memory{held: map[string][]byte{}} }

// World is the register of a world, for each who asks for it.
func (m *Memory) World(name string) Witness { return &world{m, name} }

// Down makes all methods fail with err, until it is nil.
func (m *Memory) Down(err error) {
	m.mu.Lock()
	m.down = err
	m.mu.Unlock()
}

type world struct {
	*Memory
	name string
}

// begin returns with the lock if there is no error.
func (w *world) begin(ctx context.Context, vote []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(vote) == 0 || len(vote) > MaxVote {
		return errSize
	}
	w.mu.Lock()
	if w.down != nil {
		defer w.mu.Unlock()
		return w.down
	}
	return nil
}

var errSize = errors.New("witness: a vote has 1 to 1048576 bytes")

func (w *world) Create(ctx context.Context, vote []byte) error {
	if err := w.begin(ctx, vote); err != nil {
		return err
	}
	defer w.mu.Unlock()
	if w.held[w.name] != nil {
		return ErrExists
	}
	w.held[w.name] = bytes.Clone(vote)
	return nil
}

func (w *world) Swap(ctx context.Context, old, new []byte) ([]byte, error) {
	if err := w.begin(ctx, new); err != nil {
		return nil, err
	}
	defer w.mu.Unlock()
	held := w.held[w.name]
	if held != nil && bytes.Equal(held, old) {
		held = bytes.Clone(new)
		w.held[w.name] = held
	}
	return bytes.Clone(held), nil
}

func (w *world) Remove(ctx context.Context) error {
	if err := w.begin(ctx, []byte{0}); err != nil {
		return err
	}
	defer w.mu.Unlock()
	delete(w.held, w.name)
	return nil
}

func (w *world) Close() error { return nil }

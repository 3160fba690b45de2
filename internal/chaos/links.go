package chaos

import (
	"fmt"
	"sync"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/faulty"
)

// links are the links of a rank, with faults.
type links struct {
	mu  sync.Mutex
	all []*faulty.Link
}

// wrap is for pg.Config.Wrap: each link gets the faults of the script, with a seed of its own. No script: nil.
func (l *links) wrap(script string, seed uint64) (func(device.Link) device.Link, error) {
	if script == "" {
		return nil, nil
	}
	s, err := faulty.Parse(script)
	if err != nil {
		return nil, fmt.Errorf("chaos: %w", err)
	}
	return func(in device.Link) device.Link {
		l.mu.Lock()
		defer l.mu.Unlock()
		w := s.Wrap(in, faulty.Options{Seed: seed<<8 + uint64(len(l.all))})
		l.all = append(l.all, w)
		return w
	}, nil
}

package pg

import (
	"context"
	"fmt"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/fault/agent"
	"github.com/serry-project/serry/mesh"

	"golang.org/x/sync/errgroup"
)

// Ground is what a World stands on: its process among the others, and how callers wait in it. Join makes one of a
// mesh.Mesh and the operating system; a simulation brings its own (Simulate).
type Ground interface {
	agent.Mesh
	Host() uint64 // equal for processes of one host
	Nonce() mesh.Nonce
	Arena() []byte                              // of this process
	Reserve(n int) error                        // makes the first n bytes of it exist
	Peer(mesh.Nonce) Peer                       // nil: not linked
	Link(context.Context, []fault.Member) error // links to all of them
	Memory() collectives.Memory
	Waits
}

// Peer is another process, in one incarnation.
type Peer interface {
	agent.Peer
	Arena() []byte // nil: no memory is shared with it
	Dead() bool
	Silent() bool // nothing has come from it for the heartbeat limit
}

// Waits is how a caller waits where it does not sleep on a shared word (collectives.Memory).
type Waits interface {
	// Cores is how many processes of this host can run at once.
	Cores() int
	// Spin waits some nanoseconds, Yield until the others of this core have had a turn.
	Spin()
	Yield()
	// Await waits until something comes from one of the channels (at most two; it takes it) or one is closed, ctx is over,
	// or d has passed (0: never). The caller looks what it was.
	Await(ctx context.Context, d time.Duration, chs ...<-chan struct{})
	// Go runs what drives operations for which nobody waits.
	Go(f func())
}

// machine is the Ground that Join makes.
type machine struct {
	*mesh.Mesh
}

func (m machine) Peer(n mesh.Nonce) Peer {
	if p := m.Mesh.Peer(n); p != nil {
		return p
	}
	return nil
}

// Link implements Ground.
func (m machine) Link(ctx context.Context, ms []fault.Member) error {
	eg, ectx := errgroup.WithContext(ctx)
	for _, x := range ms {
		if x.Nonce == fault.Nonce(m.Nonce()) {
			continue
		}
		eg.Go(func() error {
			if _, err := m.Connect(ectx, x.Addr); err != nil {
				return fmt.Errorf("rank %d: %w", x.Slot, err)
			}
			return nil
		})
	}
	return eg.Wait()
}

func (m machine) Memory() collectives.Memory { return nil } // the machine's own
func (m machine) Cores() int                 { return host.Cores() }
func (m machine) Spin()                      { host.Spin(1) }
func (m machine) Yield()                     { host.SchedYield() }
func (m machine) Go(f func())                { go f() }

// Await implements Waits.
func (m machine) Await(ctx context.Context, d time.Duration, chs ...<-chan struct{}) {
	var a, b <-chan struct{}
	switch len(chs) {
	case 2:
		a, b = chs[0], chs[1]
	case 1:
		a = chs[0]
	}
	var timer <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-a:
	case <-b:
	case <-ctx.Done():
	case <-timer:
	}
}

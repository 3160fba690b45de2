package chaos

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/device/faulty"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/wire"
)

// links are the links of a rank: with faults by a script, or watched.
type links struct {
	die func()

	mu    sync.Mutex
	count uint64
	hurt  []*faulty.Link
	beats []int64 // when heartbeats were sent over the first link that was made

	armed atomic.Bool // die in the next all_to_all, once one peer has been sent to
	one   atomic.Pointer[sentTo]
}

// sentTo is the all_to_all under way, and whom it was sent to first.
type sentTo struct {
	group, seq uint64
	link       *tap
}

// wrap is for pg.Config.Wrap. Where nothing is to be wrapped it is nil.
func (l *links) wrap(a *RankArgs) (func(device.Link) device.Link, error) {
	switch {
	case a.LinkFaults != "":
		s, err := faulty.Parse(a.LinkFaults)
		if err != nil {
			return nil, fmt.Errorf("chaos: %w", err)
		}
		return func(in device.Link) device.Link {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.count++
			w := s.Wrap(in, faulty.Options{Seed: (a.Seed+uint64(a.Rank))<<8 + l.count})
			l.hurt = append(l.hurt, w)
			return w
		}, nil
	case a.Tap:
		return func(in device.Link) device.Link {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.count++
			return &tap{Link: in, all: l, first: l.count == 1}
		}, nil
	}
	return nil, nil
}

// fired is how many frames the script has hurt. It is called when the links are over.
func (l *links) fired() (n uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.hurt {
		for _, x := range w.Fired() {
			n += x
		}
	}
	return n
}

// tap is a link that is watched.
type tap struct {
	device.Link
	all   *links
	first bool
}

// soon is time for what was sent to be on its way.
const soon = 5 * time.Millisecond

// Send sends, unless it is where the process is to die.
func (t *tap) Send(f *device.Frame) error {
	if t.first && f.Kind == wire.KindHeartbeat {
		now := harness.Mono()
		t.all.mu.Lock()
		t.all.beats = append(t.all.beats, now)
		t.all.mu.Unlock()
	}
	if f.Kind == wire.KindData && f.Op == uint8(collectives.AllToAll) && t.all.armed.Load() {
		s := t.all.one.Load()
		switch {
		case s == nil || s.group != f.Group || s.seq != f.Seq:
			t.all.one.Store(&sentTo{f.Group, f.Seq, t})
		case s.link != t:
			time.Sleep(soon)
			t.all.die()
		}
	}
	return t.Link.Send(f)
}

package mesh

import (
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// beat is the liveness of peers of other hosts: a counter goes to each every HeartbeatEvery, any frame counts as heard,
// and silence for HeartbeatLimit is reported. Time in which the loop itself did not run counts for nobody: a starved
// observer distrusts itself (Lifeguard's local health).
type beat struct {
	next time.Duration // when the next round is due; 0: there is nobody on another host
	now  time.Duration // of this turn
	n    uint64
}

func (b *beat) start(l *loop) {
	if b.next == 0 {
		b.next = l.m.Now()
	}
}

// late notices that the loop should have been here earlier: it did not run, or its handler took long.
func (b *beat) late(l *loop, now time.Duration) {
	b.now = now
	if b.next == 0 {
		return
	}
	if d := now - b.next; d > l.m.cfg.HeartbeatEvery {
		for _, p := range l.far {
			p.heard = min(p.heard+d, now)
		}
		b.next = now
	}
}

func (b *beat) heard(l *loop, p *Peer) {
	p.heard = b.now
	if p.silent.Load() {
		p.silent.Store(false)
		l.h.Heard(p)
	}
}

// run is the end of a turn.
func (b *beat) run(l *loop) {
	if b.next == 0 {
		return
	}
	now := l.m.Now()
	b.late(l, now)
	if now < b.next {
		return
	}
	if len(l.far) == 0 {
		b.next = 0
		return
	}
	b.n++
	b.next = now + l.m.cfg.HeartbeatEvery
	for i := 0; i < len(l.far); i++ {
		p := l.far[i]
		if p.link == p.base {
			p.base.Beat(wire.KindHeartbeat, b.n)
		} else if p.base.Down() == nil {
			_ = p.link.Send(&device.Frame{Header: wire.Header{Kind: wire.KindHeartbeat, Seq: b.n, World: l.m.cfg.World}})
		}
		if !p.silent.Load() && b.now-p.heard > l.m.cfg.HeartbeatLimit {
			p.silent.Store(true)
			l.m.log.Warn("mesh: silent", "peer", p.name, "for", b.now-p.heard)
			l.h.Silent(p)
			if !p.over.Load() && p.base.Err() == nil {
				// This connection may let nothing through long after the way is open again.
				_, _ = p.base.Reset()
				l.lost(p)
			}
		}
	}
}

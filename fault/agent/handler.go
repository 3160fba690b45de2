package agent

import (
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/mesh"
)

// Handler is the agent as a mesh takes it.
func (a *Agent) Handler() mesh.Handler { return handler{a} }

type handler struct{ a *Agent }

var _ mesh.Refuser = handler{}

func (h handler) Frame(p *mesh.Peer, f *device.Frame)         { h.a.Frame(p, f) }
func (h handler) Died(p *mesh.Peer)                           { h.a.Died(p) }
func (h handler) Silent(p *mesh.Peer)                         { h.a.Silent(p) }
func (h handler) Heard(p *mesh.Peer)                          { h.a.Heard(p) }
func (h handler) Linked(p *mesh.Peer)                         { h.a.Linked(p) }
func (h handler) Refused(p *mesh.Peer, why error)             { h.a.Refused(p, why) }
func (h handler) Tick(now time.Duration) (next time.Duration) { return h.a.Tick(now) }

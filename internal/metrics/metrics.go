// Package metrics is what a process tells Prometheus: one table of names for the whole project, counters that the hot path
// can afford, and an HTTP server, if one is asked for.
//
// What happens often is counted where it happens, in Counters. What is, as epoch and active set, comes from a Snapshot
// that the world makes when it is asked. A scrape asks once, so all that it shows is of one moment. Nothing runs between
// scrapes but the server's listener.
package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/serry-project/serry/internal/ops"
)

// Snapshot is a world as one scrape shows it: plain data, of one moment.
type Snapshot struct {
	Slot        int
	Incarnation uint32
	Down        string // why this process is no member any more; empty: it is one
	Epoch       uint64
	Active      int
	Size        int
	Capacity    int
	Groups      int
	InFlight    int    // operations issued and not ended, in all groups
	Links       []Link // one for each kind of link; totals include links that are no more
	Counts      *Counts
}

// Link is what has gone over all links of a kind (shm, tcp).
type Link struct {
	Kind       string
	Received   uint64 // bytes
	Sent       uint64
	Reconnects uint64
}

// Exporter turns snapshots into metrics. Other layers register their own collectors, made of rows of the table.
type Exporter struct {
	reg      *prometheus.Registry
	snapshot func() Snapshot

	mu   sync.Mutex      // one scrape at a time: counters never go back
	last map[string]Link // by kind
}

// New makes an exporter. It calls snapshot once for each scrape and each question for health, from any goroutine, one call
// at a time; it must not wait for anything that may not come.
func New(snapshot func() Snapshot) *Exporter {
	e := &Exporter{reg: prometheus.NewRegistry(), snapshot: snapshot, last: map[string]Link{}}
	e.reg.MustRegister(worldCollector{e}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return e
}

// Register adds a layer's collector. It must describe what it collects, with rows of the table.
func (e *Exporter) Register(c prometheus.Collector) error { return e.reg.Register(c) }

// Gatherer is for who has an HTTP server of his own.
func (e *Exporter) Gatherer() prometheus.Gatherer { return e.reg }

func (e *Exporter) down() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.snapshot().Down
}

type worldCollector struct{ e *Exporter }

// world are the rows that worldCollector shows.
var world = []*Metric{Epoch, Member, Slot, Incarnation, Active, Size, Capacity, Groups, InFlight, Operations, OperationBytes,
	OperationSeconds, Detections, Evictions, Rejoins, Views, LinkReceived, LinkSent, LinkReconnects}

func (worldCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range world {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c worldCollector) Collect(ch chan<- prometheus.Metric) {
	e := c.e
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.snapshot()
	member := 1.0
	if s.Down != "" {
		member = 0
	}
	for m, v := range map[*Metric]float64{Epoch: float64(s.Epoch), Member: member, Slot: float64(s.Slot), Incarnation: float64(s.Incarnation),
		Active: float64(s.Active), Size: float64(s.Size), Capacity: float64(s.Capacity), Groups: float64(s.Groups), InFlight: float64(s.InFlight)} {
		ch <- m.At(v)
	}
	for _, l := range s.Links {
		was := e.last[l.Kind]
		l.Received, l.Sent, l.Reconnects = max(l.Received, was.Received), max(l.Sent, was.Sent), max(l.Reconnects, was.Reconnects)
		e.last[l.Kind] = l
	}
	for kind, l := range e.last {
		ch <- LinkReceived.At(float64(l.Received), kind)
		ch <- LinkSent.At(float64(l.Sent), kind)
		ch <- LinkReconnects.At(float64(l.Reconnects), kind)
	}
	counts := s.Counts
	if counts == nil {
		counts = &Counts{}
	}
	for cause := Cause(1); cause < numCauses; cause++ {
		ch <- Detections.At(float64(counts.Detections[cause]), cause.String())
	}
	ch <- Evictions.At(float64(counts.Evictions))
	ch <- Rejoins.At(float64(counts.Rejoins))
	ch <- Views.At(float64(counts.Views))
	for i := range counts.Ops {
		o := &counts.Ops[i]
		for out := ops.Outcome(1); out < ops.NumOutcomes; out++ {
			ch <- Operations.At(float64(o.Outcomes[out]), o.Group, o.Op.String(), out.String())
		}
		ch <- OperationBytes.At(float64(o.Bytes), o.Group, o.Op.String())
		ch <- durations(o)
	}
}

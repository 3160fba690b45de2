package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Metric is one row of the table: a name, what it says, and its labels, each with few values that do not grow with the
// run.
type Metric struct {
	Name   string
	Help   string
	Type   prometheus.ValueType // of a histogram: UntypedValue
	Labels []string

	desc *prometheus.Desc
}

// At is the metric with a value, for a collector. The labels' values are in the order of Labels.
func (m *Metric) At(v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(m.desc, m.Type, v, labels...)
}

// Desc is what a collector describes it by.
func (m *Metric) Desc() *prometheus.Desc { return m.desc }

// The metrics of a world.
var (
	Epoch = gauge("serry_epoch",
		"Version of the view that this process has installed last.")
	Member = gauge("serry_member",
		"1 while this process is a member of its world, 0 after it was evicted, lost the quorum or left.")
	Slot = gauge("serry_slot",
		"Slot of this process in the world, which is its rank.")
	Incarnation = gauge("serry_incarnation",
		"How many processes have held the slot, this one included.")
	Active = gauge("serry_active_ranks",
		"Ranks in the view.")
	Size = gauge("serry_world_ranks",
		"Ranks of the world, active or not.")
	Capacity = gauge("serry_world_capacity_ranks",
		"Ranks that the world can grow to.")
	Groups = gauge("serry_groups",
		"Groups that this process has open, the world's own included.")
	InFlight = gauge("serry_operations_in_flight",
		"Operations that this process has issued and that have not ended.")

	Operations = counter("serry_operations_total",
		"Operations that have ended at this process, by how.", "group", "operation", "outcome")
	OperationBytes = counter("serry_operation_bytes_total",
		"Bytes that this process gave to operations that ended well.", "group", "operation")
	OperationSeconds = histogram("serry_operation_duration_seconds",
		"Time from issue to end of operations that ended well.", "group", "operation")

	Detections = counter("serry_detections_total",
		"Evidence that this process has had against others, by what it rested on. Evidence alone excludes nobody.", "cause")
	Evictions = counter("serry_evictions_total",
		"Ranks that were no longer in a view that this process installed.")
	Rejoins = counter("serry_rejoins_total",
		"Ranks that came back as a new incarnation in a view that this process installed.")
	Views = counter("serry_views_installed_total",
		"Views that this process has installed.")

	LinkReceived = counter("serry_link_received_bytes_total",
		"Bytes received from other processes, by kind of link.", "link")
	LinkSent = counter("serry_link_sent_bytes_total",
		"Bytes sent to other processes, by kind of link.", "link")
	LinkReconnects = counter("serry_link_reconnects_total",
		"Connections that were lost and made again, by kind of link.", "link")
)

// table holds the metrics in the order of their declaration. It is the only place where a name of ours is made.
var table []*Metric

// Table returns all metrics, in the order of the table.
func Table() []*Metric { return slices.Clone(table) }

func add(m *Metric) *Metric {
	m.desc = prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
	table = append(table, m)
	return m
}

func gauge(name, help string, labels ...string) *Metric {
	return add(&Metric{Name: name, Help: help, Type: prometheus.GaugeValue, Labels: labels})
}

func counter(name, help string, labels ...string) *Metric {
	return add(&Metric{Name: name, Help: help, Type: prometheus.CounterValue, Labels: labels})
}

func histogram(name, help string, labels ...string) *Metric {
	return add(&Metric{Name: name, Help: help, Type: prometheus.UntypedValue, Labels: labels})
}

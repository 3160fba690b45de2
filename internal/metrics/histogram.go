package metrics

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
)

// Limits of the classic buckets, for who does not take native ones: each power of two of seconds from 2^-20 (1 µs) to 2^5
// (32 s). They are limits of native buckets too, so both count the same.
const (
	classicLow  = -20
	classicHigh = 5
)

// durationMetric is the durations of one operation, both as a classic and as a native histogram: client_golang makes
// constant metrics of one sort or the other.
type durationMetric struct {
	buckets [numBuckets]uint64
	nanos   uint64
	labels  []*dto.LabelPair
}

func durations(o *OpCounts) prometheus.Metric {
	return &durationMetric{o.Buckets, o.Nanos, prometheus.MakeLabelPairs(OperationSeconds.desc, []string{o.Group, o.Op.String()})}
}

func (m *durationMetric) Desc() *prometheus.Desc { return OperationSeconds.desc }

func (m *durationMetric) Write(out *dto.Metric) error {
	h := &dto.Histogram{
		SampleSum:     proto.Float64(float64(m.nanos) / 1e9),
		Schema:        proto.Int32(schema),
		ZeroThreshold: proto.Float64(0),
		ZeroCount:     proto.Uint64(0),
	}
	var total, last uint64
	end := math.MinInt // index after the last span
	for i, n := range m.buckets {
		total += n
		at := i + bucketLow
		if n > 0 {
			if at != end {
				gap := at
				if end != math.MinInt {
					gap = at - end
				}
				h.PositiveSpan = append(h.PositiveSpan, &dto.BucketSpan{Offset: proto.Int32(int32(gap)), Length: proto.Uint32(0)})
			}
			span := h.PositiveSpan[len(h.PositiveSpan)-1]
			*span.Length++
			h.PositiveDelta = append(h.PositiveDelta, int64(n)-int64(last))
			last, end = n, at+1
		}
		if k := at >> schema; at == k<<schema && k >= classicLow && k <= classicHigh {
			h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: proto.Float64(math.Exp2(float64(k))), CumulativeCount: proto.Uint64(total)})
		}
	}
	if h.PositiveSpan == nil { // or it would not be read as a native one
		h.PositiveSpan = []*dto.BucketSpan{{Offset: proto.Int32(0), Length: proto.Uint32(0)}}
	}
	h.SampleCount = proto.Uint64(total)
	out.Label, out.Histogram = m.labels, h
	return nil
}

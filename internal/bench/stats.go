package bench

import (
	"encoding/base64"
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// times is a histogram of durations, from 1 ns to 100 s with three digits.
type times struct{ h *hdrhistogram.Histogram }

func newTimes() times { return times{hdrhistogram.New(1, int64(100*time.Second), 3)} }

// add records one; what is out of range counts as its end.
func (t times) add(ns int64) {
	_ = t.h.RecordValue(min(max(ns, 1), int64(100*time.Second)))
}

func (t times) merge(from times) { t.h.Merge(from.h) }

// text is how a rank hands its histogram over, in one word.
func (t times) text() (string, error) {
	b, err := t.h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	return base64.RawStdEncoding.EncodeToString(b), err
}

func timesOf(text string) (times, error) {
	b, err := base64.RawStdEncoding.DecodeString(text)
	if err != nil {
		return times{}, err
	}
	h, err := hdrhistogram.Decode(b)
	return times{h}, err
}

// summary is one row of a table.
func (t times) summary(name string) Row {
	return Row{
		Name: name, Count: t.h.TotalCount(), Min: time.Duration(t.h.Min()), P50: time.Duration(t.h.ValueAtQuantile(50)),
		P99: time.Duration(t.h.ValueAtQuantile(99)), Mean: time.Duration(t.h.Mean()), Max: time.Duration(t.h.Max()),
	}
}

// short writes a duration with three digits and its unit.
func short(d time.Duration) string {
	v, unit := float64(d), "ns"
	switch {
	case d >= time.Second:
		v, unit = v/1e9, "s"
	case d >= time.Millisecond:
		v, unit = v/1e6, "ms"
	case d >= time.Microsecond:
		v, unit = v/1e3, "µs"
	}
	digits := 0
	if unit != "ns" && v > 0 {
		digits = max(0, 2-int(math.Floor(math.Log10(v))))
	}
	return fmt.Sprintf("%.*f %s", digits, v, unit)
}

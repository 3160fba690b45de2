package metrics

import (
	"context"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/serry-project/serry/internal/ops"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// full is a world in which everything has happened.
func full(c *Counters) func() Snapshot {
	return func() Snapshot {
		return Snapshot{
			Slot: 3, Incarnation: 2, Epoch: 17, Active: 3, Size: 4, Capacity: 8, Groups: 2, InFlight: 5,
			Links:  []Link{{"shm", 10, 11, 0}, {"tcp", 1 << 40, 13, 2}},
			Counts: c.Read(),
		}
	}
}

func scrape(t *testing.T, url string, accept expfmt.Format) map[string]*dto.MetricFamily {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Header.Set("Accept", string(accept))
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)
	all := map[string]*dto.MetricFamily{}
	dec := expfmt.NewDecoder(res.Body, expfmt.ResponseFormat(res.Header))
	for {
		f := &dto.MetricFamily{}
		if err := dec.Decode(f); err == io.EOF {
			return all
		} else {
			require.NoError(t, err)
		}
		require.NotContains(t, all, f.GetName())
		all[f.GetName()] = f
	}
}

// one returns the metric of a family with these labels: name, value, name, value.
func one(t *testing.T, f *dto.MetricFamily, labels ...string) *dto.Metric {
	t.Helper()
	for _, m := range f.GetMetric() {
		n := 0
		for _, l := range m.GetLabel() {
			if i := slices.Index(labels, l.GetName()); i >= 0 && labels[i+1] == l.GetValue() {
				n++
			}
		}
		if 2*n == len(labels) {
			return m
		}
	}
	t.Fatalf("%s has nothing with %q", f.GetName(), labels)
	return nil
}

func serve(t *testing.T, e *Exporter) *Server {
	t.Helper()
	s, err := e.Serve("127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		require.NoError(t, s.Close(context.Background()))
	})
	return s
}

var formats = []expfmt.Format{
	expfmt.NewFormat(expfmt.TypeTextPlain),
	expfmt.NewFormat(expfmt.TypeProtoDelim),
}

func TestScrape(t *testing.T) {
	var c Counters
	lane := c.Lane(true)
	for i, d := range []time.Duration{0, 900, 2 * time.Microsecond, 3 * time.Microsecond, time.Second, time.Hour} {
		lane.Ended(ops.AllReduce, ops.OK, 100+i, d)
	}
	lane.Ended(ops.AllReduce, ops.RankLost, 1000, time.Hour)
	for range 3 * subLanes {
		c.Lane(false).Ended(ops.Exchange, ops.OK, 7, time.Millisecond)
	}
	c.Lane(false).Ended(ops.Barrier, ops.NoQuorum, 0, 0)
	c.Detected(RobustFutex)
	c.Detected(RobustFutex)
	c.View(2, 1)
	s := serve(t, New(full(&c)))
	for _, format := range formats {
		got := scrape(t, "http://"+s.Addr()+"/metrics", format)
		for m, want := range map[*Metric]float64{Epoch: 17, Member: 1, Slot: 3, Incarnation: 2, Active: 3, Size: 4, Capacity: 8, Groups: 2, InFlight: 5} {
			require.Equal(t, want, one(t, got[m.Name]).GetGauge().GetValue(), m.Name)
		}
		for _, x := range []struct {
			m      *Metric
			want   float64
			labels []string
		}{
			{Operations, 6, []string{"group", "world", "operation", "all_reduce", "outcome", "ok"}},
			{Operations, 1, []string{"group", "world", "operation", "all_reduce", "outcome", "rank_lost"}},
			{Operations, 0, []string{"group", "world", "operation", "all_reduce", "outcome", "evicted"}},
			{Operations, 3 * subLanes, []string{"group", "sub", "operation", "exchange", "outcome", "ok"}},
			{Operations, 1, []string{"group", "sub", "operation", "barrier", "outcome", "no_quorum"}},
			{OperationBytes, 615, []string{"group", "world", "operation", "all_reduce"}},
			{OperationBytes, 7 * 3 * subLanes, []string{"group", "sub", "operation", "exchange"}},
			{Detections, 2, []string{"cause", "robust_futex"}},
			{Detections, 0, []string{"cause", "deadline"}},
			{Evictions, 2, nil},
			{Rejoins, 1, nil},
			{Views, 1, nil},
			{LinkReceived, 1 << 40, []string{"link", "tcp"}},
			{LinkSent, 11, []string{"link", "shm"}},
			{LinkReconnects, 2, []string{"link", "tcp"}},
		} {
			require.Equal(t, x.want, one(t, got[x.m.Name], x.labels...).GetCounter().GetValue(), "%s %q", x.m.Name, x.labels)
		}
		h := one(t, got[OperationSeconds.Name], "group", "world", "operation", "all_reduce").GetHistogram()
		require.EqualValues(t, 6, h.GetSampleCount())
		require.InDelta(t, 3601.0000059, h.GetSampleSum(), 1e-9)
		below := map[float64]uint64{}
		for _, b := range h.GetBucket() {
			below[b.GetUpperBound()] = b.GetCumulativeCount()
		}
		for limit, n := range map[float64]uint64{0x1p-20: 2, 0x1p-19: 2, 0x1p-18: 4, 0.5: 4, 1: 5, 32: 5} {
			require.Equal(t, n, below[limit], "up to %v s", limit)
		}
		if format == expfmt.NewFormat(expfmt.TypeProtoDelim) {
			require.Equal(t, nativeCounts(h), nativeOf(0, 900, 2*time.Microsecond, 3*time.Microsecond, time.Second, time.Hour))
		}
	}
}

// nativeCounts decodes a native histogram: index of the bucket and count.
func nativeCounts(h *dto.Histogram) map[int]int64 {
	all := map[int]int64{}
	at, count, k := 0, int64(0), 0
	for _, s := range h.GetPositiveSpan() {
		at += int(s.GetOffset())
		for range s.GetLength() {
			count += h.GetPositiveDelta()[k]
			all[at] = count
			at, k = at+1, k+1
		}
	}
	return all
}

func nativeOf(ds ...time.Duration) map[int]int64 {
	all := map[int]int64{}
	for _, d := range ds {
		all[wantBucket(d)]++
	}
	return all
}

// wantBucket is the bucket by the definition: 2^((i-1)/4) < d <= 2^(i/4) seconds.
func wantBucket(d time.Duration) int {
	if d <= 0 {
		return bucketLow
	}
	return min(max(int(math.Ceil(math.Log2(d.Seconds())*4-1e-9)), bucketLow), bucketHigh)
}

func TestBuckets(t *testing.T) {
	for d := time.Duration(1); d < 2*time.Hour; d += 1 + d/37 {
		if got := bucketOf(d) + bucketLow; got != wantBucket(d) {
			t.Fatalf("%v is in bucket %d, want %d", d, got, wantBucket(d))
		}
	}
	require.Equal(t, 0, bucketOf(-time.Second))
	require.Equal(t, numBuckets-1, bucketOf(math.MaxInt64))
}

// Prometheus' own conventions, and that the table and what is exported are the same.
func TestTable(t *testing.T) {
	var c Counters
	for _, world := range []bool{true, false} {
		for op := ops.Op(1); op < ops.NumOps; op++ {
			c.Lane(world).Ended(op, ops.OK, 1, 1)
		}
	}
	pedantic := prometheus.NewPedanticRegistry() // what is collected was described
	pedantic.MustRegister(worldCollector{New(full(&c))})
	_, err := pedantic.Gather()
	require.NoError(t, err)
	got, err := New(full(&c)).Gatherer().Gather()
	require.NoError(t, err)
	problems, err := promlint.NewWithMetricFamilies(got).Lint()
	require.NoError(t, err)
	require.Empty(t, problems)
	exported := map[string]*dto.MetricFamily{}
	for _, f := range got {
		name := f.GetName()
		if strings.HasPrefix(name, "serry_") {
			exported[name] = f
			continue
		}
		require.True(t, strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_"), name)
	}
	for _, m := range Table() {
		f := exported[m.Name]
		require.NotNil(t, f, "%s is in the table and not exported", m.Name)
		delete(exported, m.Name)
		require.Equal(t, m.Help, f.GetHelp())
		require.True(t, strings.HasSuffix(m.Help, "."), m.Help)
		want := map[prometheus.ValueType]dto.MetricType{prometheus.GaugeValue: dto.MetricType_GAUGE,
			prometheus.CounterValue: dto.MetricType_COUNTER, prometheus.UntypedValue: dto.MetricType_HISTOGRAM}[m.Type]
		require.Equal(t, want, f.GetType(), m.Name)
		require.True(t, model.UTF8Validation.IsValidMetricName(m.Name))
		require.LessOrEqual(t, len(f.GetMetric()), 2*int(ops.NumOps)*int(ops.NumOutcomes), "%s has too many series", m.Name)
		for _, x := range f.GetMetric() {
			var labels []string
			for _, l := range x.GetLabel() {
				labels = append(labels, l.GetName())
			}
			require.Equal(t, m.Labels, labels, m.Name)
		}
	}
	require.Empty(t, exported, "exported and not in the table")
}

// A linter that finds nothing proves nothing, unless it finds something elsewhere.
func TestLintBites(t *testing.T) {
	bad := prometheus.NewCounter(prometheus.CounterOpts{Name: "serry_bad_milliseconds", Help: "x"})
	reg := prometheus.NewRegistry()
	reg.MustRegister(bad)
	got, err := reg.Gather()
	require.NoError(t, err)
	problems, err := promlint.NewWithMetricFamilies(got).Lint()
	require.NoError(t, err)
	require.NotEmpty(t, problems)
}

// While operations end in several goroutines, scrapes that overlap see no counter go back, and no count without its bytes.
func TestScrapesWhileCounting(t *testing.T) {
	var c Counters
	links := uint64(0)
	e := New(func() Snapshot {
		s := full(&c)()
		links = (links + 7) % 20 // a sum of links that are replaced may fall
		s.Links[1].Received = links
		return s
	})
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	const each = 20000
	for w := range 3 {
		writers.Go(func() {
			lane := c.Lane(w == 0)
			for i := range each {
				lane.Ended(ops.AllReduce, ops.OK, 8, time.Duration(i))
				if i%100 == 0 {
					c.Detected(Heartbeat)
					c.View(1, 1)
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			last := map[string]float64{}
			for done := false; !done; {
				select {
				case <-stop:
					done = true // one more
				default:
				}
				got, err := e.Gatherer().Gather()
				if err != nil {
					t.Error(err)
					return
				}
				for _, f := range got {
					if !strings.HasPrefix(f.GetName(), "serry_") {
						continue
					}
					for _, m := range f.GetMetric() {
						key := f.GetName()
						for _, l := range m.GetLabel() {
							key += "," + l.GetValue()
						}
						v := m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
						if f.GetType() != dto.MetricType_GAUGE && v < last[key] {
							t.Errorf("%s went from %v to %v", key, last[key], v)
						}
						last[key] = v
					}
				}
				for _, g := range []string{"world", "sub"} {
					if n, b := last["serry_operations_total,"+g+",all_reduce,ok"], last["serry_operation_bytes_total,"+g+",all_reduce"]; b < 8*n {
						t.Errorf("%v operations of 8 bytes gave %v", n, b)
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	counts := c.Read()
	require.EqualValues(t, each, counts.Ops[0].Outcomes[ops.OK])
	require.EqualValues(t, 2*each, counts.Ops[1].Outcomes[ops.OK])
	require.EqualValues(t, 8*2*each, counts.Ops[1].Bytes)
	require.EqualValues(t, 3*each/100, counts.Evictions)
}

func TestOff(t *testing.T) {
	var c *Counters
	c.Detected(EOF)
	c.View(1, 1)
	lane := c.Lane(true)
	lane.Ended(ops.Barrier, ops.OK, 1, 1)
	require.Nil(t, lane)
	require.Equal(t, &Counts{}, c.Read())
	_, err := New(func() Snapshot { return Snapshot{} }).Gatherer().Gather()
	require.NoError(t, err)
}

func TestCountingAllocatesNothing(t *testing.T) {
	var c Counters
	lane := c.Lane(false)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		lane.Ended(ops.AllReduce, ops.OK, 8, time.Microsecond)
		lane.Ended(200, 200, 8, time.Microsecond) // what there is not counts nowhere
		c.Detected(EOF)
		c.View(1, 0)
	}))
	require.Len(t, c.Read().Ops, 1)
}

func TestHealth(t *testing.T) {
	var down string
	s := serve(t, New(func() Snapshot { return Snapshot{Down: down} }))
	for _, want := range []string{"", "serry: evicted: late for all_reduce 7"} {
		down = want
		res, err := http.Get("http://" + s.Addr() + "/healthz")
		require.NoError(t, err)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		if want == "" {
			require.Equal(t, http.StatusOK, res.StatusCode)
			require.Equal(t, "ok\n", string(body))
		} else {
			require.Equal(t, http.StatusServiceUnavailable, res.StatusCode)
			require.Equal(t, want+"\n", string(body))
		}
		require.Equal(t, want == "", one(t, scrape(t, "http://"+s.Addr()+"/metrics", formats[0])[Member.Name]).GetGauge().GetValue() == 1)
	}
}

func TestServeErrors(t *testing.T) {
	e := New(func() Snapshot { return Snapshot{} })
	s := serve(t, e)
	_, err := e.Serve(s.Addr())
	require.ErrorContains(t, err, s.Addr())
	require.ErrorContains(t, err, "another process has the port")
	_, err = e.Serve("192.0.2.1:0")
	require.ErrorContains(t, err, "not one of this host")
	_, err = e.Serve("nowhere")
	require.ErrorContains(t, err, "missing port")
}

// A scrape that has begun ends, and one that does not is cut off when the time is over.
func TestClose(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	e := New(func() Snapshot {
		entered <- struct{}{}
		<-leave
		return Snapshot{Epoch: 5}
	})
	for _, graceful := range []bool{true, false} {
		s, err := e.Serve("127.0.0.1:0")
		require.NoError(t, err)
		answer := make(chan error, 1)
		go func() {
			c, err := net.Dial("tcp", s.Addr())
			if err == nil {
				_, err = io.WriteString(c, "GET /healthz HTTP/1.0\r\n\r\n")
			}
			var body []byte
			if err == nil {
				body, err = io.ReadAll(c)
			}
			if err == nil && !strings.HasSuffix(string(body), "ok\n") {
				err = io.ErrUnexpectedEOF
			}
			answer <- err
		}()
		<-entered
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		closed := make(chan error, 1)
		go func() { closed <- s.Close(ctx) }()
		if graceful {
			leave <- struct{}{}
			require.NoError(t, <-closed)
			require.NoError(t, <-answer)
		} else {
			cancel()
			require.ErrorIs(t, <-closed, context.Canceled)
			require.Error(t, <-answer)
			leave <- struct{}{}
		}
		_, err = net.Dial("tcp", s.Addr())
		require.Error(t, err)
	}
}

func TestAddr(t *testing.T) {
	for _, c := range []struct {
		addr   string
		offset int
		want   string
	}{{"127.0.0.1:9000", 3, "127.0.0.1:9003"}, {":9000", 0, ":9000"}, {"[::1]:0", 5, "[::1]:0"}} {
		got, err := Addr(c.addr, c.offset)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	for addr, want := range map[string]string{"9000": "want host:port", "a:65535": "up to 65535", "a:x": "up to 65535", "a:-1": "up to 65535"} {
		_, err := Addr(addr, 1)
		require.ErrorContains(t, err, want)
	}
}

func BenchmarkEnded(b *testing.B) {
	var c Counters
	lane := c.Lane(true)
	b.ReportAllocs()
	for i := range b.N {
		lane.Ended(ops.AllReduce, ops.OK, 8, time.Duration(500+i&255))
	}
}

func BenchmarkOff(b *testing.B) {
	var c *Counters
	lane := c.Lane(true)
	b.ReportAllocs()
	for i := range b.N {
		lane.Ended(ops.AllReduce, ops.OK, 8, time.Duration(500+i&255))
	}
}

func BenchmarkObserve(b *testing.B) {
	n := 0
	for i := range b.N {
		n += bucketOf(time.Duration(500 + i&0xffff))
	}
	if n < 0 {
		b.Fatal(n)
	}
}

func BenchmarkScrape(b *testing.B) {
	var c Counters
	for op := ops.Op(1); op < ops.NumOps; op++ {
		c.Lane(true).Ended(op, ops.OK, 1, 1)
		c.Lane(false).Ended(op, ops.OK, 1, 1)
	}
	e := New(full(&c))
	for b.Loop() {
		if _, err := e.Gatherer().Gather(); err != nil {
			b.Fatal(err)
		}
	}
}

package flight

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	pickle "github.com/kisielk/og-rek"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
)

// The version of torch's format; from 2.7 on its analyser matches operations in the same way.
const torchVersion = "2.10"

// torchBackend is what the names of operations begin with. Torch's analyser knows its own backends only, and of these gloo
// is the one that it expects nothing special from.
const torchBackend = "gloo:"

var torchTypes = map[dtype.DType]string{dtype.F32: "Float", dtype.BF16: "BFloat16", dtype.I32: "Int", dtype.I64: "Long", dtype.U8: "Byte"}

// Names of torch's. A Boundary and its like have nothing but their order, as a barrier.
var torchNames = [ops.NumOps]string{ops.AllReduce: "all_reduce", ops.AllGather: "all_gather", ops.AllToAll: "all_to_all",
	ops.Broadcast: "broadcast", ops.Exchange: "all_to_all", ops.ReduceScatter: "reduce_scatter", ops.Reduce: "reduce", ops.Gather: "gather",
	ops.Scatter: "scatter"}

type torchDump struct {
	Version string                 `pickle:"version"`
	Lib     string                 `pickle:"comm_lib_version"`
	Entries []torchEntry           `pickle:"entries"`
	Config  map[string]torchGroup  `pickle:"pg_config"`
	Status  map[string]torchStatus `pickle:"pg_status"`
}

type torchGroup struct {
	Name  string `pickle:"name"`
	Desc  string `pickle:"desc"`
	Ranks string `pickle:"ranks"` // a list, as python writes one
}

// torchStatus has the last sequence that came so far, -1 for none.
type torchStatus struct {
	Enqueued  int64 `pickle:"last_enqueued_collective"`
	Started   int64 `pickle:"last_started_collective"`
	Completed int64 `pickle:"last_completed_collective"`
}

type torchEntry struct {
	Record     int64        `pickle:"record_id"`
	Group      int          `pickle:"pg_id"`
	Process    pickle.Tuple `pickle:"process_group"` // name, desc
	Seq        int64        `pickle:"collective_seq_id"`
	P2PSeq     int64        `pickle:"p2p_seq_id"`
	OpID       int64        `pickle:"op_id"`
	Name       string       `pickle:"profiling_name"`
	Created    int64        `pickle:"time_created_ns"`
	InSizes    [][]int64    `pickle:"input_sizes"`
	InTypes    []string     `pickle:"input_dtypes"`
	OutSizes   [][]int64    `pickle:"output_sizes"`
	OutTypes   []string     `pickle:"output_dtypes"`
	State      string       `pickle:"state"`
	Started    any          `pickle:"time_discovered_started_ns"` // or None
	Completed  any          `pickle:"time_discovered_completed_ns"`
	Retired    bool         `pickle:"retired"`
	TimeoutMS  int64        `pickle:"timeout_ms"`
	P2P        bool         `pickle:"is_p2p"`
	Thread     string       `pickle:"thread_id"`
	ThreadName string       `pickle:"thread_name"`
	Frames     []string     `pickle:"frames"` // none: nobody looks at a stack in the hot path
}

// WriteTorch writes the pickle that torch.distributed.flight_recorder reads. Sends and receives are left out: the analyser
// expects every rank of a process group in each of them.
//
// The analyser aligns the ranks by a number that counts the operations of a process, and takes what is there to be without
// gaps. So of several groups only that part is written from which on all of them are remembered.
func (r *Recorder) WriteTorch(w io.Writer) error {
	return pickle.NewEncoderWithConfig(w, &pickle.EncoderConfig{Protocol: 2, StrictUnicode: true}).Encode(r.torch())
}

func (r *Recorder) torch() *torchDump {
	all, gone, since := r.collect()
	d := &torchDump{Version: torchVersion, Entries: []torchEntry{}, Config: map[string]torchGroup{}, Status: map[string]torchStatus{}}
	ids := map[string]int{}
	for i := range all {
		e := &all[i]
		if e.op.Local() {
			continue
		}
		if e.Created < since || e.Set == nil {
			gone++
			continue
		}
		name := fmt.Sprintf("%s@%d", e.Group, e.Epoch)
		desc := cmp.Or(e.Name, "undefined") // so torch says that there is none
		id, ok := ids[name]
		if !ok {
			id = len(ids)
			ids[name] = id
			d.Config[name] = torchGroup{name, desc, "[" + strings.Trim(strings.Join(strings.Fields(fmt.Sprint(e.Set)), ", "), "[]") + "]"}
		}
		key := fmt.Sprint(id)
		s, ok := d.Status[key]
		if !ok {
			s = torchStatus{-1, -1, -1}
		}
		t := torchEntry{
			Record: int64(gone) + int64(len(d.Entries)), Group: id, Process: pickle.Tuple{name, desc}, Seq: int64(e.Seq), OpID: int64(e.Seq),
			Created: e.Created, State: Scheduled, TimeoutMS: e.limit, Retired: e.State == Ended,
		}
		t.shape(e)
		s.Enqueued = max(s.Enqueued, t.Seq)
		if e.Started != 0 || e.out == ops.OK {
			t.State, t.Started = Started, cmp.Or(e.Started, e.Created)
			s.Started = max(s.Started, t.Seq)
		}
		if e.out == ops.OK {
			t.State, t.Completed = "completed", e.Ended
			s.Completed = max(s.Completed, t.Seq)
		}
		d.Status[key] = s
		d.Entries = append(d.Entries, t)
	}
	return d
}

// shape fills in the name and the sizes, as the analyser compares them between the ranks: where it would compare what may
// differ, the size is empty, which it takes for unknown.
func (t *torchEntry) shape(e *Entry) {
	name := cmp.Or(torchNames[e.op%ops.NumOps], "barrier")
	t.Name = torchBackend + name
	if name == "barrier" {
		return
	}
	in, out := []int64{int64(e.BytesIn / e.size)}, []int64{int64(e.BytesOut / e.size)}
	switch e.op {
	case ops.Broadcast: // who is not the root may have but one of the two
		in = []int64{max(in[0], out[0])}
		out = in
	case ops.AllGather:
		if e.uneven {
			in = nil
		}
		if e.uneven || !e.whole { // an output of active ranks times input is not what we have
			t.Name += "_v"
		}
	case ops.ReduceScatter:
		if e.uneven {
			out = nil
		}
		if e.uneven || !e.whole {
			t.Name += "_v"
		}
	case ops.Exchange:
		in, out = nil, nil // the sender alone knows the sizes
	case ops.AllToAll:
		if !e.whole { // what is for nobody is missing in the sum over all
			in, out = nil, nil
		}
	}
	dt := cmp.Or(torchTypes[e.dt], "Byte")
	t.InSizes, t.OutSizes, t.InTypes, t.OutTypes = [][]int64{in}, [][]int64{out}, []string{dt}, []string{dt}
}

package flight

import (
	"cmp"
	"fmt"
	"io"
	"slices"
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
// The analyser takes what is there to be without gaps, from the record_id of a rank's first entry on, and drops on all ranks
// what has a lower one than the highest of these. So only that part is written from which on all groups are remembered, and
// a record_id is a place that all ranks agree on: the sequence of the last operation of the world that was issued before. (A
// count, as torch has, would tell nothing of a process that came later.)
func (r *Recorder) WriteTorch(w io.Writer) error {
	return pickle.NewEncoderWithConfig(w, &pickle.EncoderConfig{Protocol: 2, StrictUnicode: true}).Encode(r.torch())
}

// placed returns the entries that can be written, with their record_ids, and the record_id from which on there is no gap.
func placed(all []Entry, gaps []gap) (es []Entry, ids []uint64, from uint64) {
	all = slices.DeleteFunc(all, func(e Entry) bool { return e.op.Local() || e.Set == nil })
	at := make([]uint64, len(all))
	pos := uint64(0)
	if k := slices.IndexFunc(all, func(e Entry) bool { return e.world }); k >= 0 {
		pos = all[k].Seq - min(all[k].Seq, 1)
	}
	for i := range all {
		if all[i].world {
			pos = max(pos, all[i].Seq)
		}
		at[i] = pos
	}
	for _, g := range gaps {
		if g.world {
			from = max(from, g.oldest)
		} else if k := slices.IndexFunc(all, func(e Entry) bool { return e.Created >= g.since }); k >= 0 {
			from = max(from, at[k]+1)
		}
	}
	for i := range all {
		if at[i] >= from {
			es, ids = append(es, all[i]), append(ids, at[i])
		}
	}
	if len(es) > 0 || len(all) == 0 {
		return es, ids, from
	}
	// The world has done nothing for too long to tell places by it: count, as torch does.
	since := int64(0)
	from = 0
	for _, g := range gaps {
		from += g.n
		since = max(since, g.since)
	}
	for i := range all {
		if all[i].Created < since {
			from++
		} else {
			es, ids = append(es, all[i]), append(ids, from+uint64(len(es)))
		}
	}
	return es, ids, from
}

func (r *Recorder) torch() *torchDump {
	all, records, from := placed(r.collect())
	d := &torchDump{Version: torchVersion, Entries: []torchEntry{}, Config: map[string]torchGroup{}, Status: map[string]torchStatus{}}
	if len(all) > 0 && records[0] > max(from, 1) {
		d.mark(int64(from), &all[0])
	}
	ids := map[string]int{} // of process groups
	for i := range all {
		e := &all[i]
		name := fmt.Sprintf("%s@%d", e.Group, e.Epoch)
		desc := cmp.Or(e.Name, "undefined") // so torch says that there is none
		id, ok := ids[name]
		if !ok {
			id = len(d.Config)
			ids[name] = id
			d.Config[name] = torchGroup{name, desc, "[" + strings.Trim(strings.Join(strings.Fields(fmt.Sprint(e.Set)), ", "), "[]") + "]"}
		}
		key := fmt.Sprint(id)
		s, ok := d.Status[key]
		if !ok {
			s = torchStatus{-1, -1, -1}
		}
		t := torchEntry{
			Record: int64(records[i]), Group: id, Process: pickle.Tuple{name, desc}, Seq: int64(e.Seq), OpID: int64(e.Seq),
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

// mark begins a dump with an entry of a process group of this rank alone, whose record_id says from where on there is no
// gap: the first real one, of a process that came later, would make the analyser drop what others did before.
func (d *torchDump) mark(from int64, first *Entry) {
	name := fmt.Sprintf("rank%d", first.Rank)
	d.Config[name] = torchGroup{name, "remembered from here", fmt.Sprintf("[%d]", first.Rank)}
	d.Status["0"] = torchStatus{1, 1, 1}
	d.Entries = append(d.Entries, torchEntry{
		Record: from, Process: pickle.Tuple{name, "remembered from here"}, Seq: 1, OpID: 1, Name: torchBackend + "barrier",
		Created: first.Created, State: "completed", Started: first.Created, Completed: first.Created, Retired: true,
	})
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

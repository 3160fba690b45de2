package flight

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pickle "github.com/kisielk/og-rek"
	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/ops"
	"github.com/serry-project/serry/internal/slots"
)

// python returns a python that can import torch's flight recorder.
var python = sync.OnceValues(func() (string, error) {
	const probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('torch.distributed.flight_recorder')))"
	for _, p := range []string{os.Getenv("SERRY_TEST_PYTHON"), "../../build/venv/bin/python", "python3"} {
		if p != "" && exec.Command(p, "-c", probe).Run() == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("no python whose torch has a flight recorder: set SERRY_TEST_PYTHON, or make venv")
})

// job is a run of several ranks, each with a recorder.
type job struct {
	recorders []*Recorder
	groups    []*Group // the world's
	now       time.Duration
}

func newJob(n, entries int) *job {
	j := &job{}
	for i := range n {
		r := recorder(i, entries)
		j.recorders = append(j.recorders, r)
		j.groups = append(j.groups, world(r, n))
	}
	return j
}

// do is one operation on some of the ranks; in, out give a rank's sizes.
func (j *job) do(ranks []int, c Call, epoch uint64, result ops.Outcome) {
	for _, r := range ranks {
		j.one(j.groups[r], c, epoch, result)
	}
}

func (j *job) one(g *Group, c Call, epoch uint64, result ops.Outcome) {
	j.now += time.Microsecond
	i := g.Begin(&c, epoch, j.now)
	g.Started(i, epoch, j.now+100)
	if result != 0 {
		g.End(i, result, epoch, j.now+200)
	}
}

func (j *job) dump(t *testing.T, ranks ...int) (dir string) {
	dir = t.TempDir()
	for _, r := range ranks {
		_, err := j.recorders[r].Dump(dir, "")
		require.NoError(t, err)
	}
	return dir
}

var four = []int{0, 1, 2, 3}

// mixed is a bit of everything that serry does, healthy. It ends with a rank lost and another come back.
func mixed(j *job) {
	f32 := func(op ops.Op, seq uint64, in, out int) Call {
		return Call{Seq: seq, Op: op, DType: dtype.F32, In: in, Out: out}
	}
	j.do(four, Call{Seq: 1, Op: ops.Barrier}, 1, ops.OK)
	j.do(four, f32(ops.AllReduce, 2, 64, 64), 1, ops.OK)
	j.do(four, f32(ops.AllGather, 3, 8, 32), 1, ops.OK)
	j.do(four, f32(ops.AllToAll, 4, 64, 64), 1, ops.OK)
	for r := range four {
		c := f32(ops.Broadcast, 5, 0, 40)
		if r == 2 {
			c.In, c.Out, c.Peer = 40, 0, 2
		}
		j.one(j.groups[r], c, 1, ops.OK)
		c = f32(ops.AllGather, 6, 4*r, 24)
		c.Uneven = true
		j.one(j.groups[r], c, 1, ops.OK)
		j.one(j.groups[r], Call{Seq: 7, Op: ops.Exchange, DType: dtype.U8, In: 100 * r, Uneven: true}, 1, ops.OK)
		j.one(j.groups[r], Call{Seq: 1, Op: ops.Send, Peer: (r + 1) % 4, In: 9}, 1, ops.OK)
	}
	for _, r := range []int{0, 2} { // a subgroup
		g := j.recorders[r].Group(0xdef, "", time.Second, 1, 2, slots.Of(0, 2))
		j.one(g, f32(ops.AllReduce, 1, 4, 4), 1, ops.OK)
		g.Close()
	}
	// Rank 1 is lost, and the others go on: each version is a process group for torch.
	for _, r := range []int{0, 2, 3} {
		j.groups[r].Version(2, 4, slots.Of(0, 2, 3))
		j.one(j.groups[r], f32(ops.AllReduce, 8, 64, 64), 2, ops.OK)
		j.one(j.groups[r], f32(ops.AllGather, 9, 8, 32), 2, ops.OK)
		j.one(j.groups[r], f32(ops.AllToAll, 10, 64, 64), 2, ops.OK)
	}
}

const passes = 7 + 1 + 3 // collectives of mixed

type analysis struct {
	Error       string
	Log         string
	Collectives []struct {
		Group, Name, State string
		Seq                int
		Ranks, Missing     []int
		Pass               bool
	}
}

// torch's own analyser on dumps of ours.
func TestTorchReadsIt(t *testing.T) {
	if testing.Short() {
		t.Skip("starts python")
	}
	p, err := python()
	if err != nil {
		t.Skip(err)
	}
	t.Parallel()
	dirs := map[string]string{}
	j := newJob(4, 0)
	mixed(j)
	dirs["healthy"] = j.dump(t, 0, 1, 2, 3)

	missing := func() *job { // rank 2 has not come to operation 3
		j := newJob(4, 0)
		j.do(four, *reduce(1), 1, ops.OK)
		j.do(four, *reduce(2), 1, ops.OK)
		j.do([]int{0, 1, 3}, *reduce(3), 1, 0)
		return j
	}
	dirs["missing"] = missing().dump(t, 0, 1, 2, 3)
	dirs["no dump"] = missing().dump(t, 0, 1, 3)

	j = newJob(2, 0)
	j.do([]int{0, 1}, *reduce(1), 1, ops.OK)
	j.do([]int{0}, *reduce(2), 1, 0)
	j.do([]int{1}, Call{Seq: 2, Op: ops.Barrier}, 1, 0)
	dirs["type"] = j.dump(t, 0, 1)

	j = newJob(2, 0)
	j.do([]int{0}, *reduce(1), 1, 0)
	j.do([]int{1}, Call{Seq: 1, Op: ops.AllReduce, DType: dtype.F32, In: 36, Out: 36}, 1, 0)
	dirs["size"] = j.dump(t, 0, 1)

	// The rings are full, rank 1 is three operations ahead, and another group is old on both.
	j = newJob(2, 16)
	for _, r := range []int{0, 1} {
		g := j.recorders[r].Group(0xdef, "old", 0, 1, 2, slots.Of(0, 1))
		j.one(g, *reduce(1), 1, ops.OK)
		for seq := range uint64(100) {
			j.one(j.groups[r], *reduce(seq + 1), 1, ops.OK)
		}
	}
	for seq := uint64(101); seq < 104; seq++ {
		j.one(j.groups[1], *reduce(seq), 1, 0)
	}
	dirs["ahead"] = j.dump(t, 0, 1)

	// Rank 2 is a replacement that came at operation 95, when the rings of the others were full, or not. Before that, rank
	// 1 had not come to an operation of a subgroup.
	for name, size := range map[string]int{"replaced": 16, "replaced early": 1024} {
		j = newJob(3, size)
		for _, r := range []int{0, 1} {
			j.groups[r].Version(2, 3, slots.Of(0, 1))
			sub := j.recorders[r].Group(0xdef, "sub", 0, 2, 2, slots.Of(0, 1))
			for seq := uint64(1); seq < 95; seq++ {
				j.one(j.groups[r], *reduce(seq), 2, ops.OK)
				if seq == 90 && r == 0 {
					j.one(sub, *reduce(1), 2, 0)
				}
			}
			j.groups[r].Version(3, 3, slots.Of(0, 1, 2))
		}
		j.recorders[2] = New(Config{Rank: 2, Incarnation: 2, World: 0xabc, Origin: origin})
		j.groups[2] = j.recorders[2].Group(0xabc, "world", 0, 3, 3, slots.Of(0, 1, 2))
		for seq := uint64(95); seq < 101; seq++ {
			j.do([]int{0, 1, 2}, *reduce(seq), 3, ops.OK)
		}
		dirs[name] = j.dump(t, 0, 1, 2)
	}

	args := []string{"testdata/fr_read.py", "-"}
	for _, d := range dirs {
		args = append(args, d)
	}
	cmd := exec.Command(p, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s", stderr.String())
	var raw map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(out, &raw))
	got := map[string]analysis{}
	for name, d := range dirs {
		var a analysis
		require.NoError(t, json.Unmarshal(raw[d], &a))
		require.Empty(t, a.Error, "%s: %s", name, a.Log)
		got[name] = a
	}

	a := got["healthy"]
	require.Empty(t, a.Log)
	require.Len(t, a.Collectives, passes)
	for _, c := range a.Collectives {
		require.True(t, c.Pass)
		require.Equal(t, "completed", c.State)
		require.Empty(t, c.Missing)
	}
	require.Equal(t, []int{0, 2, 3}, a.Collectives[len(a.Collectives)-1].Ranks)

	a = got["missing"]
	require.Contains(t, a.Log, "Not all ranks joining collective, sequence number: 3")
	require.Contains(t, a.Log, "missing ranks: {2}")
	require.Contains(t, a.Log, "group info: abc@1:world")
	require.Contains(t, a.Log, "collective: gloo:all_reduce")
	require.Contains(t, a.Log, "collective state: started")
	require.Len(t, a.Collectives, 3)
	require.Equal(t, []int{2}, a.Collectives[2].Missing)
	require.Empty(t, a.Collectives[1].Missing)

	require.Contains(t, got["no dump"].Log, "we missed FR dumps from ranks ({2})")

	require.Contains(t, got["type"].Log, "Collective sequence number: 2 has errors")
	require.Contains(t, got["type"].Log, "COLLECTIVE_TYPE_MISMATCH")
	require.Contains(t, got["size"].Log, "SIZE_OR_SYNTAX_MISMATCH")

	a = got["ahead"]
	require.Contains(t, a.Log, "Not all ranks joining collective, sequence number: 101")
	require.Contains(t, a.Log, "missing ranks: {0}")
	require.Equal(t, 88, a.Collectives[0].Seq) // the first that rank 1 still has
	require.Empty(t, a.Collectives[0].Missing)

	for name, n := range map[string]int{"replaced": 16 + 1, "replaced early": 100 + 1} {
		a = got[name]
		require.Equal(t, 1, strings.Count(a.Log, "Not all ranks"), "%s: %s", name, a.Log)
		require.Contains(t, a.Log, "group info: def@2:sub")
		require.Contains(t, a.Log, "missing ranks: {1}")
		require.NotContains(t, a.Log, "cannot decide")
		require.Len(t, a.Collectives, n, name)
	}

	// What torch itself writes has the keys that we write, of the same types.
	var own struct {
		Version             string
		Top, Config, Status []string
		Entry               map[string]string
		Values, Barrier     map[string]any
	}
	require.NoError(t, json.Unmarshal(raw["-"], &own))
	require.Equal(t, torchVersion, own.Version)
	j = newJob(1, 0)
	j.one(j.groups[0], *reduce(1), 1, ops.OK)
	j.one(j.groups[0], Call{Seq: 2, Op: ops.Barrier}, 1, ops.OK)
	ours := decode(t, j.recorders[0])
	require.Equal(t, own.Top, keys(ours))
	require.Equal(t, own.Config, keys(ours["pg_config"].(map[any]any)["abc@1"]))
	require.Equal(t, own.Status, keys(ours["pg_status"].(map[any]any)["0"]))
	e := ours["entries"].([]any)[0].(map[any]any)
	var theirs []string
	for k, kind := range own.Entry {
		theirs = append(theirs, k)
		switch v := e[k]; kind {
		case "NoneType": // we know it
			require.IsType(t, int64(0), v, k)
		default:
			require.Equal(t, kind, map[string]string{"int64": "int", "string": "str", "bool": "bool", "[]interface {}": "list",
				"ogórek.Tuple": "tuple"}[fmt.Sprintf("%T", v)], k)
		}
	}
	slices.Sort(theirs)
	require.Equal(t, theirs, keys(e))
	same := func(want map[string]any, e any) {
		for k, v := range want {
			is, err := json.Marshal(e.(map[any]any)[k])
			require.NoError(t, err)
			was, err := json.Marshal(v)
			require.NoError(t, err)
			require.JSONEq(t, string(was), string(is), k)
		}
	}
	same(own.Values, e)
	same(own.Barrier, ours["entries"].([]any)[1])
}

// The command that a user would type, which infers the prefix and passes over the other files.
func TestTorchCommand(t *testing.T) {
	if testing.Short() {
		t.Skip("starts python")
	}
	p, err := python()
	if err != nil {
		t.Skip(err)
	}
	t.Parallel()
	j := newJob(2, 0)
	j.do([]int{0, 1}, *reduce(1), 1, ops.OK)
	j.do([]int{1}, *reduce(2), 1, 0)
	out, err := exec.Command(p, "-m", "torch.distributed.flight_recorder.fr_trace", j.dump(t, 0, 1)).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "Not all ranks joining collective, sequence number: 2")
	require.Contains(t, string(out), "missing ranks: {0}")
}

func keys(m any) (all []string) {
	for k := range m.(map[any]any) {
		all = append(all, k.(string))
	}
	slices.Sort(all)
	return all
}

// decode is a dump as a reader of pickles has it.
func decode(t *testing.T, r *Recorder) map[any]any {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, r.WriteTorch(&b))
	v, err := pickle.NewDecoder(&b).Decode()
	require.NoError(t, err)
	require.Zero(t, b.Len())
	return v.(map[any]any)
}

// Without torch: the pickle has what its reader needs.
func TestPickle(t *testing.T) {
	j := newJob(4, 0)
	mixed(j)
	j.one(j.groups[2], *reduce(11), 2, ops.RankLost)
	i := j.groups[2].Begin(reduce(12), 2, j.now+1000)
	d := decode(t, j.recorders[2])
	require.Equal(t, torchVersion, d["version"])
	require.Equal(t, map[any]any{
		"abc@1": map[any]any{"name": "abc@1", "desc": "world", "ranks": "[0, 1, 2, 3]"},
		"def@1": map[any]any{"name": "def@1", "desc": "undefined", "ranks": "[0, 2]"},
		"abc@2": map[any]any{"name": "abc@2", "desc": "world", "ranks": "[0, 2, 3]"},
	}, d["pg_config"])
	es := d["entries"].([]any)
	require.Len(t, es, passes+2)
	at := func(k int) map[any]any { return es[k].(map[any]any) }
	for k := range es {
		require.EqualValues(t, []int{1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 12}[k], at(k)["record_id"]) // the world's last sequence
		require.Equal(t, false, at(k)["is_p2p"])
		require.True(t, strings.HasPrefix(at(k)["profiling_name"].(string), "gloo:"))
	}
	sizes := func(n ...int64) any {
		l := []any{}
		for _, x := range n {
			l = append(l, x)
		}
		return []any{l}
	}
	for k, want := range []struct {
		name    string
		in, out any
	}{
		{"barrier", []any{}, []any{}},
		{"all_reduce", sizes(16), sizes(16)},
		{"all_gather", sizes(2), sizes(8)},
		{"all_to_all", sizes(16), sizes(16)},
		{"broadcast", sizes(10), sizes(10)},
		{"all_gather_v", sizes(), sizes(6)},
		{"all_to_all", sizes(), sizes()},
		{"all_reduce", sizes(1), sizes(1)},
		{"all_reduce", sizes(16), sizes(16)},
		{"all_gather_v", sizes(2), sizes(8)},
		{"all_to_all", sizes(), sizes()},
	} {
		require.Equal(t, []any{"gloo:" + want.name, want.in, want.out}, []any{at(k)["profiling_name"], at(k)["input_sizes"], at(k)["output_sizes"]}, k)
		require.Equal(t, "completed", at(k)["state"])
	}
	require.Equal(t, pickle.Tuple{"abc@2", "world"}, at(8)["process_group"])
	require.EqualValues(t, 8, at(8)["collective_seq_id"])
	require.Equal(t, []any{"Byte"}, at(6)["input_dtypes"])
	require.EqualValues(t, 30000, at(0)["timeout_ms"])
	require.EqualValues(t, origin.UnixNano()+int64(j.now), at(passes)["time_created_ns"])

	require.Equal(t, []any{"started", true}, []any{at(passes)["state"], at(passes)["retired"]}) // ended, not well
	require.Equal(t, []any{"scheduled", false}, []any{at(passes + 1)["state"], at(passes + 1)["retired"]})
	require.Equal(t, pickle.None{}, at(passes + 1)["time_discovered_started_ns"])
	require.Equal(t, map[any]any{"last_enqueued_collective": int64(12), "last_started_collective": int64(11), "last_completed_collective": int64(10)},
		d["pg_status"].(map[any]any)["2"])
	j.groups[2].End(i, ops.OK, 2, 0)

	empty := decode(t, New(Config{Rank: 1, Origin: origin}))
	require.Equal(t, []any{}, empty["entries"])
}

// Where the world does nothing, places are counted.
func TestPlacesWithoutTheWorld(t *testing.T) {
	r := recorder(0, 8)
	a, b := r.Group(1, "a", 0, 1, 2, slots.Of(0, 1)), r.Group(2, "b", 0, 1, 2, slots.Of(0, 1))
	j := &job{}
	j.one(a, *reduce(1), 1, ops.OK)
	for seq := range uint64(20) {
		j.one(b, *reduce(seq), 1, ops.OK)
	}
	j.one(a, *reduce(2), 1, ops.OK)
	d := r.torch()
	require.Len(t, d.Entries, 8+1)
	for i, e := range d.Entries {
		require.EqualValues(t, 13+i, e.Record) // 12 of b and 1 of a came before
	}
	require.EqualValues(t, 2, d.Entries[8].Seq)
}

// Every operation has a name that torch's analyser knows.
func TestTorchNames(t *testing.T) {
	known := []string{"broadcast", "reduce", "all_gather", "all_gather_v", "all_reduce", "reduce_scatter", "reduce_scatter_v", "gather", "scatter",
		"all_to_all", "barrier"}
	for op := ops.Op(1); op < ops.NumOps; op++ {
		for _, odd := range []bool{false, true} {
			var e torchEntry
			e.shape(&Entry{op: op, dt: dtype.I64, size: 8, uneven: odd, whole: !odd, BytesIn: 16, BytesOut: 16})
			name, _ := strings.CutPrefix(e.Name, torchBackend)
			require.Contains(t, known, name)
		}
	}
	for _, d := range dtype.All() {
		require.NotEmpty(t, torchTypes[d], d)
	}
}

func TestDump(t *testing.T) {
	j := newJob(2, 0)
	mixedDir := filepath.Join(t.TempDir(), "deep", "er")
	j.do([]int{0, 1}, *reduce(1), 1, ops.OK)
	for range 2 { // the second replaces the first
		paths, err := j.recorders[1].Dump(mixedDir, "my_trace_")
		require.NoError(t, err)
		require.Equal(t, []string{filepath.Join(mixedDir, "operations.1.1.jsonl"), filepath.Join(mixedDir, "my_trace_1")}, paths)
		require.Equal(t, []string{"my_trace_1", "operations.1.1.jsonl"}, files(t, mixedDir))
		j.do([]int{0, 1}, *reduce(2), 1, ops.OK)
	}
	f, err := os.Open(filepath.Join(mixedDir, "operations.1.1.jsonl"))
	require.NoError(t, err)
	defer f.Close()
	es, err := ReadJSON(f)
	require.NoError(t, err)
	require.Len(t, es, 2)
	for _, bad := range []string{"a/b", "rank1", "operations.", "."} {
		_, err := j.recorders[1].Dump(mixedDir, bad)
		require.ErrorContains(t, err, bad)
	}
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range es {
		names = append(names, e.Name())
	}
	return names
}

func TestReadJSONErrors(t *testing.T) {
	es, err := ReadJSON(strings.NewReader("{\"sequence\":1}\n{\"seq"))
	require.ErrorContains(t, err, "operation 2 of the dump")
	require.Len(t, es, 1)
}

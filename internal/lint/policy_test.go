package lint

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// policy is the import order of the module, in the notation of the Go tree's
// go/build/deps_test.go.
//
//	a, b < c, d;    c and d may import a and b, and all that those may
//	a, b !< c, d;   but c and d may not import a or b themselves
//
// A folder that is not named belongs to the nearest named one around it. Test
// files, and folders whose name ends in "test", may import what they like: what
// they must not be is imported by anything but tests, which holds because no
// line allows it.
const policy = `
	# What everything may use. Nothing here knows of a rank or a link.
	NONE
	< internal/dtype, internal/slots, internal/wire, internal/faultpoint, internal/knob, internal/harness,
		internal/ops;

	internal/dtype < internal/vec;

	# The pure parts: decisions without a clock, a lock or a socket.
	internal/dtype, internal/slots
	< PURE
	< fault, collectives/plan, ep/route, ep/eplb, device/topo, store/place, internal/history;

	# Memory and links.
	internal/wire < device;
	NONE < device/host, device/cuda;
	device, device/host, device/cuda, device/topo, internal/faultpoint < device/stream;
	device/stream
	< device/shm, device/tcp, device/rdma, device/nvlink, device/sim, device/faulty
	< LINKS;

	# What a process has once.
	internal/knob < rendezvous;
	LINKS, rendezvous < mesh;

	# Who is alive, and the operations of those who are. Neither knows the other;
	# pg tells each what it needs of both.
	mesh, fault < fault/agent;
	mesh, collectives/plan, internal/vec < collectives;
	internal/ops < internal/metrics;
	internal/ops, internal/dtype, internal/slots < internal/flight;
	fault/agent, collectives, internal/metrics, internal/flight < pg;
	pg, ep/route, ep/eplb < ep;

	# The vote that decides between two halves. What speaks to an etcd is for programs to link in.
	NONE < witness < witness/etcd;
	witness < pg;
	witness/etcd < bindings, examples, cmd;

	# Moving and keeping.
	mesh < transfer;
	transfer, store/place, rendezvous < store/master < store;

	# The ways in.
	rendezvous < internal/launch;
	pg, ep, transfer, store < bindings, internal/bench;
	pg, ep, transfer, store, internal/launch < examples;
	internal/harness < internal/bench;
	pg, ep, internal/history, internal/harness < internal/chaos;
	pg, internal/history < internal/sim;
	bindings, internal/bench, internal/launch, internal/chaos, internal/sim < cmd;
	NONE < scripts, internal/lint, internal/mutate;

	# A concrete link is chosen in device, mesh, examples and tests, nowhere else.
	device/shm, device/tcp, device/rdma, device/nvlink, device/sim, device/faulty, device/stream
	!< fault/agent, collectives, pg, ep, transfer, store, store/master, bindings, internal/bench, cmd;

	# Tools for tests.
	internal/harness !< internal/vec, device, rendezvous, mesh, fault, fault/agent, collectives, pg, ep, transfer, store,
		bindings, examples;
`

// rooms are the folders that the design and the policy have a place for, and that are not built yet.
var rooms = []string{"collectives/plan", "ep/eplb", "device/topo", "device/rdma", "device/nvlink", "device/cuda", "transfer", "store", "store/place",
	"store/master", "bindings"}

// forbidden is what the design forbids by name: the policy must not come to
// allow it. "from -> to": from imports to.
const forbidden = `
	pg -> ep
	collectives -> fault
	collectives -> fault/agent
	collectives -> pg
	fault -> device
	fault -> device/host
	fault -> mesh
	fault -> pg
	fault -> ep
	transfer -> pg
	transfer -> ep
	transfer -> store
	pg -> device/tcp
	pg -> device/shm
	collectives -> device/tcp
	ep -> device/rdma
	store -> device/tcp
	cmd -> device/shm
	fault/agent -> device/faulty
	device -> mesh
	mesh -> fault
	mesh -> pg
	device/tcp -> internal/knob
	internal/dtype -> internal/wire
	internal/wire -> device
`

// order is a parsed policy: what each folder may import.
type order struct {
	below map[string][]string // stated directly; aliases in capitals included
	never map[string][]string
}

func parsePolicy(text string) (*order, error) {
	o := &order{below: map[string][]string{}, never: map[string][]string{}}
	var clean strings.Builder
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		clean.WriteString(line)
		clean.WriteByte(' ')
	}
	for stmt := range strings.SplitSeq(clean.String(), ";") {
		if strings.TrimSpace(stmt) == "" {
			continue
		}
		if low, high, ok := strings.Cut(stmt, "!<"); ok {
			for _, h := range names(high) {
				o.never[h] = append(o.never[h], names(low)...)
			}
			continue
		}
		parts := strings.Split(stmt, "<")
		if len(parts) < 2 {
			return nil, fmt.Errorf("no < in %q", strings.TrimSpace(stmt))
		}
		for i := 1; i < len(parts); i++ {
			for _, h := range names(parts[i]) {
				o.below[h] = append(o.below[h], names(parts[i-1])...)
			}
		}
	}
	for low := range o.below {
		if o.reaches(low, low, map[string]bool{}) {
			return nil, fmt.Errorf("%s is below itself", low)
		}
		for _, l := range o.below[low] {
			if _, ok := o.below[l]; !ok && l != "NONE" {
				return nil, fmt.Errorf("%s is above %s, which no line places", low, l)
			}
		}
	}
	for high, lows := range o.never {
		for _, n := range append(lows, high) {
			if _, ok := o.below[n]; !ok {
				return nil, fmt.Errorf("!< names %s, which no line places", n)
			}
		}
	}
	return o, nil
}

func names(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune(", \t\n", r) })
}

// reaches says whether low is below high by one step or more.
func (o *order) reaches(high, low string, seen map[string]bool) bool {
	if seen[high] {
		return false
	}
	seen[high] = true
	return slices.ContainsFunc(o.below[high], func(l string) bool { return l == low || o.reaches(l, low, seen) })
}

// place is the named folder that a folder belongs to, "" if there is none.
func (o *order) place(dir string) string {
	for ; dir != "."; dir = path.Dir(dir) {
		if _, ok := o.below[dir]; ok {
			return dir
		}
	}
	return ""
}

// allows says whether folder from may import folder to.
func (o *order) allows(from, to string) bool {
	f, t := o.place(from), o.place(to)
	if f == "" || t == "" || slices.Contains(o.never[f], t) {
		return false
	}
	return f == t || o.reaches(f, t, map[string]bool{})
}

func mustPolicy(t *testing.T) *order {
	t.Helper()
	o, err := parsePolicy(policy)
	require.NoError(t, err)
	return o
}

// unplaced says which folders the policy or the list of pure ones name and that neither exist nor are rooms, and which
// rooms have been built.
func (o *order) unplaced(pure, rooms []string, exists func(dir string) bool) (bad []string) {
	named := slices.Clone(pure)
	for dir := range o.below {
		if dir != strings.ToUpper(dir) { // an alias
			named = append(named, dir)
		}
	}
	slices.Sort(named)
	for _, dir := range slices.Compact(named) {
		switch is, room := exists(dir), slices.Contains(rooms, dir); {
		case !is && !room:
			bad = append(bad, fmt.Sprintf("%s is listed, and there is no such folder: take it out, or call it a room", dir))
		case is && room:
			bad = append(bad, fmt.Sprintf("%s is built: it is no room any more", dir))
		}
	}
	for _, dir := range rooms {
		if !slices.Contains(named, dir) {
			bad = append(bad, fmt.Sprintf("%s is a room without a place", dir))
		}
	}
	return bad
}

func TestListedFoldersExist(t *testing.T) {
	for _, problem := range mustPolicy(t).unplaced(pure, rooms, func(dir string) bool {
		info, err := os.Stat(filepath.Join(root, dir))
		return err == nil && info.IsDir()
	}) {
		t.Error(problem)
	}
	o, err := parsePolicy("NONE < a, b/c; a < X < d;")
	require.NoError(t, err)
	bad := o.unplaced([]string{"a", "e"}, []string{"a", "d", "f"}, func(dir string) bool { return dir == "a" || dir == "b/c" })
	require.Len(t, bad, 3)
	for i, want := range []string{"a is built", "e is listed", "f is a room"} {
		require.Contains(t, bad[i], want)
	}
}

func TestPolicyForbids(t *testing.T) {
	o := mustPolicy(t)
	for line := range strings.Lines(forbidden) {
		from, to, ok := strings.Cut(strings.TrimSpace(line), " -> ")
		if !ok {
			continue
		}
		require.NotEmpty(t, o.place(from), from)
		require.NotEmpty(t, o.place(to), to)
		require.False(t, o.allows(from, to), "%s -> %s", from, to)
	}
}

func TestPolicyNotation(t *testing.T) {
	o, err := parsePolicy("NONE < a, b; # nothing\n a < c/d < E < f; b !< c/d; b < c/d;")
	require.NoError(t, err)
	for _, ok := range [][2]string{{"f", "a"}, {"f", "c/d"}, {"c/d/x", "a/y"}, {"f", "b"}, {"a/x", "a/y"}} {
		require.True(t, o.allows(ok[0], ok[1]), "%v", ok)
	}
	for _, no := range [][2]string{{"a", "f"}, {"c/d", "b"}, {"c/d", "b/x"}, {"a", "b"}, {"c", "a"}, {"f", "g"}} {
		require.False(t, o.allows(no[0], no[1]), "%v", no)
	}
	for text, want := range map[string]string{
		"NONE < a; a < b; b < a;": "below itself",
		"x < a;":                  "which no line places",
		"NONE < a; a !< b;":       "which no line places",
		"a;":                      "no <",
	} {
		_, err := parsePolicy(text)
		require.ErrorContains(t, err, want, text)
	}
}

package bench

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is a line of a result: how long something took. Durations are nanoseconds in JSON.
type Row struct {
	Name  string        `json:"name"`
	Count int64         `json:"count"`
	Min   time.Duration `json:"min_ns"`
	P50   time.Duration `json:"p50_ns"`
	P99   time.Duration `json:"p99_ns"`
	Mean  time.Duration `json:"mean_ns"`
	Max   time.Duration `json:"max_ns"`
}

// Bar is what the project asks of a measurement.
type Bar struct {
	What     string        `json:"what"`
	Asked    time.Duration `json:"asked_ns"` // at most
	Measured time.Duration `json:"measured_ns"`
	OK       bool          `json:"ok"`
}

// Result is what one measurement came to.
type Result struct {
	Name       string   `json:"name"`
	Args       any      `json:"args"`
	Load       string   `json:"load"`   // the host's load averages when it began
	Others     float64  `json:"others"` // part of the processors' time that went to other processes meanwhile, 0 to 1
	Cores      int      `json:"cores"`
	Rows       []Row    `json:"rows"`
	Notes      []string `json:"notes,omitempty"`
	Bars       []Bar    `json:"bars,omitempty"`
	Told       []Bar    `json:"told,omitempty"`       // of which nothing is asked
	Violations []string `json:"violations,omitempty"` // of what serry promises
	Kills      []Kill   `json:"kills,omitempty"`
	Skipped    string   `json:"skipped,omitempty"` // why it was not run
	about      string
	began      usage
}

// ErrViolations: something came out that serry promises never to happen. The result says what.
var ErrViolations = errors.New("bench: a promise was not kept")

func (r *Result) note(format string, a ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, a...)) }

func (r *Result) violate(format string, a ...any) {
	r.Violations = append(r.Violations, fmt.Sprintf(format, a...))
}

func (r *Result) bar(what string, asked, measured time.Duration) {
	r.Bars = append(r.Bars, Bar{what, asked, measured, measured <= asked})
}

// tell is a time that nothing is asked of, for the summary.
func (r *Result) tell(what string, measured time.Duration) {
	r.Told = append(r.Told, Bar{What: what, Measured: measured, OK: true})
}

func newResult(name string, args any, about string, a ...any) *Result {
	return &Result{Name: name, Args: args, Load: load(), Cores: runtime.NumCPU(), about: fmt.Sprintf(about, a...), began: used()}
}

// usage is processor time: of the whole host, of all that ran, and of this process and those that it started and that
// have ended.
type usage struct{ all, busy, ours time.Duration }

// end is called when all processes of the measurement have ended.
func (r *Result) end() {
	if u := used(); u.all > r.began.all {
		r.Others = max(0, float64(u.busy-r.began.busy-u.ours+r.began.ours)/float64(u.all-r.began.all))
	}
}

// load is the host's load averages, "" where it does not say.
func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	f := strings.Fields(string(b))
	if len(f) < 3 {
		return ""
	}
	return strings.Join(f[:3], " ")
}

// print writes the result for people.
func (r *Result) print(w io.Writer) {
	fmt.Fprintf(w, "%s: %s", r.Name, r.about)
	if r.Load != "" {
		fmt.Fprintf(w, " (%d cores, load %s, %.0f%% of them used by others)", r.Cores, r.Load, 100*r.Others)
	}
	fmt.Fprintln(w)
	if r.Skipped != "" {
		fmt.Fprintf(w, "  not run: %s\n", r.Skipped)
		return
	}
	if len(r.Rows) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		width := 0
		for _, row := range r.Rows {
			width = max(width, len([]rune(row.Name)))
		}
		fmt.Fprintf(t, "  %-*s\tcount\tp50\tp99\tmean\tmax\t\n", width, "")
		for _, row := range r.Rows {
			fmt.Fprintf(t, "  %-*s\t%d\t%s\t%s\t%s\t%s\t\n", width, row.Name, row.Count, short(row.P50), short(row.P99), short(row.Mean), short(row.Max))
		}
		_ = t.Flush()
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "  %s\n", n)
	}
	for _, b := range r.Bars {
		fmt.Fprintf(w, "  %s: asked at most %s, measured %s: %s\n", b.What, short(b.Asked), short(b.Measured), verdict(b.OK))
	}
	for i, v := range r.Violations {
		if i == 20 {
			fmt.Fprintf(w, "  ... and %d more\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintf(w, "  VIOLATION: %s\n", v)
	}
}

func verdict(ok bool) string {
	if ok {
		return "ok"
	}
	return "missed"
}

// printBars writes what was asked of all, and what came out.
func printBars(w io.Writer, rs []*Result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\tasked\tmeasured\t\tcores used by others\n")
	bad := 0
	for _, r := range rs {
		switch {
		case r.Skipped != "":
			fmt.Fprintf(t, "%s\t\t\tnot run\n", r.Name)
		case len(r.Bars)+len(r.Told) == 0:
			fmt.Fprintf(t, "%s\t\t\tnothing is asked of a part\n", r.Name)
		}
		for _, b := range r.Bars {
			fmt.Fprintf(t, "%s: %s\t%s\t%s\t%s\t%.0f%%\n", r.Name, b.What, short(b.Asked), short(b.Measured), verdict(b.OK), 100*r.Others)
		}
		for _, b := range r.Told {
			fmt.Fprintf(t, "%s: %s\t\t%s\t\t%.0f%%\n", r.Name, b.What, short(b.Measured), 100*r.Others)
		}
		bad += len(r.Violations)
	}
	fmt.Fprintf(t, "violations\t0\t%d\t%s\n", bad, verdict(bad == 0))
	_ = t.Flush()
}

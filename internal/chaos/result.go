package chaos

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/serry-project/serry/internal/history"
)

// Millis are times in milliseconds.
type Millis struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

// millis sums up times in nanoseconds.
func millis(ns []int64) (m Millis) {
	if len(ns) == 0 {
		return m
	}
	ns = slices.Sorted(slices.Values(ns))
	at := func(q float64) float64 { return ms(ns[min(len(ns)-1, int(q*float64(len(ns))))]) }
	return Millis{len(ns), at(0.5), at(0.99), ms(ns[len(ns)-1])}
}

func ms(ns int64) float64 { return float64(ns/1000) / 1000 }

// Point is what happened at a fault point, or to another kind of fault.
type Point struct {
	Faults int    `json:"faults"`
	Resume Millis `json:"resume_ms"`
}

// Bar is what is asked of a run, and what was measured.
type Bar struct {
	What     string  `json:"what"`
	Asked    float64 `json:"asked"`
	Measured float64 `json:"measured"`
	Unit     string  `json:"unit,omitempty"`
	Least    bool    `json:"least,omitempty"` // Asked is the least, not the most
	OK       bool    `json:"ok"`
}

// Found is a promise that was not kept.
type Found struct {
	Property string `json:"property"` // P1 to P10; "" for what is none of them: a process that crashed, say
	Text     string `json:"text"`
	World    int    `json:"world"`          // of the run, from 1
	Seed     uint64 `json:"seed"`           // of that world's program
	Kept     string `json:"kept,omitempty"` // the directory with its histories
}

// Machine is where it ran.
type Machine struct {
	System string `json:"system"`
	Kernel string `json:"kernel,omitempty"`
	Cores  int    `json:"cores"`
	Load   string `json:"load,omitempty"` // when it began
}

// Result is what a run came to.
type Result struct {
	Name        string           `json:"name"`
	Command     string           `json:"command"`
	Seed        uint64           `json:"seed"`
	Ranks       int              `json:"ranks"`
	Links       string           `json:"links"`
	Hosts       int              `json:"hosts"`
	Machine     Machine          `json:"machine"`
	Faults      int              `json:"faults"`
	Violations  int              `json:"violations"`
	Hangs       int              `json:"hangs"`
	WrongBlames int              `json:"wrong_blames"`
	Resume      Millis           `json:"resume_ms"`
	ByPoint     map[string]Point `json:"by_point"`
	ByOperation map[string]int   `json:"by_operation,omitempty"` // kills at a point in an operation
	ByRank      map[string]int   `json:"by_rank"`
	Frames      int              `json:"frames"`     // that were delayed or refused besides
	Operations  int              `json:"operations"` // that ranks returned from, and that were checked
	Bars        []Bar            `json:"bars,omitempty"`
	Found       []Found          `json:"found,omitempty"`
	Notes       []string         `json:"notes,omitempty"`
	Skipped     string           `json:"skipped,omitempty"` // why it, or a part of it, was not run
	Seconds     float64          `json:"seconds"`

	began  time.Time
	resume []int64
	points map[string]*point
}

type point struct {
	faults int
	resume []int64
}

func newResult(name string, cfg *Config) *Result {
	r := &Result{Name: name, Command: cfg.Command, Seed: cfg.Seed, Ranks: cfg.Ranks, Links: cfg.Links, Hosts: cfg.Hosts,
		ByRank: map[string]int{}, ByOperation: map[string]int{}, began: time.Now(), points: map[string]*point{}}
	r.Machine = Machine{System: runtime.GOOS + "/" + runtime.GOARCH, Cores: runtime.NumCPU()}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		r.Machine.Kernel = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/loadavg"); err == nil {
		f := strings.Fields(string(b))
		r.Machine.Load = strings.Join(f[:min(3, len(f))], " ")
	}
	return r
}

func (r *Result) note(format string, a ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, a...)) }

func (r *Result) atMost(what string, asked, measured float64, unit string) {
	r.Bars = append(r.Bars, Bar{What: what, Asked: asked, Measured: measured, Unit: unit, OK: measured <= asked})
}

func (r *Result) atLeast(what string, asked, measured float64, unit string) {
	r.Bars = append(r.Bars, Bar{What: what, Asked: asked, Measured: measured, Unit: unit, Least: true, OK: measured >= asked})
}

// fault counts one.
func (r *Result) fault(name string, ranks ...int) *point {
	p := r.points[name]
	if p == nil {
		p = &point{}
		r.points[name] = p
	}
	p.faults++
	r.Faults++
	for _, x := range ranks {
		r.ByRank[fmt.Sprint(x)]++
	}
	return p
}

// violate takes in what was found, in the terms of history: "P5: ...".
func (r *Result) violate(f Found) {
	r.Found = append(r.Found, f)
	r.Violations++
	switch f.Property {
	case "P5":
		r.Hangs++
	case "P6":
		r.WrongBlames++
	}
}

// take takes in the report of a world.
func (r *Result) take(rep *Report, f Found) {
	for _, v := range rep.Violations {
		f.Property, f.Text = v.Property, v.Text
		r.violate(f)
	}
	for _, n := range rep.Count {
		r.Operations += n
	}
	for _, p := range rep.Problems {
		if !slices.ContainsFunc(rep.Violations, func(v history.Violation) bool { return v.String() == p }) {
			f.Property, f.Text = "", p
			r.violate(f)
		}
	}
}

// end fills in what is computed from the rest.
func (r *Result) end() {
	r.Resume = millis(r.resume)
	r.ByPoint = map[string]Point{}
	for name, p := range r.points {
		r.ByPoint[name] = Point{p.faults, millis(p.resume)}
	}
	r.Seconds = float64(time.Since(r.began).Milliseconds()) / 1000
}

// Failed says that a promise was not kept.
func (r *Result) Failed() bool { return r.Violations > 0 }

// Print writes the result for people.
func (r *Result) Print(w io.Writer) {
	fmt.Fprintf(w, "%s: seed %d, %d ranks on %d hosts, links %s; %d cores, load %s\n", r.Name, r.Seed, r.Ranks, r.Hosts, r.Links, r.Machine.Cores, r.Machine.Load)
	if r.Skipped != "" {
		fmt.Fprintf(w, "  not run: %s\n", r.Skipped)
	}
	if len(r.ByPoint) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(t, "  fault\ttimes\tgone on after: p50 ms\tp99\tmax\n")
		for _, name := range slices.Sorted(maps.Keys(r.ByPoint)) {
			p := r.ByPoint[name]
			if p.Resume.Count == 0 {
				fmt.Fprintf(t, "  %s\t%d\n", name, p.Faults)
				continue
			}
			fmt.Fprintf(t, "  %s\t%d\t%.1f\t%.1f\t%.1f\n", name, p.Faults, p.Resume.P50, p.Resume.P99, p.Resume.Max)
		}
		if r.Resume.Count > 0 {
			fmt.Fprintf(t, "  all kills\t%d\t%.1f\t%.1f\t%.1f\n", r.Resume.Count, r.Resume.P50, r.Resume.P99, r.Resume.Max)
		}
		_ = t.Flush()
	}
	if n := len(r.ByOperation); n > 0 {
		least := slices.Min(slices.Collect(maps.Values(r.ByOperation)))
		fmt.Fprintf(w, "  %d pairs of a point and an operation, each %d times or more\n", n, least)
	}
	if r.Frames > 0 {
		fmt.Fprintf(w, "  %d frames delayed or refused besides\n", r.Frames)
	}
	fmt.Fprintf(w, "  %d faults, %d operations checked, %d violations, %d hangs, %d wrong blames, %.1f s\n", r.Faults, r.Operations, r.Violations, r.Hangs, r.WrongBlames, r.Seconds)
	for _, n := range r.Notes {
		fmt.Fprintf(w, "  %s\n", n)
	}
	for _, b := range r.Bars {
		how, verdict := "at most", "ok"
		if b.Least {
			how = "at least"
		}
		if !b.OK {
			verdict = "missed"
		}
		fmt.Fprintf(w, "  %s: asked %s %g %s, measured %g: %s\n", b.What, how, b.Asked, b.Unit, b.Measured, verdict)
	}
	slices.SortStableFunc(r.Found, func(a, b Found) int { return cmp.Compare(a.World, b.World) })
	for i, f := range r.Found {
		if i == 20 {
			fmt.Fprintf(w, "  ... and %d more\n", len(r.Found)-i)
			break
		}
		fmt.Fprintf(w, "  VIOLATION %s: %s (world %d, program %d, kept in %s)\n", f.Property, f.Text, f.World, f.Seed, f.Kept)
	}
}

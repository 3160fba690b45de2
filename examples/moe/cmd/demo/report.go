package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"

	"gonum.org/v1/plot/vg"
)

// rankReport is one process's share of the work. Who was replaced took its count along: that of its last process is left.
type rankReport struct {
	Rank int `json:"rank"`
	serve.Stats
	RemoteShare float64 `json:"remote_share"` // of its requests' expert rows, computed by another rank
}

// report is report.json.
type report struct {
	World       int          `json:"world"`
	Links       string       `json:"links"`
	Replicas    int          `json:"replicas"`
	Model       string       `json:"model_sha256"`
	Prompts     int          `json:"prompts"`
	Max         int          `json:"max"`
	Temperature float64      `json:"temperature"`
	TopK        int          `json:"top_k"`
	Seed        uint64       `json:"seed"`
	Tokens      int          `json:"tokens"`
	Identical   bool         `json:"identical"`
	Differs     []string     `json:"differs,omitempty"`
	LostMass    float64      `json:"lost_mass"`
	Kills       []kill       `json:"kills"`
	Rejoins     []rejoin     `json:"rejoins"`
	Before      float64      `json:"tokens_per_s_before"`
	During      float64      `json:"tokens_per_s_during"` // from the first kill to the last rejoin
	After       float64      `json:"tokens_per_s_after"`
	Seconds     float64      `json:"seconds"`
	RemoteShare float64      `json:"remote_share"` // over all ranks
	Ranks       []rankReport `json:"ranks"`
}

// report says what came of it, once all ranks have ended.
func (w *watcher) report(o options, kills []*kill, rejoins []rejoin) *report {
	w.mu.Lock()
	defer w.mu.Unlock()
	differs := w.verdict()
	r := &report{
		World: o.ranks, Links: o.links, Replicas: o.replicas, Prompts: len(w.prompts), Max: o.most,
		Temperature: o.sampling.Temperature, TopK: o.sampling.TopK, Seed: o.sampling.Seed,
		Identical: len(differs) == 0, Differs: differs, Kills: []kill{}, Rejoins: append([]rejoin{}, rejoins...),
	}
	for i, a := range w.final {
		if a != nil { // it may have a byte more than was shown
			w.text[i], w.hashes[i] = a.Text, a.Hashes
			r.LostMass += a.Lost
		}
		r.Tokens += len(w.hashes[i])
	}
	for _, k := range kills {
		k.finish(w)
		r.Kills = append(r.Kills, *k)
	}
	slices.SortFunc(r.Kills, func(a, b kill) int { return a.at.Compare(b.at) })
	slices.SortFunc(r.Rejoins, func(a, b rejoin) int { return a.at.Compare(b.at) })
	if begin, end := w.span(); !end.IsZero() {
		r.Seconds = end.Sub(begin).Seconds()
		first, last := end, end
		if len(r.Kills) > 0 {
			first = r.Kills[0].at
		}
		if len(r.Rejoins) > 0 {
			last = r.Rejoins[len(r.Rejoins)-1].at
		}
		r.Before, r.During, r.After = w.rate(begin, first), w.rate(first, last), w.rate(last, end)
	}
	rows, remote := int64(0), int64(0)
	for k := range o.ranks {
		x := rankReport{Rank: k}
		if s := w.stats[k]; s != nil {
			x.Stats = *s
			rows, remote = rows+s.Rows, remote+s.RemoteRows
			x.RemoteShare = share(s.RemoteRows, s.Rows)
		}
		r.Ranks = append(r.Ranks, x)
	}
	r.RemoteShare = share(remote, rows)
	return r
}

// verdict is the error that the run comes to.
func (r *report) verdict() error {
	if r.Identical {
		return nil
	}
	if r.LostMass == 0 {
		return errDiffers
	}
	var down []int
	for _, k := range r.Kills {
		if len(k.down) > len(down) {
			down = k.down
		}
	}
	return fmt.Errorf("%w: ranks %v did not serve at the same time, and nobody else had some of their experts: with %d replicas of each no more than %d may be missing",
		errDiffers, down, r.Replicas, r.Replicas-1)
}

// back is the replacement of a rank that was killed; nil if none came.
func (r *report) back(k *kill) *rejoin {
	for i := range r.Rejoins {
		if j := &r.Rejoins[i]; j.Rank == k.Rank && j.at.After(k.at) {
			return j
		}
	}
	return nil
}

func share(part, all int64) float64 {
	if all == 0 {
		return 0
	}
	return float64(part) / float64(all)
}

// span is from the first byte to the last. Under the lock.
func (w *watcher) span() (begin, end time.Time) {
	for _, t := range w.times {
		if begin.IsZero() || t.Before(begin) {
			begin = t
		}
		if t.After(end) {
			end = t
		}
	}
	return begin, end
}

// results is the folder of the files that are left.
type results struct{ dir string }

var resultFiles = []string{"report.json", "answers.txt", "timeline.svg", "timeline.png"}

// roomFor is what the results take at most.
const roomFor = 512 << 10

// newResults makes the folder, takes an earlier run's results out of it, and sees that there is room for new ones: it
// would be sad to find out at the end.
func newResults(dir string) (*results, error) {
	fail := func(err error) (*results, error) { return nil, fmt.Errorf("--out: %w", err) }
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail(err)
	}
	r := &results{dir}
	for _, name := range resultFiles {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fail(err)
		}
	}
	if err := r.put("probe", make([]byte, roomFor)); err != nil {
		return fail(err)
	}
	return r, os.Remove(r.path("probe"))
}

func (r *results) path(name string) string { return filepath.Join(r.dir, name) }

// put writes a file, whole or not at all.
func (r *results) put(name string, b []byte) error {
	part := r.path("." + name + ".part")
	err := os.WriteFile(part, b, 0o644)
	if err == nil {
		err = os.Rename(part, r.path(name))
	}
	if err != nil {
		_ = os.Remove(part)
	}
	return err
}

// write leaves all results, or none.
func (r *results) write(w *watcher, rep *report) error {
	files := map[string][]byte{"answers.txt": w.text4people()}
	b, err := json.MarshalIndent(rep, "", "  ")
	if err != nil {
		return err
	}
	files["report.json"] = append(b, '\n')
	p, err := w.timeline(rep)
	if err != nil {
		return fmt.Errorf("drawing the timeline: %w", err)
	}
	for _, format := range []string{"svg", "png"} {
		wt, err := p.WriterTo(26*vg.Centimeter, 13*vg.Centimeter, format)
		if err != nil {
			return fmt.Errorf("drawing the timeline: %w", err)
		}
		var b bytes.Buffer
		if _, err := wt.WriteTo(&b); err != nil {
			return fmt.Errorf("drawing the timeline: %w", err)
		}
		files["timeline."+format] = b.Bytes()
	}
	for _, name := range resultFiles {
		if err := r.put(name, files[name]); err != nil {
			for _, name := range resultFiles {
				_ = os.Remove(r.path(name))
			}
			return fmt.Errorf("writing the results: %w", err)
		}
	}
	return nil
}

// text4people are all answers in full.
func (w *watcher) text4people() []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	var b strings.Builder
	for i, t := range w.text {
		fmt.Fprintf(&b, "=== %d: the prompt\n%s\n=== %d: the answer, %d bytes\n%s\n\n", i, clean(w.prompts[i]), i, len(t), clean(string(t)))
	}
	return []byte(b.String())
}

// summary is what a person wants to know at the end.
func (w *watcher) summary(out io.Writer, r *report, dir string) {
	for i, t := range w.text {
		fmt.Fprintf(out, "#%-2d %s\n", i, head(oneLine(w.prompts[i]), 80))
		shown := 0
		for l := range strings.Lines(clean(string(t))) {
			if l = strings.TrimRight(l, " \n"); l != "" && shown < summaryLines {
				fmt.Fprintf(out, "    %s\n", head(l, 80))
				shown++
			}
		}
	}
	for _, k := range r.Kills {
		if k.Planned {
			fmt.Fprintf(out, "kill -9 rank %d: %s\n", k.Rank, &k)
		} else {
			fmt.Fprintf(out, "rank %d ended by %s, not by the demo: %s\n", k.Rank, k.Signal, &k)
		}
	}
	for _, j := range r.Rejoins {
		fmt.Fprintf(out, "rank %d again: %.0f ms from Join to its first step, %.0f ms from its start\n", j.Rank, j.JoinMs, j.TotalMs)
	}
	if len(r.Kills) > 0 {
		fmt.Fprintf(out, "bytes per second: %.0f before the kills, %.0f until all were back, %.0f after\n", r.Before, r.During, r.After)
	} else {
		fmt.Fprintf(out, "bytes per second: %.0f\n", r.Before)
	}
	for _, k := range r.Ranks {
		fmt.Fprintf(out, "rank %d: %.1f/%.1f MiB of experts, %.0f %% of its rows computed elsewhere, %.1f MiB sent\n",
			k.Rank, mib(k.ExpertBytes), mib(k.AllExperts), 100*k.RemoteShare, mib(k.LinkBytes))
	}
	fmt.Fprintf(out, "all ranks: %.0f %% of the rows computed elsewhere\n", 100*r.RemoteShare)
	for _, d := range r.Differs {
		fmt.Fprintln(out, "  differs:", clean(d))
	}
	fmt.Fprintf(out, "%d bytes, lost mass %.4g; report, answers, timeline: %s\n", r.Tokens, r.LostMass, dir)
	fmt.Fprintf(out, "identical to a single process, every byte and every logit's bits: %v\n", r.Identical)
}

// summaryLines is how much of an answer the summary shows: lines that are not empty.
const summaryLines = 3

// head is the beginning of a text, at most n runes.
func head(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

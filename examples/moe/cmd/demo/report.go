package main

import (
	"encoding/json"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"sort"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// rankReport is one process's share of the work, as its last incarnation counted it.
type rankReport struct {
	Rank int `json:"rank"`
	serve.Stats
	RemoteShare float64 `json:"remote_share"` // of this rank's expert rows, computed by another rank
}

// report is out/demo/report.json.
type report struct {
	World     int          `json:"world"`
	Links     string       `json:"links"`
	Prompts   int          `json:"prompts"`
	Tokens    int          `json:"tokens"`
	Identical bool         `json:"identical"`
	Differs   []string     `json:"differs,omitempty"`
	LostMass  float64      `json:"lost_mass"`
	Kills     []kill       `json:"kills"`
	Rejoins   []rejoin     `json:"rejoins"`
	Before    float64      `json:"tokens_per_s_before"`
	During    float64      `json:"tokens_per_s_during"` // from the first kill to the last rejoin
	After     float64      `json:"tokens_per_s_after"`
	Seconds   float64      `json:"seconds"`
	Ranks     []rankReport `json:"ranks"`
}

func (w *watcher) report(ranks int, links string, kills []kill, rejoins []rejoin) *report {
	same, bad := w.identical()
	w.mu.Lock()
	defer w.mu.Unlock()
	r := &report{World: ranks, Links: links, Prompts: len(w.prompts), Tokens: w.tokens, Identical: same, Differs: bad, LostMass: w.lost, Kills: kills, Rejoins: rejoins}
	if len(w.times) > 0 {
		first, last := w.times[0], w.times[len(w.times)-1]
		r.Seconds = last.Sub(first).Seconds()
		from, to := last, last
		if len(kills) > 0 {
			from = kills[0].at
			to = from
		}
		if n := len(rejoins); n > 0 {
			to = rejoins[n-1].at
		}
		r.Before, r.During, r.After = w.rate(first, from), w.rate(from, to), w.rate(to, last)
	}
	for k, s := range w.stats {
		x := rankReport{Rank: k, Stats: *s}
		if s.Rows > 0 {
			x.RemoteShare = float64(s.RemoteRows) / float64(s.Rows)
		}
		r.Ranks = append(r.Ranks, x)
	}
	sort.Slice(r.Ranks, func(i, j int) bool { return r.Ranks[i].Rank < r.Ranks[j].Rank })
	return r
}

// write leaves report.json, timeline.svg and timeline.png in dir.
func (w *watcher) write(dir string, r *report) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "report.json"), append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	p, err := w.timeline(r)
	if err != nil {
		return err
	}
	for _, f := range []string{"timeline.svg", "timeline.png"} {
		if err := p.Save(24*vg.Centimeter, 11*vg.Centimeter, filepath.Join(dir, f)); err != nil {
			return fmt.Errorf("drawing the timeline: %w", err)
		}
	}
	return nil
}

var (
	ink   = color.RGBA{40, 40, 48, 255}
	blue  = color.RGBA{44, 102, 176, 255}
	red   = color.RGBA{192, 44, 52, 255}
	green = color.RGBA{32, 132, 76, 255}
)

// timeline draws bytes per second, each rank's life above it, and the kills and rejoins.
func (w *watcher) timeline(r *report) (*plot.Plot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%d ranks, %d prompts, %d bytes, identical: %v", r.World, r.Prompts, r.Tokens, r.Identical)
	p.X.Label.Text, p.Y.Label.Text = "seconds", "bytes per second"
	if len(w.times) == 0 {
		return p, nil
	}
	begin, end := w.times[0], w.times[len(w.times)-1]
	x := func(t time.Time) float64 { return t.Sub(begin).Seconds() }
	step := max(end.Sub(begin)/150, 20*time.Millisecond)
	var pts plotter.XYs
	top := 0.0
	for t := begin; t.Before(end); t = t.Add(step) {
		v := w.rate(t, t.Add(step))
		pts = append(pts, plotter.XY{X: x(t.Add(step / 2)), Y: v})
		top = max(top, v)
	}
	line, err := plotter.NewLine(pts)
	if err != nil {
		return nil, err
	}
	line.Color, line.Width = blue, vg.Points(1.5)
	p.Add(plotter.NewGrid(), line)
	p.Legend.Add("bytes per second", line)
	bar := func(rank int, from, to time.Time) error {
		y := top * (1.06 + 0.07*float64(rank))
		l, err := plotter.NewLine(plotter.XYs{{X: x(from), Y: y}, {X: x(to), Y: y}})
		if err != nil {
			return err
		}
		l.Color, l.Width = green, vg.Points(4)
		p.Add(l)
		return nil
	}
	labels := plotter.XYLabels{}
	for rank := range r.World {
		from := begin
		for _, k := range r.Kills {
			if k.Rank == rank {
				if err := bar(rank, from, k.at); err != nil {
					return nil, err
				}
				from = end
			}
		}
		for _, j := range r.Rejoins {
			if j.Rank == rank {
				from = j.at
			}
		}
		if from.Before(end) {
			if err := bar(rank, from, end); err != nil {
				return nil, err
			}
		}
		labels.XYs = append(labels.XYs, plotter.XY{X: x(end), Y: top * (1.05 + 0.07*float64(rank))})
		labels.Labels = append(labels.Labels, fmt.Sprintf(" rank %d", rank))
	}
	upright := func(at time.Time, c color.Color, what string, y float64) error {
		l, err := plotter.NewLine(plotter.XYs{{X: x(at), Y: 0}, {X: x(at), Y: top * 1.04}})
		if err != nil {
			return err
		}
		l.Color, l.Dashes = c, []vg.Length{vg.Points(3), vg.Points(2)}
		p.Add(l)
		labels.XYs = append(labels.XYs, plotter.XY{X: x(at), Y: y * top})
		labels.Labels = append(labels.Labels, " "+what)
		return nil
	}
	for i, k := range r.Kills {
		if err := upright(k.at, red, fmt.Sprintf("kill -9 rank %d: resumed in %.1f ms", k.Rank, k.ResumeMs), 0.10+0.1*float64(i%2)); err != nil {
			return nil, err
		}
	}
	for i, j := range r.Rejoins {
		if err := upright(j.at, green, fmt.Sprintf("rank %d is back (join %.0f ms)", j.Rank, j.JoinMs), 0.30+0.1*float64(i%2)); err != nil {
			return nil, err
		}
	}
	l, err := plotter.NewLabels(labels)
	if err != nil {
		return nil, err
	}
	for i := range l.TextStyle {
		l.TextStyle[i] = text.Style{Color: ink, Font: p.X.Tick.Label.Font, Handler: p.X.Tick.Label.Handler, YAlign: draw.YBottom}
		l.TextStyle[i].Font.Size = vg.Points(9)
	}
	p.Add(l)
	p.Y.Min, p.Y.Max = 0, top*(1.1+0.07*float64(r.World))
	p.X.Max = x(end) * 1.08
	p.Legend.Top, p.Legend.Left = false, false
	return p, nil
}

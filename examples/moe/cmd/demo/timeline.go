package main

import (
	"fmt"
	"image/color"
	"math"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

var (
	ink       = color.RGBA{40, 40, 48, 255}
	lightGray = color.RGBA{228, 228, 232, 255}
	blue      = color.RGBA{44, 102, 176, 255}
	lightBlue = color.RGBA{214, 228, 245, 255}
	redInk    = color.RGBA{192, 44, 52, 255}
	greenInk  = color.RGBA{32, 132, 76, 255}
)

// timeline draws the bytes per second, above them a bar for the life of each rank, and kills and rejoins in both.
func (w *watcher) timeline(r *report) (*plot.Plot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%d processes write %d answers: bytes per second, and who lives", r.World, r.Prompts)
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text, p.Y.Label.Text = "seconds", "bytes per second"
	p.X.Padding, p.Y.Padding = vg.Points(4), vg.Points(4)
	begin, end := w.span()
	if end.Sub(begin) < time.Millisecond {
		return p, nil
	}
	t := drawing{p: p, begin: begin, end: end}
	pts := t.rates(w)
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = lightGray, lightGray
	line, err := plotter.NewLine(pts)
	if err != nil {
		return nil, err
	}
	line.Color, line.Width, line.FillColor = blue, vg.Points(1.2), lightBlue
	p.Add(line, grid)
	t.axes(r.World)
	for rank := range r.World {
		t.life(rank, r)
	}
	for _, k := range r.Kills {
		t.upright(k.at, k.Rank, redInk)
	}
	for _, j := range r.Rejoins {
		t.upright(j.at, j.Rank, greenInk)
	}
	for _, k := range r.Kills {
		if !k.Served {
			continue
		}
		says := k.Signal
		if k.Epoch > 0 {
			says += fmt.Sprintf(": the others serve on after %.0f ms", math.Ceil(k.ResumeMs))
		}
		if j := r.back(&k); j != nil {
			says += fmt.Sprintf("; a replacement joins in %.0f ms", math.Ceil(j.JoinMs))
		}
		p.Add(&label{x: t.x(k.at), y: t.bar(k.Rank), right: t.x(k.at) > t.x(end)/2, text: says})
	}
	return p, t.err
}

// drawing is a timeline that is being drawn.
type drawing struct {
	p          *plot.Plot
	begin, end time.Time
	top        float64 // end of the scale of bytes per second
	unit       float64 // distance of its ticks
	err        error
}

// x is a time on the scale: what was before or after is at its end.
func (t *drawing) x(at time.Time) float64 {
	return min(max(0, at.Sub(t.begin)), t.end.Sub(t.begin)).Seconds()
}

// bar is the height of a rank's bar: they lie above the scale, rank 0 on top.
func (t *drawing) bar(rank int) float64 { return t.p.Y.Max - t.top*0.14*(float64(rank)+0.75) }

// rates are the bytes per second in steps.
func (t *drawing) rates(w *watcher) (pts plotter.XYs) {
	bins := make([]int, min(120, max(10, int(t.end.Sub(t.begin)/(20*time.Millisecond)))))
	step := t.end.Sub(t.begin).Seconds() / float64(len(bins))
	for _, at := range w.times {
		bins[min(int(t.x(at)/step), len(bins)-1)]++
	}
	highest := 0.0
	for i, n := range bins {
		v := float64(n) / step
		highest = max(highest, v)
		pts = append(pts, plotter.XY{X: float64(i) * step, Y: v}, plotter.XY{X: float64(i+1) * step, Y: v})
	}
	t.unit = nice(highest / 4)
	t.top = t.unit * math.Ceil(highest/t.unit)
	return pts
}

// nice is the next number upwards of the form 1, 2 or 5 times a power of ten, at least 1.
func nice(v float64) float64 {
	for unit := 1.0; ; unit *= 10 {
		for _, f := range []float64{1, 2, 5} {
			if f*unit >= v {
				return f * unit
			}
		}
	}
}

// axes has whole numbers on y up to the end of the scale, and the ranks' names above.
func (t *drawing) axes(ranks int) {
	p := t.p
	p.Y.Min, p.Y.Max = 0, t.top*(1.06+0.14*float64(ranks))
	p.X.Min, p.X.Max = 0, t.x(t.end)
	var ys, xs plot.ConstantTicks
	for v := 0.0; v <= t.top; v += t.unit {
		ys = append(ys, plot.Tick{Value: v, Label: fmt.Sprintf("%.0f", v)})
	}
	for rank := range ranks {
		ys = append(ys, plot.Tick{Value: t.bar(rank), Label: fmt.Sprintf("rank %d", rank)})
	}
	unit, format := nice(p.X.Max*1000/10)/1000, "%.0f"
	if unit < 1 {
		format = "%.1f"
	}
	if unit < 0.1 {
		format = "%.2f"
	}
	for n := 0.0; n*unit <= p.X.Max; n++ {
		xs = append(xs, plot.Tick{Value: n * unit, Label: fmt.Sprintf(format, n*unit)})
	}
	p.X.Tick.Marker, p.Y.Tick.Marker = xs, ys
	for _, l := range []*draw.LineStyle{&p.X.LineStyle, &p.Y.LineStyle, &p.X.Tick.LineStyle, &p.Y.Tick.LineStyle} {
		l.Color, l.Width = color.RGBA{150, 150, 158, 255}, vg.Points(0.5)
	}
	for _, s := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		s.Color = ink
	}
}

func (t *drawing) add(xys plotter.XYs, style draw.LineStyle) {
	l, err := plotter.NewLine(xys)
	if err != nil {
		t.err = err
		return
	}
	l.LineStyle = style
	t.p.Add(l)
}

// life draws the bar of a rank, with a gap while it is dead.
func (t *drawing) life(rank int, r *report) {
	y, from := t.bar(rank), t.begin
	piece := func(to time.Time) {
		t.add(plotter.XYs{{X: t.x(from), Y: y}, {X: t.x(to), Y: y}}, draw.LineStyle{Color: greenInk, Width: vg.Points(5)})
	}
	for _, k := range r.Kills {
		if k.Rank != rank || k.at.Before(from) {
			continue
		}
		piece(k.at)
		if from = t.end; r.back(&k) != nil {
			from = r.back(&k).at
		}
	}
	if from.Before(t.end) {
		piece(t.end)
	}
}

// upright goes from the bottom to the bar of a rank.
func (t *drawing) upright(at time.Time, rank int, c color.Color) {
	t.add(plotter.XYs{{X: t.x(at), Y: 0}, {X: t.x(at), Y: t.bar(rank)}},
		draw.LineStyle{Color: c, Width: vg.Points(0.8), Dashes: []vg.Length{vg.Points(3), vg.Points(2)}})
}

// label is a text above a point, on a ground of its own so that lines do not cross it.
type label struct {
	x, y  float64
	right bool // it ends at x
	text  string
}

// Plot implements plot.Plotter.
func (l *label) Plot(c draw.Canvas, p *plot.Plot) {
	toX, toY := p.Transforms(&c)
	style := p.X.Tick.Label
	style.Color, style.XAlign, style.YAlign = ink, draw.XLeft, draw.YBottom
	style.Font.Size = vg.Points(9)
	at := vg.Point{X: toX(l.x) + vg.Points(3), Y: toY(l.y) + vg.Points(6)}
	if l.right {
		style.XAlign = draw.XRight
		at.X -= vg.Points(6)
	}
	box := style.Rectangle(l.text).Add(at)
	c.FillPolygon(color.White, []vg.Point{box.Min, {X: box.Max.X, Y: box.Min.Y}, box.Max, {X: box.Min.X, Y: box.Max.Y}})
	c.FillText(style, at, l.text)
}

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
)

// FailoverConfig is whom to kill, where, and how often.
type FailoverConfig struct {
	Ranks    int      `json:"ranks"`
	Kills    int      `json:"kills"`
	Resident int64    `json:"resident"` // bytes that the victim has touched
	Points   []string `json:"points"`   // none: all that a step passes
	Links    string   `json:"links"`
	Seed     uint64   `json:"seed"`
	// Pace is how long each rank sleeps before a step, so that all together do not fill the processors.
	Pace  time.Duration `json:"pace_ns"`
	Shape shape         `json:"shape"`
}

// FailoverDefaults is the case that the project has a bar for.
func FailoverDefaults() FailoverConfig {
	s := EPDefaults().Shape
	s.Replicas = 2
	return FailoverConfig{Ranks: 4, Kills: 200, Resident: 256 << 20, Links: "auto", Seed: 1, Shape: s}
}

// ErrNoFaultpoints: this binary cannot die at a named point.
var ErrNoFaultpoints = errors.New("bench: failover needs a binary that can die at named points: go build -tags faultpoint -o serry-faultpoint ./cmd/serry, then --faultpoint ./serry-faultpoint")

// The points that each phase of a step passes, and how often it passes them at least.
var (
	epPoints = map[string]int{
		faultpoint.PublishBefore: 2, faultpoint.PublishMid: 2, faultpoint.SealBefore: 2, faultpoint.SealAfter: 2, faultpoint.WakeBefore: 2,
		faultpoint.PullMid: 2, faultpoint.PullAfter: 2, faultpoint.DecideBefore: 1, faultpoint.DecideAfter: 1, faultpoint.ReturnBefore: 1,
		faultpoint.EPDispatchEncode: 3, faultpoint.EPDispatchWait: 1, faultpoint.EPCombineEncode: 3, faultpoint.EPCombineWait: 1,
	}
	worldPoints = map[string]int{
		faultpoint.BoundaryEnter: 1,
		faultpoint.PublishBefore: 1, faultpoint.PublishMid: 1, faultpoint.SealBefore: 1, faultpoint.SealAfter: 1, faultpoint.WakeBefore: 1,
		faultpoint.PullMid: 1, faultpoint.PullAfter: 1, faultpoint.DecideBefore: 1, faultpoint.DecideAfter: 1, faultpoint.ReturnBefore: 1,
	}
)

// FailoverPoints lists the points that can be named in FailoverConfig.Points.
func FailoverPoints() []string {
	return slices.DeleteFunc(faultpoint.All(), func(s string) bool { return epPoints[s] == 0 && worldPoints[s] == 0 })
}

// Kill is one that was measured.
type Kill struct {
	Rank  int           `json:"rank"`
	Phase string        `json:"phase"`
	Point string        `json:"point"`
	Nth   int           `json:"nth"`     // pass of the point in its phase
	At    int64         `json:"at"`      // CLOCK_MONOTONIC, in nanoseconds
	View  time.Duration `json:"view_ns"` // until the last survivor had agreed on the new view
	Pause time.Duration `json:"pause_ns"`
}

func (k Kill) where() string { return fmt.Sprintf("%s %s (pass %d)", k.Phase, k.Point, k.Nth) }

// Failover kills ranks while all run steps, and measures from the kill until the last survivor has completed its first
// step without the dead rank. Each is replaced before the next is killed.
func Failover(ctx context.Context, o Options, cfg FailoverConfig) (*Result, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if o.Killable != nil {
		o.Self = o.Killable
	} else if !faultpoint.Enabled {
		return nil, ErrNoFaultpoints
	}
	res := newResult("failover", cfg, "%d ranks, %d kills, %s resident in the victim, links %s; from the kill to the last survivor's first step without it",
		cfg.Ranks, cfg.Kills, sizeText(cfg.Resident), cfg.Links)
	c, err := newCrew(ctx, o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	f := &failover{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0)), progress: newProgress(o.Progress),
		population: &population{crew: c, res: res, args: rankArgs{Program: "steps", Links: cfg.Links, Size: cfg.Ranks, Shape: cfg.Shape, Resident: cfg.Resident, Pace: cfg.Pace}},
	}
	defer f.progress.clear()
	f.choose()
	if err := f.run(); err != nil {
		return nil, err
	}
	f.report()
	return res, nil
}

func (c *FailoverConfig) check() error {
	var bad checks
	bad.ranks(c.Ranks, 3)
	bad.number("kills", c.Kills, 1, most)
	bad.that(0 <= c.Resident && c.Resident <= 64<<30, "resident", sizeText(c.Resident), "at most 64 GiB")
	bad.that(0 <= c.Pace && c.Pace <= hang/5, "pace", c.Pace, "a time from 0 to %v, or a pause looks like a hang", hang/5)
	for _, p := range c.Points {
		bad.that(slices.Contains(FailoverPoints(), p), "points", fmt.Sprintf("%q", p), "points that a step passes: %s", strings.Join(FailoverPoints(), ","))
	}
	bad.links(c.Links)
	bad.shape(c.Shape, c.Ranks, 2)
	return bad.err()
}

type failover struct {
	*population
	cfg      FailoverConfig
	rng      *rand.Rand
	progress *progress
	points   map[string][]string // by phase
	kills    []Kill
	missed   int
	slowest  Kill
}

// choose orders the points of each phase by chance.
func (f *failover) choose() {
	f.points = map[string][]string{}
	for phase, all := range map[string]map[string]int{phaseEP: epPoints, phaseWorld: worldPoints} {
		for _, p := range faultpoint.All() { // in a fixed order: the seed decides
			if all[p] > 0 && (len(f.cfg.Points) == 0 || slices.Contains(f.cfg.Points, p)) {
				f.points[phase] = append(f.points[phase], p)
			}
		}
	}
	for _, phase := range []string{phaseEP, phaseWorld} {
		ps := f.points[phase]
		f.rng.Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
	}
}

// plan is the i-th kill: every rank in turn, each in both phases in turn, with another point every time.
func (f *failover) plan(i int) Kill {
	k := Kill{Rank: i % f.cfg.Ranks}
	round := i / f.cfg.Ranks
	k.Phase = phaseEP
	if (round+i)%2 == 1 && len(f.points[phaseWorld]) > 0 || len(f.points[phaseEP]) == 0 {
		k.Phase = phaseWorld
	}
	ps, passes := f.points[k.Phase], epPoints
	if k.Phase == phaseWorld {
		passes = worldPoints
	}
	k.Point = ps[(round/2+k.Rank*3)%len(ps)]
	k.Nth = 1 + f.rng.IntN(passes[k.Point])
	if k.Point == faultpoint.BoundaryEnter {
		k.Phase = phaseBoundary
	}
	return k
}

func (f *failover) run() error {
	f.progress.say("failover: starting %d ranks", f.cfg.Ranks)
	if err := f.found(); err != nil {
		return err
	}
	for i := range f.cfg.Kills {
		k := f.plan(i)
		err := f.kill(k)
		switch {
		case errors.Is(err, errBroken):
			f.progress.line("failover: kill %d: VIOLATION: %s", i, f.res.Violations[len(f.res.Violations)-1])
			if err := f.restart(); err != nil {
				return err
			}
			if err := f.found(); err != nil {
				return err
			}
		case err != nil:
			return err
		}
		f.progress.say("failover: %d of %d kills, longest pause %s (rank %d in %s), %d violations",
			i+1, f.cfg.Kills, short(f.slowest.Pause), f.slowest.Rank, f.slowest.where(), len(f.res.Violations))
	}
	return nil
}

// kill makes one rank die, measures, and replaces it.
func (f *failover) kill(k Kill) error {
	time.Sleep(time.Duration(f.rng.Int64N(int64(20 * time.Millisecond))))
	v := f.live[k.Rank]
	f.doom(v, k.where())
	if err := v.tell("die %s %s %d", k.Phase, k.Point, k.Nth); err != nil {
		return err
	}
	err := f.until(patience, "the victim to die", func() bool { return v.gone || v.missed })
	switch {
	case errors.Is(err, errTimeout):
		f.res.violate("rank %d was to die in %s and neither did nor went on for %v", k.Rank, k.where(), patience)
		f.keep()
		return errBroken
	case err != nil:
		return err
	case !v.gone:
		v.mayBeGone = false
		f.missed++
		f.res.note("rank %d never came to %s", k.Rank, k.where())
		return nil
	}
	b, err := os.ReadFile(f.grave(k.Rank))
	if err != nil || len(b) != 8 || binary.LittleEndian.Uint64(b) == 0 {
		f.res.violate("rank %d was to die in %s and died otherwise: %s", k.Rank, k.where(), v.ended())
		return errBroken
	}
	view, last, err := f.outlive(v)
	if err != nil {
		return err
	}
	died := int64(binary.LittleEndian.Uint64(b))
	k.At, k.View, k.Pause = died, time.Duration(view-died), time.Duration(last-died)
	f.kills = append(f.kills, k)
	if k.Pause > f.slowest.Pause {
		f.slowest = k
	}
	_, err = f.replace(v)
	return err
}

func (f *failover) report() {
	r := f.res
	row := func(name string, in func(k Kill) bool) {
		t := newTimes()
		for _, k := range f.kills {
			if in(k) {
				t.add(int64(k.Pause))
			}
		}
		if t.h.TotalCount() > 0 {
			r.Rows = append(r.Rows, t.summary(name))
		}
	}
	row("all", func(Kill) bool { return true })
	view := newTimes()
	for _, k := range f.kills {
		view.add(int64(k.View))
	}
	r.Rows = append(r.Rows, view.summary("all, until the new view"))
	for rk := range f.cfg.Ranks {
		row(fmt.Sprintf("rank %d", rk), func(k Kill) bool { return k.Rank == rk })
	}
	for _, phase := range []string{phaseEP, phaseWorld, phaseBoundary} {
		row("in "+phase, func(k Kill) bool { return k.Phase == phase })
		for _, p := range FailoverPoints() {
			row(phase+" "+p, func(k Kill) bool { return k.Phase == phase && k.Point == p })
		}
	}
	r.Kills = f.kills
	if len(f.kills) > 0 {
		r.note("longest: rank %d in %s", f.slowest.Rank, f.slowest.where())
	}
	r.note("%d kills measured, %d points never reached, %d violations", len(f.kills), f.missed, len(r.Violations))
	if d := FailoverDefaults(); f.cfg.Ranks == d.Ranks && f.cfg.Resident == d.Resident && f.cfg.Shape == d.Shape && f.cfg.Links == d.Links {
		r.bar("longest pause", 50*time.Millisecond, f.slowest.Pause)
	} else {
		r.tell(fmt.Sprintf("longest pause with %s resident", sizeText(f.cfg.Resident)), f.slowest.Pause)
	}
}

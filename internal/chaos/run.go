package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

// Config is what to run.
type Config struct {
	Ranks    int
	Hosts    int // network namespaces; 1: all on this host
	Faults   int
	Seed     uint64
	Links    string   // shm, tcp, mixed
	Kinds    []string // of faults; none: all
	Points   []string // at which to kill; none: all
	Resident int64    // memory that each rank has touched
	Deadline time.Duration
	Frames   bool   // in every other world: frames are delayed, and links are full
	PerWorld int    // faults before another program is begun
	Command  string // for the record
}

// Defaults are those of serry chaos.
func Defaults() Config {
	return Config{Ranks: 4, Hosts: 1, Faults: 1000, Seed: 1, Links: "shm", Deadline: 2 * time.Second, PerWorld: 25, Frames: true}
}

// Options are where to run it.
type Options struct {
	// Self is the command line that ends in Rank: a process that is started with it and one more argument is a rank.
	Self []string
	// Tagged says that Self was built with fault points.
	Tagged bool
	// Progress is where to say how far it is; nil is nowhere.
	Progress io.Writer
	// Keep is the directory for the histories of worlds in which something was not kept.
	Keep string
}

// runner is one run.
type runner struct {
	ctx      context.Context
	o        Options
	cfg      Config
	res      *Result
	rng      *rand.Rand
	progress *progress
	net      *harness.Network

	w      *World
	worlds int
	failed error          // of the world
	turn   int            // of the points
	never  map[target]int // how often no rank came there
	missed int            // points that the victim did not come to
	touch  int64          // bytes that a victim takes before it dies
	after  func(run *history.Run)
	edit   func(a *RankArgs)       // of every rank
	env    func(rank int) []string // more environment for a rank
}

// frameFaults delays frames of each kind now and then, and says that a link is full.
const frameFaults = "(full (kind data p2p) (chance 0.02)) (delay 2ms (every 53)) (delay 1ms recv (every 71))"

// errBroken: the world cannot be used any more; a violation says why.
var errBroken = errors.New("chaos: the world is broken")

// Run does faults to worlds, and checks all that their ranks saw.
func Run(ctx context.Context, o Options, cfg Config) (*Result, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	r, err := newRunner(ctx, o, cfg, "chaos")
	if err != nil {
		return nil, err
	}
	defer r.close()
	kinds := r.kinds()
	if len(kinds) == 0 {
		return nil, fmt.Errorf("chaos: none of these faults can be done here: %s", strings.Join(cfg.Kinds, ","))
	}
	for idle := 0; r.res.Faults < cfg.Faults; {
		before := r.res.Faults
		err := r.world()
		for i := 0; err == nil && i < cfg.PerWorld && r.res.Faults < cfg.Faults; i++ {
			err = r.one(kinds[r.pick(kinds)])
			r.progress.say("chaos: %d of %d faults, %d violations, world %d", r.res.Faults, cfg.Faults, r.res.Violations, r.worlds)
		}
		if err != nil && !errors.Is(err, errBroken) {
			return nil, err
		}
		if err := r.endWorld(); err != nil {
			return nil, err
		}
		if r.res.Faults > before {
			idle = 0
		} else if idle++; idle == 5 {
			return r.res, fmt.Errorf("chaos: in %d worlds no fault could be done; the last: %w", idle, cmp.Or(r.failed, errors.New("no rank came to its point")))
		}
	}
	r.sayNever()
	r.res.end()
	return r.res, nil
}

// sayNever lists the points to which no rank came.
func (r *runner) sayNever() {
	var ts []string
	for t, n := range r.never {
		if n >= misses {
			ts = append(ts, t.String())
		}
	}
	if slices.Sort(ts); len(ts) > 0 {
		r.res.note("no rank comes to: %s", strings.Join(ts, ", "))
	}
}

func newRunner(ctx context.Context, o Options, cfg Config, name string) (*runner, error) {
	r := &runner{ctx: ctx, o: o, cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 7)), never: map[target]int{}, progress: newProgress(o.Progress)}
	r.res = newResult(name, &cfg)
	if cfg.Hosts > 1 {
		var err error
		if r.net, err = harness.NewNetwork(cfg.Hosts); err != nil {
			r.res.note("runs on one host: %v", err)
			r.progress.line("chaos: %v: running on loopback", err)
			r.cfg.Hosts, r.res.Hosts = 1, 1
		}
	}
	if !o.Tagged {
		r.res.note("%v", ErrNoFaultpoints)
		r.progress.line("%v", ErrNoFaultpoints)
	}
	return r, nil
}

func (r *runner) close() {
	r.progress.clear()
	if r.w != nil {
		r.w.Close()
	}
	if r.net != nil {
		r.net.Close()
	}
}

// hostOf is where a rank is: neighbours together.
func (r *runner) hostOf(rank int) int { return rank * r.cfg.Hosts / r.cfg.Ranks }

// world begins a world, whose program and mode follow from the seed and the worlds before.
func (r *runner) world() error {
	r.worlds++
	r.failed = nil
	args := RankArgs{Ranks: r.cfg.Ranks, Mode: pg.Mode(r.worlds % 2), Seed: r.cfg.Seed<<16 + uint64(r.worlds), Late: r.cfg.Deadline,
		Pause: time.Millisecond, Resident: r.cfg.Resident, Life: 10 * time.Minute}
	if r.cfg.Frames && r.worlds%2 == 0 {
		args.LinkFaults = frameFaults
	}
	if r.edit != nil {
		r.edit(&args)
	}
	if args.FromEnv {
		var err error
		if r.env, err = r.torchEnv(); err != nil {
			return err
		}
	}
	var err error
	r.w, err = NewWorld(args, r.launch)
	if err != nil {
		return err
	}
	r.w.Host = r.hostOf
	r.w.Edit = func(a *RankArgs) {
		a.Links = r.links(a.Rank)
		if r.cfg.Hosts > 1 {
			a.Listen = r.net.Hosts[r.hostOf(a.Rank)].IP
		}
	}
	if err := r.w.StartAll(); err != nil {
		return err
	}
	return r.all(nil, func(m *Member) error { return r.begun(m, 30*time.Second) })
}

func (r *runner) links(rank int) string {
	if r.cfg.Links == "tcp" || r.cfg.Links == "mixed" && (rank+r.worlds)%2 == 0 {
		return "tcp"
	}
	return "auto"
}

// launch starts a rank.
func (r *runner) launch(rank int, args string) (*harness.Proc, error) {
	var host *harness.Host
	if r.net != nil {
		host = r.net.Hosts[r.hostOf(rank)]
	}
	var env []string
	if r.env != nil {
		env = r.env(rank)
	}
	return r.launchOn(host, fmt.Sprintf("rank %d", rank), args, env...)
}

// launchOn starts a process (nil: on our host) that ends when we do: it reads our end of its standard input.
func (r *runner) launchOn(host *harness.Host, name, args string, env ...string) (*harness.Proc, error) {
	cmd := exec.Command(r.o.Self[0], append(r.o.Self[1:len(r.o.Self):len(r.o.Self)], args)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to handle
	if len(env) > 0 {
		cmd.Env = append(os.Environ(), env...)
	}
	var opts []harness.Option
	if host != nil {
		opts = append(opts, host.In())
	}
	return harness.Spawn(name, cmd, opts...)
}

// all calls f for each rank that lives but for some.
func (r *runner) all(but []int, f func(m *Member) error) error {
	for rank, m := range r.w.Live {
		if m == nil || slices.Contains(but, rank) {
			continue
		}
		if err := f(m); err != nil {
			return err
		}
	}
	return nil
}

// broken notes what has gone wrong, and that the world cannot be used any more.
func (r *runner) broken(property, format string, a ...any) error {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	text := fmt.Sprintf(format, a...)
	r.progress.line("chaos: world %d: VIOLATION: %s", r.worlds, text)
	r.failed = &problem{property, text}
	return errBroken
}

type problem struct{ property, text string }

func (p *problem) Error() string { return p.text }

func (r *runner) begun(m *Member, d time.Duration) error {
	if err := r.find(m, 0, d, func(line string) bool { return strings.HasPrefix(line, "begins ") }); err != nil {
		return r.broken("P8", "%s was not let in: %v", m.Name, err)
	}
	return nil
}

// find waits for a line in small parts, so that the end of ctx ends it.
func (r *runner) find(m *Member, from int, d time.Duration, is func(string) bool) error {
	for until := time.Now().Add(d); ; {
		at, err := m.Find(from, min(time.Until(until), 100*time.Millisecond), is)
		if err == nil || m.Ended() || time.Now().After(until) {
			return err
		}
		if r.ctx.Err() != nil {
			return r.ctx.Err()
		}
		from = at
	}
}

// wait waits for the end of a process.
func (r *runner) wait(m *Member, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-m.Done():
		return true
	case <-r.ctx.Done():
	case <-t.C:
	}
	return false
}

// endWorld ends the program, checks it and closes the world.
func (r *runner) endWorld() error {
	w := r.w
	defer func() {
		w.Close()
		r.w = nil
	}()
	if err := r.ctx.Err(); err != nil {
		return err
	}
	found := Found{World: r.worlds, Seed: w.Args.Seed}
	var dead []int
	for rank, m := range w.Live {
		if m.killed != 0 || m.Ended() {
			dead = append(dead, rank)
		}
	}
	if r.failed != nil { // who lives may never end
		for _, m := range w.Live {
			if !m.Ended() {
				m.doomed = true
				m.Signal(syscall.SIGCONT)
				m.Signal(syscall.SIGQUIT) // its goroutines are kept
			}
		}
		for _, m := range w.Live {
			r.wait(m, 3*time.Second)
		}
	}
	var rep *Report
	var err error
	if r.failed == nil {
		rep, err = w.Finish(dead...)
	} else {
		rep, err = w.Check()
	}
	if err != nil {
		return err
	}
	if len(rep.Problems) > 0 || r.failed != nil {
		if r.o.Keep != "" {
			found.Kept = filepath.Join(r.o.Keep, fmt.Sprintf("%s-seed%d-world%d", r.res.Name, r.cfg.Seed, r.worlds))
			if err := w.Keep(found.Kept); err != nil {
				return err
			}
		}
		for _, p := range rep.Problems {
			r.progress.line("chaos: world %d: VIOLATION: %s", r.worlds, p)
		}
	}
	if r.failed != nil {
		f := found
		f.Property, f.Text = r.failed.(*problem).property, r.failed.Error()
		r.res.violate(f)
	}
	r.res.take(rep, found)
	for _, m := range w.Ever {
		for _, line := range m.Lines() {
			var n int
			if _, err := fmt.Sscanf(line, "hurt %d", &n); err == nil {
				r.res.Frames += n
			}
		}
	}
	r.measure(rep.Run)
	if r.after != nil {
		r.after(rep.Run)
	}
	return nil
}

// measure finds out how long the survivors of each kill needed to go on: from kill(2) to the last survivor's next
// operation of a later epoch.
func (r *runner) measure(run *history.Run) {
	for p, m := range r.w.Ever {
		if m.counted == nil || run.Procs[p].Killed == 0 {
			continue
		}
		if d := resumed(run, p); d > 0 {
			r.res.resume = append(r.res.resume, d)
			m.counted.resume = append(m.counted.resume, d)
		}
	}
}

// resumed is how long that was after the death of a process; 0: it is not known.
func resumed(run *history.Run, dead int) int64 {
	return resumedAfter(run, dead, run.Procs[dead].Killed)
}

// resumedAfter is how long after a time the last of the others needed to complete an operation of an epoch without a
// process, 0 if there was none.
func resumedAfter(run *history.Run, gone int, at int64) int64 {
	_, epoch, _ := lostAt(run, run.Procs[gone].Slot, at)
	if epoch == 0 {
		return 0
	}
	last := int64(0)
	for p := range run.Procs {
		y := &run.Procs[p]
		if p == gone || len(y.Events) == 0 || y.Events[0].Time > at || y.Killed != 0 && y.Killed <= at {
			continue
		}
		for i := range y.Events {
			if e := &y.Events[i]; e.Kind == history.Return && e.Outcome == history.OK && e.Epoch >= epoch && e.Time > at && e.Seq > 0 {
				last = max(last, e.Time-at)
				break
			}
		}
	}
	return last
}

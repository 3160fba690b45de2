package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"

	"go.uber.org/goleak"
)

// RankArgs is what a rank is started with. It travels as JSON.
type RankArgs struct {
	Rank, Ranks int
	Dir         string  // where the ranks meet, and the file that ends the program
	Links       string  // auto or tcp
	Listen      string  `json:",omitempty"`
	Mode        pg.Mode // of all groups but those for dispatch and combine
	Seed        uint64  // of the program
	Rejoin      bool    `json:",omitempty"`
	Sync        bool    `json:",omitempty"` // of the program
	FromEnv     bool    `json:",omitempty"` // how to join is in the environment
	History     string  // the file to write
	Grave       string  // the file for when it kills or stops itself

	Point      string        `json:",omitempty"` // where it dies, the Nth time
	Nth        int           `json:",omitempty"`
	Stop       bool          `json:",omitempty"` // it stops there, and dies not
	DieAt      int           `json:",omitempty"` // step at which it dies; 0: none
	Late       time.Duration `json:",omitempty"` // deadline of operations (0: UsualLate)
	Pause      time.Duration `json:",omitempty"` // between steps
	Limit      time.Duration `json:",omitempty"` // heartbeats
	Beat       time.Duration `json:",omitempty"` // how often (0: a tenth of Limit)
	LinkFaults string        `json:",omitempty"` // a script of device/faulty for each link
	Tap        bool          `json:",omitempty"` // links can be watched, and die on order
	Wait       time.Duration `json:",omitempty"` // instead of the program: wait, see collect

	Resident int64         `json:",omitempty"` // memory that it touches
	Life     time.Duration `json:",omitempty"` // after which it gives up (0: a minute)
	Debug    bool          `json:",omitempty"`
	Busy     bool          `json:",omitempty"` // use a processor, and nothing else
}

// ours are the goroutines of a rank that last as long as it.
var ours = []goleak.Option{
	goleak.IgnoreAnyFunction("github.com/serry-project/serry/internal/chaos.(*rank).listen"),
	goleak.IgnoreAnyFunction("github.com/serry-project/serry/internal/chaos.(*rank).watch"),
	goleak.IgnoreAnyFunction("os/signal.loop"),
}

// lateWriters is how long a rank that is out waits for whoever may still write into its buffers.
const lateWriters = 20 * time.Millisecond

// UsualLate is a deadline that nobody misses.
const UsualLate = 20 * time.Second

// rank is a process that runs the program.
type rank struct {
	RankArgs
	prog     Program
	ctx      context.Context
	out      io.Writer
	rec      *recorder
	grave    *grave
	w        *pg.World
	groups   map[string]*pg.Group
	ep       *layer
	works    map[*op]*started
	faults   links
	orders   chan string // lines from who started it, to be obeyed between two steps
	armed    string      // the order that waits for its point
	until    int         // the step in which it has waited long enough
	seen     uint64      // epoch of the last operation of the world
	canaries canaries
	aim      aim
	leaves   bool // between two steps
}

type started struct {
	work   *pg.Work
	call   *collectives.Call
	guards guarded
	pair   *pg.Pair
	got    [2][][]byte
}

// Rank is one rank: what a process runs that World.Start has started. It ends when in does. Lines on out:
//
//	joined N            it is a member, by Boundary N (0: a founder)
//	begins STEP
//	step STEP           every tenth
//	hits JSON           after CalmSteps, in a build with fault points: how often it has come to each
//	epoch E SLOTS       the first operation of the world in an epoch
//	lost=SLOT           a view without it
//	did ORDER           an order has been carried out; "missed": its point was not passed in many steps
//	hurt N              so many frames were hurt by LinkFaults
//	violation WHY       something that the rank sees for itself
//	over WHY            the program is over for this rank
//	left
func Rank(ctx context.Context, args string, in io.Reader, out io.Writer) (err error) {
	r := &rank{out: out, groups: map[string]*pg.Group{}, works: map[*op]*started{}, orders: make(chan string, 16)}
	if err := json.Unmarshal([]byte(args), &r.RankArgs); err != nil {
		return fmt.Errorf("chaos: a rank is started by serry chaos, not by hand: %w", err)
	}
	if in != nil {
		go r.listen(in)
	}
	for x := uint64(1); r.Busy; {
		x = mix(x)
	}
	if r.Late == 0 {
		r.Late = UsualLate
	}
	if r.Life == 0 {
		r.Life = time.Minute
	}
	var cancel context.CancelFunc
	r.ctx, cancel = context.WithTimeout(ctx, r.Life)
	defer cancel()
	r.prog = Program{Seed: r.Seed, Ranks: r.Ranks, Sync: r.Sync}
	if r.rec, err = newRecorder(r.History); err != nil {
		return err
	}
	if r.grave, err = dig(r.Grave); err != nil {
		return err
	}
	if err := harness.Touch(r.Resident); err != nil {
		return err
	}
	if r.Point != "" {
		if !faultpoint.Enabled {
			return ErrNoFaultpoints
		}
		faultpoint.Arm(r.Point, r.Nth, r.fate(r.Stop))
	}
	step, err := r.join()
	switch {
	case err != nil:
	case r.Wait > 0:
		err = r.collect()
	default:
		err = r.run(step, r.w.Joined().Replacement)
	}
	if err != nil {
		if r.w == nil {
			return err
		}
		r.rec.put(&history.Event{Kind: history.Ended, Outcome: ending(err), Why: err.Error()})
		time.Sleep(lateWriters)
		r.checkCanaries()
		r.say("over %s", strings.ReplaceAll(err.Error(), "\n", " "))
		return r.rec.err
	}
	lctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
	defer cancel()
	if err := r.w.Leave(lctx); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	r.rec.put(&history.Event{Kind: history.Ended, Outcome: history.Left})
	r.checkCanaries()
	if r.LinkFaults != "" {
		r.say("hurt %d", r.faults.fired())
	}
	if err := goleak.Find(ours...); err != nil {
		r.say("violation after Leave: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	r.say("left")
	return r.rec.err
}

func (r *rank) say(format string, a ...any) { fmt.Fprintf(r.out, format+"\n", a...) }

// listen takes orders, and ends the process when who started it is gone.
func (r *rank) listen(in io.Reader) {
	sc := bufio.NewScanner(in)
	for sc.Scan() {
		var n int64
		if _, err := fmt.Sscanf(sc.Text(), "touch %d", &n); err != nil {
			r.orders <- sc.Text()
		} else if err := harness.Touch(n); err != nil {
			r.say("cannot %s: %v", sc.Text(), err)
		} else {
			r.say("did %s", sc.Text())
		}
	}
	os.Exit(3)
}

// fate is what happens at a fault point.
func (r *rank) fate(stop bool) func() {
	return func() {
		if stop {
			r.grave.note(8)
			stopHere()
			return
		}
		r.die()
	}
}

func (r *rank) die() {
	r.grave.note(0)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func (r *rank) options() pg.Options {
	return pg.Options{Mode: r.Mode, SlotBytes: slotSize, Timeout: r.Late}
}

// join makes the process a member, with its groups, and returns the step to begin with.
func (r *rank) join() (step int, err error) {
	var st rendezvous.Store
	if !r.FromEnv {
		if st, err = rendezvous.Open(r.ctx, "file://"+r.Dir); err != nil {
			return 0, err
		}
	}
	cfg := pg.Config{Rank: r.Rank, Size: r.Ranks, Store: st, Links: r.Links, Listen: r.Listen, Rejoin: r.Rejoin}
	if r.FromEnv {
		if cfg, err = pg.FromEnv(r.ctx); err != nil {
			return 0, err
		}
	}
	cfg.Capacity, cfg.Options, cfg.ArenaBytes, cfg.HeartbeatLimit, cfg.HeartbeatEvery, cfg.Log = r.prog.capacity(), r.options(), 16<<20, r.Limit, r.Beat, r.logger()
	r.faults = links{die: r.die}
	if cfg.Wrap, err = r.faults.wrap(&r.RankArgs); err != nil {
		return 0, err
	}
	r.w, err = pg.Join(r.ctx, cfg)
	if err != nil {
		return 0, err
	}
	j := r.w.Joined()
	e := &history.Event{Kind: history.Joined, Inc: r.w.Incarnation(), Epoch: max(j.Epoch, 1), N: uint32(j.Boundary)}
	r.rec.put(e)
	if !j.Replacement {
		first := &history.Event{Kind: history.View, Epoch: 1, Size: uint32(r.Ranks)}
		for s := range r.Ranks {
			first.Set.Add(s)
		}
		r.rec.put(first)
	}
	go r.watch()
	r.say("joined %d", j.Boundary)
	r.adopt("W", r.w.Group)
	if !j.Replacement {
		return 0, r.makeGroups()
	}
	step, err = r.takeOver(j.Attach)
	if err == nil {
		err = r.openEP(true)
	}
	return step, err
}

func (r *rank) logger() *slog.Logger {
	level := slog.LevelWarn
	if r.Debug {
		level = slog.LevelDebug
	} else if name, _ := knob.Log.Get(); name == "off" {
		return slog.New(slog.DiscardHandler)
	} else {
		_ = level.UnmarshalText([]byte(strings.ToUpper(name)))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", r.Rank)
}

// watch writes down the views.
func (r *rank) watch() {
	for e := range r.w.Events() {
		if e.Over {
			continue
		}
		at := harness.MonoOf(e.At)
		r.rec.put(&history.Event{Time: at, Kind: history.View, Epoch: e.Epoch, Set: e.Active})
		if len(e.Lost) > 0 {
			l := &history.Event{Time: at, Kind: history.Lost, Epoch: e.Epoch, Why: e.Why}
			for _, s := range e.Lost {
				l.Set.Add(s)
			}
			r.rec.put(l)
		}
		for _, s := range e.Lost {
			r.say("lost=%d", s)
		}
	}
}

// adopt takes a group in.
func (r *rank) adopt(name string, g *pg.Group) {
	r.groups[name] = g
	e := &history.Event{Kind: history.Made, Group: g.ID()}
	for _, s := range r.prog.members(name) {
		e.Set.Add(s)
	}
	r.rec.put(e)
}

// makeGroups makes the groups that live as long as the program. A loss meanwhile is met by another try, alike on all.
func (r *rank) makeGroups() error {
	for _, name := range groupNames[1:] {
		o := r.options()
		switch name {
		case "P":
			o.Pairs, o.Mode = true, pg.Raise
		case "E":
			o.Pairs, o.Mode, o.SlotBytes = true, pg.Raise, epSlot
		}
		for {
			g, err := r.w.Sub(r.ctx, r.prog.members(name), o)
			var lost *pg.RankLost
			if errors.As(err, &lost) {
				continue
			}
			if err != nil {
				return fmt.Errorf("group %s: %w", name, err)
			}
			if g != nil {
				r.adopt(name, g)
			}
			break
		}
	}
	return r.openEP(false)
}

// run runs steps until all agree to stop.
func (r *rank) run(step int, fresh bool) error {
	r.say("begins %d", step)
	for ; ; step++ {
		if !fresh {
			if err := r.boundary(step); err != nil {
				return err
			}
		}
		fresh = false
		if step == r.DieAt && step > 0 {
			r.die()
		}
		if step == CalmSteps && faultpoint.Enabled {
			hits := map[string]int{}
			for _, p := range faultpoint.All() {
				hits[p] = faultpoint.Hits(p)
			}
			b, _ := json.Marshal(hits)
			r.say("hits %s", b)
		}
		if step%10 == 0 {
			r.checkCanaries()
			r.say("step %d", step)
		}
		r.obey(step)
		if r.leaves {
			return nil
		}
		for _, m := range r.prog.step(step) {
			if err := r.move(m); err != nil {
				return err
			}
		}
		if stop, err := r.agreeToStop(step); stop || err != nil {
			return err
		}
		if r.Pause > 0 {
			time.Sleep(r.Pause)
		}
	}
}

func (r *rank) boundary(step int) error {
	e := history.Event{Group: r.w.ID(), Op: history.Boundary, Call: boundaryCall(step)}
	r.issue(e)
	p, err := r.w.Boundary(r.ctx, func() []byte { return r.attach(step) })
	e.Kind, e.N = history.Return, uint32(p.Count)
	if outcome(err, false, &e); err == nil {
		for _, s := range p.Joined {
			e.Set.Add(s)
		}
	}
	r.rec.put(&e)
	return err
}

// agreeToStop says that somebody has seen the file that ends the program, alike on all.
func (r *rank) agreeToStop(step int) (bool, error) {
	x := []int64{0}
	if _, err := os.Stat(filepath.Join(r.Dir, "stop")); err == nil {
		x[0] = 1
	}
	o := &op{Program: &r.prog, Step: step, At: stopAt, Group: "W", Kind: "stop"}
	r.issue(r.event(o))
	res, err := r.w.AllReduce(r.ctx, pg.I64(x), pg.I64(x), dtype.Max)
	if err == nil && res.Epoch != r.seen {
		r.seen = res.Epoch
		r.say("epoch %d %v", res.Epoch, res.Active.Slots())
	}
	return err == nil && x[0] == 1, r.note(o, res, err, []byte{byte(x[0])})
}

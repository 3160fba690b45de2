package proof

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

// rankArgs is what a rank is started with.
type rankArgs struct {
	Rank   int
	Dir    string // of the rendezvous, and of the file that ends the program
	Links  string
	Listen string
	Mode   pg.Mode
	Seed   uint64
	Rejoin bool

	Point string // where it dies, the Nth time
	Nth   int
	Stop  bool          // it stops there, and dies not
	Late  time.Duration // deadline of operations (0: usualLate)
	DieAt int           // step at which it dies; 0: none
	Pause time.Duration // between steps
	Limit time.Duration // heartbeats
	Debug bool
}

const usualLate = 20 * time.Second

// record is the outcome of an operation as a rank saw it.
type record struct {
	Step   int    `json:"s"`
	At     int    `json:"i"`
	Group  string `json:"g"`
	Kind   string `json:"k"`
	Result string `json:"r"` // ok, lost, source, failed, late (p2p), over
	Seq    uint64 `json:"q,omitempty"`
	Epoch  uint64 `json:"e,omitempty"`
	Active []int  `json:"a,omitempty"` // slots, or of lost: the slots that were
	Sum    uint64 `json:"c,omitempty"`
	Got    int    `json:"n,omitempty"` // of p2p: messages sent or received
	Why    string `json:"w,omitempty"`
}

// runner is a rank that runs the program.
type runner struct {
	rankArgs
	ctx     context.Context
	w       *pg.World
	groups  map[string]*pg.Group
	records []record
	works   map[*op]*started
}

type started struct {
	work *pg.Work
	call *collectives.Call
	pair *pg.Pair
	got  [2][][]byte
}

func rankProgram(args []string, out io.Writer) error {
	var a rankArgs
	if err := json.Unmarshal([]byte(args[0]), &a); err != nil {
		return err
	}
	if a.Point != "" && faultpoint.Enabled {
		var action func()
		if a.Stop {
			action = func() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) }
		}
		faultpoint.Arm(a.Point, a.Nth, action)
	}
	if a.Late == 0 {
		a.Late = usualLate
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	st, err := rendezvous.Open(ctx, "file://"+a.Dir)
	if err != nil {
		return err
	}
	level := slog.LevelWarn
	if a.Debug {
		level = slog.LevelDebug
	}
	r := &runner{rankArgs: a, ctx: ctx, groups: map[string]*pg.Group{}, works: map[*op]*started{}}
	opts := pg.Options{Mode: a.Mode, SlotBytes: slotSize, Timeout: a.Late}
	r.w, err = pg.Join(ctx, pg.Config{
		Rank: a.Rank, Size: founders, Capacity: slots, Store: st, Links: a.Links, Listen: a.Listen, Rejoin: a.Rejoin,
		Options: opts, ArenaBytes: 8 << 20, HeartbeatLimit: a.Limit,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", a.Rank),
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "joined", r.w.Joined().Boundary)
	r.groups["W"] = r.w.Group
	step := 0
	if r.w.Joined().Replacement {
		step = int(binary.LittleEndian.Uint32(r.w.Joined().Attach))
		if err := r.adopt(r.w.Joined().Attach[4:]); err != nil {
			return err
		}
	} else if err := r.makeGroups(opts); err != nil {
		fmt.Fprintln(out, "over", err)
		return nil
	}
	fmt.Fprintln(out, "begins", step)
	go func() {
		for e := range r.w.Events() {
			for _, s := range e.Lost {
				fmt.Fprintf(out, "lost=%d\n", s)
			}
		}
	}()
	err = r.run(step, r.w.Joined().Replacement, out)
	for i := range r.records {
		b, _ := json.Marshal(r.records[i])
		fmt.Fprintf(out, "record %s\n", b)
	}
	if err != nil {
		fmt.Fprintln(out, "over", err)
		return nil
	}
	lctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := r.w.Leave(lctx); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	fmt.Fprintln(out, "left")
	return nil
}

// makeGroups makes the groups that live as long as the program. A loss meanwhile is met by another try, alike on all.
func (r *runner) makeGroups(opts pg.Options) error {
	for _, name := range []string{"A", "B", "C", "P"} {
		o := opts
		if name == "P" {
			o.Pairs, o.Mode = true, pg.Raise
		}
		for {
			g, err := r.w.Sub(r.ctx, groupOf[name], o)
			var lost *pg.RankLost
			if errors.As(err, &lost) {
				continue
			}
			if err != nil {
				return fmt.Errorf("group %s: %w", name, err)
			}
			if g != nil {
				r.groups[name] = g
			}
			break
		}
	}
	return nil
}

// attach is what a newcomer gets: the step, and the ids of the groups by name.
func (r *runner) attach(step int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(step))
	ids := map[string]uint64{}
	for name, g := range r.groups {
		ids[name] = g.ID()
	}
	j, _ := json.Marshal(ids)
	return append(b, j...)
}

// adopt finds the groups of a newcomer. One whose last other member died while it came in is no more.
func (r *runner) adopt(b []byte) error {
	ids := map[string]uint64{}
	if err := json.Unmarshal(b, &ids); err != nil {
		return err
	}
	names := []string{"W", "A", "B", "C", "P"}
	for _, name := range names {
		if !slices.Contains(groupOf[name], r.w.Rank()) {
			continue
		}
		for _, g := range r.w.Groups() {
			if slices.Equal(g.Slots(), groupOf[name]) && (name == "P") == g.Options().Pairs || name == "W" && g.ID() == r.w.ID() {
				r.groups[name] = g
			}
		}
		if g := r.groups[name]; ids[name] != 0 && (g == nil || g.ID() != ids[name]) {
			return fmt.Errorf("the newcomer has no group %s (attached: %s)", name, b)
		}
	}
	return nil
}

// run runs steps until all agree to stop.
func (r *runner) run(step int, fresh bool, out io.Writer) error {
	for ; ; step++ {
		if !fresh {
			if _, err := r.w.Boundary(r.ctx, func() []byte { return r.attach(step) }); err != nil {
				return err
			}
		}
		fresh = false
		if step == r.DieAt && step > 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		if step == calmSteps && faultpoint.Enabled {
			hits := map[string]int{}
			for _, p := range faultpoint.All() {
				hits[p] = faultpoint.Hits(p)
			}
			b, _ := json.Marshal(hits)
			fmt.Fprintf(out, "hits %s\n", b)
		}
		if step%10 == 0 {
			fmt.Fprintln(out, "step", step)
		}
		for _, m := range planStep(r.Seed, step) {
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

// agreeToStop says that somebody has seen the file that ends the program, alike on all.
func (r *runner) agreeToStop(step int) (bool, error) {
	x := []int64{0}
	if _, err := os.Stat(filepath.Join(r.Dir, "stop")); err == nil {
		x[0] = 1
	}
	o := &op{Step: step, At: 99, Group: "W", Kind: "stop"}
	res, err := r.w.AllReduce(r.ctx, pg.I64(x), pg.I64(x), dtype.Max)
	return err == nil && x[0] == 1, r.note(o, res, err, nil)
}

// note records an outcome. It returns an error if the program is over for this rank.
func (r *runner) note(o *op, res pg.Result, err error, data []byte) error {
	rec := record{Step: o.Step, At: o.At, Group: o.Group, Kind: o.Kind}
	var lost *pg.RankLost
	var source *collectives.ErrSourceLost
	switch {
	case err == nil:
		rec.Result, rec.Seq, rec.Epoch, rec.Active, rec.Sum = "ok", res.Seq, res.Epoch, res.Active.Slots(), sum(data)
	case errors.As(err, &lost):
		rec.Result, rec.Epoch, rec.Active, rec.Why = "lost", lost.Epoch, lost.Slots, lost.Why
	case errors.As(err, &source):
		rec.Result = "source"
	case errors.Is(err, pg.ErrFailed):
		rec.Result, rec.Why = "failed", err.Error()
	case o.local() && errors.Is(err, context.DeadlineExceeded):
		rec.Result, rec.Why = "late", err.Error()
	default:
		rec.Result, rec.Why = "over", err.Error()
		r.records = append(r.records, rec)
		return fmt.Errorf("%v: %w", o, err)
	}
	r.records = append(r.records, rec)
	return nil
}

func (r *runner) move(m move) error {
	o := m.op
	if o.Kind == "sub" {
		g, err := r.w.Sub(r.ctx, groupOf["D"], pg.Options{Mode: r.Mode, SlotBytes: slotSize, Timeout: r.Late})
		if err == nil && g != nil {
			r.groups["D"] = g
		}
		if !slices.Contains(groupOf["D"], r.w.Rank()) {
			o = &op{Step: o.Step, At: o.At, Group: "W", Kind: "sub"}
		}
		return r.note(o, pg.Result{}, err, nil)
	}
	g := r.groups[o.Group]
	if g == nil {
		return nil // not a member, or it could not be made, alike on all
	}
	rank := slices.Index(groupOf[o.Group], r.w.Rank())
	if o.Kind == "close" {
		delete(r.groups, "D")
		return r.note(o, pg.Result{}, g.Close(r.ctx), nil)
	}
	switch m.do {
	case "call":
		c := o.call(rank, len(groupOf[o.Group]))
		res, err := g.Do(r.ctx, c)
		return r.note(o, res, err, c.Out)
	case "start":
		c := o.call(rank, len(groupOf[o.Group]))
		w, err := g.Start(c)
		if err != nil {
			return r.note(o, pg.Result{}, err, nil)
		}
		r.works[o] = &started{work: w, call: c}
		return nil
	case "wait":
		s := r.works[o]
		delete(r.works, o)
		res, err := s.work.Wait(r.ctx)
		return r.note(o, res, err, s.call.Out)
	}
	if m.do == "p2p" {
		return r.p2pMove(o, g, rank)
	}
	return r.pairMove(m, g, rank)
}

// p2pMove sends or receives the messages of o, until one of them fails.
func (r *runner) p2pMove(o *op, g *pg.Group, rank int) (err error) {
	tag := o.tag(r.Late != usualLate)
	one := *o
	var all []byte
	n := 0
	switch rank {
	case o.Root:
		one.Kind = "send"
		for ; n < o.Messages && err == nil; n++ {
			err = g.Send(r.ctx, pg.U8(o.message(n)), o.To, tag)
		}
	case o.To:
		one.Kind = "recv"
		for ; n < o.Messages && err == nil; n++ {
			b := dirty(o.N)
			if err = g.Recv(r.ctx, pg.U8(b), o.Root, tag); err == nil {
				all = append(all, b...)
			}
		}
	default:
		return nil
	}
	if err != nil {
		n--
	}
	err = r.note(&one, pg.Result{}, err, nil)
	last := &r.records[len(r.records)-1]
	last.Got, last.Sum = n, sum(all)
	return err
}

func (r *runner) pairMove(m move, g *pg.Group, rank int) error {
	o := m.op
	exchange := func(s *started, half int) *pg.Exchange {
		s.got[half] = make([][]byte, founders)
		x := &pg.Exchange{Sizes: make([]int, founders), Digest: uint64(o.Step)}
		for to := range x.Sizes {
			x.Sizes[to] = o.pairCount(rank, to, half == 1)
		}
		x.Fill = func(to int, dst []byte) { copy(dst, o.pairInput(rank, to, half == 1)) }
		x.Take = func(parts [][]byte) error {
			for from, b := range parts {
				s.got[half][from] = bytes.Clone(b)
			}
			return nil
		}
		return x
	}
	end := func(res pg.Result, err error) error {
		s := r.works[o]
		delete(r.works, o)
		var all []byte
		if err == nil {
			all = slices.Concat(slices.Concat(s.got[0]...), slices.Concat(s.got[1]...))
		}
		return r.note(o, res, err, all)
	}
	s := r.works[o]
	if m.do == "dispatch" {
		s = &started{}
		r.works[o] = s
		p, err := g.StartPair(r.ctx, exchange(s, 0))
		if err != nil {
			return end(pg.Result{}, err)
		}
		s.pair = p
		return nil
	}
	if s == nil {
		return nil // it has failed before
	}
	switch m.do {
	case "dispatched":
		if err := s.pair.Dispatched(r.ctx); err != nil {
			return end(pg.Result{}, err)
		}
	case "combine":
		if err := s.pair.StartCombine(r.ctx, exchange(s, 1)); err != nil {
			return end(pg.Result{}, err)
		}
	case "combined":
		res, err := s.pair.Combined(r.ctx)
		return end(res, err)
	}
	return nil
}

package bench

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/serry-project/serry/ep"
	"github.com/serry-project/serry/internal/dtype"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/pg"

	"golang.org/x/sys/unix"
)

// The places of a step in which a rank can be told to die.
const (
	phaseEP       = "ep"       // in dispatch or combine
	phaseWorld    = "world"    // in the all_reduce or all_gather after it
	phaseBoundary = "boundary" // before both
)

// order is what the crew tells a rank: "die PHASE POINT NTH".
type order struct {
	phase, point string
	nth          int
	tries        int
}

// stepper is a rank that runs steps until it is killed.
type stepper struct {
	*rank
	w     *pg.World
	l     *layer
	step  int
	last  uint64 // epoch of the last step
	grave []byte // where the time of death goes; a file that outlives us
	dies  atomic.Pointer[order]
	wrong int
	at    atomic.Int64 // step
	where atomic.Pointer[string]

	mine, sum []int64
	each, in1 []int64
}

// steps is a rank of Failover and Join: in a loop a Boundary, a step of experts, and an all_reduce or, in odd steps, an
// all_gather in the world. It checks what comes out, and says:
//
//	ready                            it is a member and begins
//	entered JOIN OPEN STEP           a replacement has completed its first step: nanoseconds of each part
//	epoch E SEQ STEP NS A,B,C        the first step whose world operation ran in epoch E: when it was complete, and the set
//	lost E NS A,B why                an event of the world: the view of epoch E, installed at that time, is without A and B
//	armed, missed                    an order to die has been prepared; its point was not passed in many steps
//	violation ...
//	state: ...                       the answer to "state"
func (r *rank) steps() error {
	s := &stepper{rank: r, mine: make([]int64, 2), sum: make([]int64, 2), in1: make([]int64, 1)}
	if err := s.dig(); err != nil {
		return err
	}
	begin := time.Now()
	w, err := r.join()
	if err != nil {
		return err
	}
	joined := time.Since(begin)
	s.w, s.each = w, make([]int64, w.Size())
	if s.l, err = r.open(w); err != nil {
		return err
	}
	opened := time.Since(begin)
	fresh := w.Joined().Replacement
	if fresh {
		s.step = int(binary.LittleEndian.Uint64(w.Joined().Attach))
	}
	r.say("ready")
	s.in("start")
	go s.obey()
	for ; ; s.step++ {
		s.news()
		if s.Pace > 0 && !fresh {
			time.Sleep(s.Pace)
		}
		if err := s.one(fresh); err != nil {
			s.news()
			return fmt.Errorf("step %d: %w", s.step, err)
		}
		if fresh {
			r.say("entered %d %d %d", joined, opened-joined, time.Since(begin)-opened)
			fresh = false
		}
	}
}

// one is one step. A newcomer stands in the Boundary of its first already.
func (s *stepper) one(fresh bool) error {
	ctx := s.ctx
	s.in("boundary")
	if !fresh {
		at := func() []byte { return binary.LittleEndian.AppendUint64(nil, uint64(s.step)) }
		disarm := s.arm(phaseBoundary)
		if _, err := s.w.Boundary(ctx, at); err != nil {
			return fmt.Errorf("boundary: %w", err)
		}
		disarm()
	}
	s.l.fill(s.step, factor)
	s.in("ep")
	disarm := s.arm(phaseEP)
	rep, err := ep.Step(ctx, s.l.buf, s.l.x, s.l.e, s.l.w, s.compute, &ep.Output{Y: s.l.y, LostMass: s.l.mass})
	if err != nil {
		return fmt.Errorf("ep: %w", err)
	}
	disarm()
	if bad := s.l.wrong(); bad != "" {
		s.violation("ep step in epoch %d with ranks %v: %s", rep.Epoch, rep.Active.Slots(), bad)
	}
	defer s.arm(phaseWorld)()
	s.in("world")
	if s.step&1 == 1 {
		return s.gather()
	}
	return s.reduce()
}

func (s *stepper) reduce() error {
	s.mine[0], s.mine[1] = 1<<s.w.Rank(), int64(s.step)
	res, err := s.w.AllReduce(s.ctx, pg.I64(s.sum), pg.I64(s.mine), dtype.Sum)
	if err != nil {
		return fmt.Errorf("all_reduce: %w", err)
	}
	s.complete(res)
	mask := int64(0)
	for _, x := range res.Active.Slots() {
		mask += 1 << x
	}
	if s.sum[0] != mask || s.sum[1] != int64(s.step)*int64(res.Active.Len()) {
		s.violation("all_reduce %d of ranks %v gives %v, want %d and %d", res.Seq, res.Active.Slots(), s.sum, mask, int64(s.step)*int64(res.Active.Len()))
	}
	return nil
}

func (s *stepper) gather() error {
	s.in1[0] = int64(s.step)<<8 + int64(s.w.Rank()) + 1
	res, err := s.w.AllGather(s.ctx, pg.I64(s.each), pg.I64(s.in1), nil)
	if err != nil {
		return fmt.Errorf("all_gather: %w", err)
	}
	s.complete(res)
	for r, v := range s.each {
		want := int64(0)
		if res.Active.Has(r) {
			want = int64(s.step)<<8 + int64(r) + 1
		}
		if v != want {
			s.violation("all_gather %d of ranks %v gives %d for rank %d, want %d", res.Seq, res.Active.Slots(), v, r, want)
		}
	}
	return nil
}

// complete is called right after the last operation of a step.
func (s *stepper) complete(res pg.Result) {
	if res.Epoch == s.last {
		return
	}
	now := harness.Mono()
	s.last = res.Epoch
	s.say("epoch %d %d %d %d %s", res.Epoch, res.Seq, s.step, now, list(res.Active.Slots()))
}

// news passes on what the world has said since.
func (s *stepper) news() {
	for {
		select {
		case e := <-s.w.Events():
			if len(e.Lost) > 0 {
				s.say("lost %d %d %s %s", e.Epoch, harness.MonoOf(e.At), list(e.Lost), e.Why)
			}
			continue
		default:
		}
		return
	}
}

func (s *stepper) violation(format string, a ...any) {
	if s.wrong++; s.wrong < 4 {
		s.say("violation step %d: "+format, append([]any{s.step}, a...)...)
	}
}

// factor is by how much an expert scales: no two alike.
func factor(e int32) float32 { return 1 + float32(e)/8 }

func (s *stepper) compute(h ep.Handle, y []float32) error {
	x, hidden := h.X(), s.l.Hidden
	for _, b := range h.Blocks() {
		f := factor(int32(b.Expert))
		lo, hi := b.Offset*hidden, (b.Offset+b.Count)*hidden
		for i, v := range x[lo:hi] {
			y[lo+i] = f * v
		}
	}
	return nil
}

// dig maps the file for the time of our death, so that nothing but a store lies between the clock and the kill.
func (s *stepper) dig() error {
	if s.Grave == "" {
		return nil
	}
	f, err := os.OpenFile(s.Grave, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 8)); err != nil {
		return err
	}
	s.grave, err = unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err == nil {
		s.grave[0] = 0 // the page is there
	}
	return err
}

func (s *stepper) die() {
	binary.LittleEndian.PutUint64(s.grave, uint64(harness.Mono()))
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// groups describes what the process knows of its groups.
func (s *stepper) groups() string {
	var all []string
	for _, g := range s.w.Groups() {
		set, version := g.Active()
		all = append(all, fmt.Sprintf("group %x: version %d, ranks %s", g.ID(), version, list(set.Slots())))
	}
	return fmt.Sprintf("epoch %d; %s", s.w.Epoch(), strings.Join(all, "; "))
}

func (s *stepper) in(place string) {
	s.at.Store(int64(s.step))
	s.where.Store(&place)
}

// obey prepares orders to die, and answers "state".
func (s *stepper) obey() {
	for line := range s.told {
		if line == "state" {
			s.say("state: step %d in %s; %s", s.at.Load(), *s.where.Load(), s.groups())
			continue
		}
		o := &order{}
		if _, err := fmt.Sscanf(line, "die %s %s %d", &o.phase, &o.point, &o.nth); err != nil {
			s.say("violation the order %q cannot be read: %v", line, err)
			continue
		}
		if err := harness.Touch(s.Resident); err != nil {
			s.say("violation no memory: %v", err)
			continue
		}
		s.say("armed")
		s.dies.Store(o)
	}
}

// arm arms the point of an order, if there is one for this phase, until the function that it returns is called.
func (s *stepper) arm(phase string) (disarm func()) {
	o := s.dies.Load()
	if o == nil || o.phase != phase {
		return func() {}
	}
	faultpoint.Arm(o.point, o.nth, s.die)
	return func() {
		faultpoint.Disarm()
		if o.tries++; o.tries == 200 {
			s.dies.Store(nil)
			s.say("missed")
		}
	}
}

func list(slots []int) string {
	s := make([]string, len(slots))
	for i, x := range slots {
		s[i] = fmt.Sprint(x)
	}
	return strings.Join(s, ",")
}

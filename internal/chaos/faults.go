package chaos

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/history"
)

// kind is a sort of fault.
type kind struct {
	name   string
	weight int
	about  string
	do     func(r *runner) error
	can    func(r *runner) bool
}

var allKinds = []kind{
	{"point", 24, "a rank kills itself at a named point of the code", (*runner).killAtPoint, func(r *runner) bool { return r.o.Tagged }},
	{"kill", 6, "a rank is killed at any time", (*runner).killAnyTime, nil},
	{"two", 3, "two ranks are killed at once", (*runner).killTwo, func(r *runner) bool { return r.cfg.Ranks >= 4 && r.cfg.Hosts == 1 }},
	{"pause", 3, "a rank is stopped for less than the deadline, and continued", (*runner).pause, nil},
	{"stop", 1, "a rank is stopped, excluded and continued", (*runner).stop, nil},
	{"reset", 3, "a connection is closed under a rank", func(r *runner) error { return r.hurt("reset") }, (*runner).hasTCP},
	{"garble", 3, "a connection gets bytes that are no frame", func(r *runner) error { return r.hurt("garble") }, (*runner).hasTCP},
	{"cut", 1, "a host is cut off, and the cut heals", (*runner).cutHost, func(r *runner) bool { return r.net != nil && r.cfg.Hosts >= 3 }},
	{"host", 1, "a host is lost with all its ranks", (*runner).loseHost, func(r *runner) bool { return r.net != nil }},
}

// Kinds lists the kinds of faults, with what they are.
func Kinds() (names, about []string) {
	for _, k := range allKinds {
		names, about = append(names, k.name), append(about, k.about)
	}
	return names, about
}

func (r *runner) hasTCP() bool { return r.cfg.Links != "shm" || r.net != nil }

// kinds are those that were asked for and can be done.
func (r *runner) kinds() (ks []kind) {
	for _, k := range allKinds {
		if (len(r.cfg.Kinds) == 0 || slices.Contains(r.cfg.Kinds, k.name)) && (k.can == nil || k.can(r)) {
			ks = append(ks, k)
		}
	}
	return ks
}

// pick draws one by its weight.
func (r *runner) pick(ks []kind) int {
	sum := 0
	for _, k := range ks {
		sum += k.weight
	}
	at := r.rng.IntN(sum)
	for i, k := range ks {
		if at -= k.weight; at < 0 {
			return i
		}
	}
	return 0
}

func (c *Config) check() error {
	names, _ := Kinds()
	var errs []error
	that := func(ok bool, f string, a ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(f, a...))
		}
	}
	that(3 <= c.Ranks && c.Ranks <= 64, "--ranks %d: want a number from 3 to 64", c.Ranks)
	that(1 <= c.Hosts && c.Hosts <= c.Ranks, "--hosts %d: want a number from 1 to that of the ranks, %d", c.Hosts, c.Ranks)
	that(1 <= c.Faults && c.Faults <= 1_000_000, "--faults %d: want a number from 1 to 1000000", c.Faults)
	that(slices.Contains([]string{"shm", "tcp", "mixed"}, c.Links), "--links %s: want shm, tcp or mixed", c.Links)
	that(100*time.Millisecond <= c.Deadline && c.Deadline <= time.Minute, "--deadline %v: want a time from 100ms to 1m", c.Deadline)
	that(0 <= c.Resident && c.Resident <= 64<<30, "--resident: want at most 64 GiB")
	that(1 <= c.PerWorld, "--per-world %d: want 1 or more", c.PerWorld)
	for _, k := range c.Kinds {
		that(slices.Contains(names, k), "--kinds %s: want some of %s", k, strings.Join(names, ","))
	}
	for _, p := range c.Points {
		that(slices.Contains(faultpoint.All(), p), "--points %s: want some of %s", p, strings.Join(faultpoint.All(), ","))
	}
	if err := errors.Join(errs...); err != nil {
		return &UsageError{err}
	}
	return nil
}

// UsageError is a run that cannot be meant.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns all that is wrong, joined.
func (e *UsageError) Unwrap() error { return e.Err }

// ExitStatus is that of a command line which is wrong.
func (e *UsageError) ExitStatus() int { return 2 }

// one does one fault, and has the world whole again after it.
func (r *runner) one(k kind) error {
	if err := r.sleep(time.Duration(r.rng.IntN(20_000)) * time.Microsecond); err != nil {
		return err
	}
	return k.do(r)
}

func (r *runner) sleep(d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-r.ctx.Done():
		return r.ctx.Err()
	}
}

const (
	hang     = 10 * time.Second // a survivor that has not gone on by then never will
	patience = 30 * time.Second // for what is not measured
)

// victim draws a rank, of those that were hit least: each as often as the others.
func (r *runner) victim() int {
	var least []int
	for x := range r.cfg.Ranks {
		n := func(x int) int { return r.res.ByRank[fmt.Sprint(x)] }
		if len(least) > 0 && n(x) < n(least[0]) {
			least = least[:0]
		}
		if len(least) == 0 || n(x) == n(least[0]) {
			least = append(least, x)
		}
	}
	return least[r.rng.IntN(len(least))]
}

// marks are how many lines each rank had printed.
func (r *runner) marks() []int {
	n := make([]int, len(r.w.Live))
	for i, m := range r.w.Live {
		n[i] = m.Count()
	}
	return n
}

// survive waits until all but the dead have completed an operation of the world without them.
func (r *runner) survive(marks []int, where string, dead ...int) error {
	return r.all(dead, func(m *Member) error {
		err := r.find(m, marks[m.Args.Rank], hang, func(line string) bool {
			rest, ok := strings.CutPrefix(line, "epoch ")
			if !ok {
				return false
			}
			_, set, _ := strings.Cut(rest, " ")
			in := strings.Fields(strings.Trim(set, "[]"))
			return !slices.ContainsFunc(dead, func(d int) bool { return slices.Contains(in, fmt.Sprint(d)) })
		})
		if err != nil {
			return r.broken("P5", "%s does not go on without ranks %v (%s): %v", m.Name, dead, where, firstLine(err))
		}
		return nil
	})
}

func firstLine(err error) string {
	s, _, _ := strings.Cut(err.Error(), "\n")
	return s
}

// replace starts processes for ranks that are gone, and waits until they run.
func (r *runner) replace(ranks ...int) error {
	for _, x := range ranks {
		if _, err := r.w.Start(x, func(a *RankArgs) { a.Rejoin = true }); err != nil {
			return err
		}
	}
	for _, x := range ranks {
		if err := r.begun(r.w.Live[x], patience); err != nil {
			return err
		}
	}
	return nil
}

// killAnyTime kills a rank from outside.
func (r *runner) killAnyTime() error {
	v := r.victim()
	m := r.w.Live[v]
	if err := r.fill(m); err != nil {
		return err
	}
	marks := r.marks()
	m.counted = r.res.fault("kill", v)
	r.w.Kill(m)
	if err := r.survive(marks, "killed at any time", v); err != nil {
		return err
	}
	return r.replace(v)
}

// fill has a rank take the memory that a victim is to have.
func (r *runner) fill(m *Member) error {
	if r.touch == 0 {
		return nil
	}
	return r.tell(m, "touch %d", r.touch)
}

// tell gives a rank an order and waits until it has carried it out.
func (r *runner) tell(m *Member, format string, a ...any) error {
	order := fmt.Sprintf(format, a...)
	from := m.Count()
	if err := m.Tell("%s", order); err != nil {
		return r.broken("", "%v", err)
	}
	if err := r.find(m, from, patience, func(line string) bool { return line == "did "+order }); err != nil {
		return r.broken("P5", "%s does not carry out %q: %s", m.Name, order, firstLine(err))
	}
	return nil
}

// killTwo kills two, one right after the other.
func (r *runner) killTwo() error {
	v := r.victim()
	u := (v + 1 + r.rng.IntN(r.cfg.Ranks-1)) % r.cfg.Ranks
	marks := r.marks()
	r.res.fault("two", v, u)
	r.w.Kill(r.w.Live[v])
	if err := r.sleep(time.Duration(r.rng.IntN(3)) * time.Millisecond); err != nil {
		return err
	}
	r.w.Kill(r.w.Live[u])
	if err := r.survive(marks, "two killed", v, u); err != nil {
		return err
	}
	return r.replace(v, u)
}

// target is a point, and the operation in which a rank is to come to it ("": any).
type target struct{ point, op string }

func (t target) String() string {
	if t.op == "" {
		return t.point
	}
	return t.point + " in " + t.op
}

// algorithms are the operations that pass the points of package collectives.
var algorithms = []string{"all_reduce", "all_gather", "all_to_all", "broadcast", "barrier", "pair", "step"}

// targets are those that can be met with these links: each phase of each algorithm, and what is no phase of one.
func (r *runner) targets() (ts []target) {
	for _, p := range faultpoint.All() {
		if len(r.cfg.Points) > 0 && !slices.Contains(r.cfg.Points, p) || p == faultpoint.TCPFrameMid && !r.hasTCP() {
			continue
		}
		switch p {
		case faultpoint.PublishBefore, faultpoint.PublishMid, faultpoint.SealBefore, faultpoint.SealAfter, faultpoint.DecideBefore,
			faultpoint.DecideAfter, faultpoint.WakeBefore, faultpoint.PullMid, faultpoint.PullAfter, faultpoint.ReturnBefore:
			for _, op := range algorithms {
				ts = append(ts, target{p, op})
			}
		default:
			ts = append(ts, target{point: p})
		}
	}
	return slices.DeleteFunc(ts, func(t target) bool { return r.never[t] >= misses })
}

// misses is after how many misses a target counts as one that no rank comes to.
const misses = 3

// killAtPoint has a rank kill itself at a point; each target in turn.
func (r *runner) killAtPoint() error {
	ts := r.targets()
	if len(ts) == 0 {
		return fmt.Errorf("chaos: no rank comes to any of these points with links %s: %s", r.cfg.Links, strings.Join(r.cfg.Points, ","))
	}
	t := ts[r.turn%len(ts)]
	r.turn++
	v := r.victim()
	switch point := t.point; point {
	case faultpoint.AgentPrepare, faultpoint.AgentAccept:
		// Only the coordinator comes there: the lowest that lives.
		if v == 0 {
			return r.killInChange(point, 1, 0)
		}
		return r.killInChange(point, 0, v)
	case faultpoint.AgentPromise, faultpoint.AgentCommit:
		first := (v + 1 + r.rng.IntN(r.cfg.Ranks-1)) % r.cfg.Ranks
		return r.killInChange(point, v, first)
	case faultpoint.JoinHello, faultpoint.JoinWelcome:
		return r.killJoiner(point, v)
	case faultpoint.BoundaryStop:
		return r.killInGrowth(point, v)
	}
	m := r.w.Live[v]
	if err := r.fill(m); err != nil {
		return err
	}
	marks := r.marks()
	nth := 1 + r.rng.IntN(12)
	if t.op != "" {
		nth = 1 + r.rng.IntN(2)
	}
	died, err := r.arm(m, t, nth)
	if err != nil {
		return err
	}
	if !died {
		r.never[t]++
		return nil
	}
	r.never[t] = 0
	m.counted = r.res.fault(t.point, v)
	if t.op != "" {
		r.res.ByOperation[t.String()]++
	}
	if err := r.survive(marks, t.String(), v); err != nil {
		return err
	}
	return r.replace(v)
}

// arm orders a rank to die at a point and waits until it has; died is false if it does not come there.
func (r *runner) arm(m *Member, t target, nth int) (died bool, err error) {
	from := m.Count()
	if err := m.Tell("die %s %d %s", t.point, nth, t.op); err != nil {
		return false, r.broken("", "%v", err)
	}
	return r.dies(m, from, t.String())
}

// dies waits until a rank that was armed dies, or says that it did not come to the point.
func (r *runner) dies(m *Member, from int, point string) (died bool, err error) {
	err = r.find(m, from, patience, func(line string) bool {
		return strings.HasPrefix(line, "missed ") || strings.HasPrefix(line, "over ")
	})
	switch {
	case m.Ended():
		if killed, _ := readGrave(m.Args.Grave); killed == 0 {
			return false, r.broken("", "%s was to die at %s and ended otherwise: %s", m.Name, point, m.Stderr())
		}
		m.killed = 1 // the grave says when
		return true, nil
	case err != nil:
		return false, r.broken("P5", "%s was to die at %s and neither did nor went on", m.Name, point)
	}
	r.missed++
	return false, nil
}

// killInChange kills one rank, and another at a point of the change of view that follows.
func (r *runner) killInChange(point string, v, first int) error {
	m, marks := r.w.Live[v], r.marks()
	if err := r.tell(m, "die %s 1", point); err != nil {
		return err
	}
	r.w.Kill(r.w.Live[first])
	died, err := r.dies(m, marks[v], point)
	if err != nil {
		return err
	}
	dead := []int{first}
	if died {
		dead = append(dead, v)
		r.res.fault(point, v, first)
	} else {
		r.w.Live[first].counted = r.res.fault("kill", first)
	}
	if err := r.survive(marks, point, dead...); err != nil {
		return err
	}
	return r.replace(dead...)
}

// killInGrowth kills a rank that stands in a Boundary where another comes back.
func (r *runner) killInGrowth(point string, v int) error {
	back := (v + 1 + r.rng.IntN(r.cfg.Ranks-1)) % r.cfg.Ranks
	m, marks := r.w.Live[v], r.marks()
	r.w.Live[back].counted = r.res.fault("kill", back)
	r.w.Kill(r.w.Live[back])
	if err := r.survive(marks, point, back); err != nil {
		return err
	}
	marks = r.marks()
	if err := r.tell(m, "die %s 1", point); err != nil {
		return err
	}
	if _, err := r.w.Start(back, func(a *RankArgs) { a.Rejoin = true }); err != nil {
		return err
	}
	died, err := r.dies(m, marks[v], point)
	if err != nil {
		return err
	}
	if died {
		r.res.fault(point, v)
	}
	if err := r.begun(r.w.Live[back], patience); err != nil {
		return err
	}
	if died {
		return r.replace(v)
	}
	return nil
}

// killJoiner kills a rank, and its first replacement at a point of its way in.
func (r *runner) killJoiner(point string, v int) error {
	m, marks := r.w.Live[v], r.marks()
	m.counted = r.res.fault("kill", v)
	r.w.Kill(m)
	if err := r.survive(marks, point, v); err != nil {
		return err
	}
	j, err := r.w.Start(v, func(a *RankArgs) { a.Rejoin, a.Point, a.Nth = true, point, 1 })
	if err != nil {
		return err
	}
	died, err := r.dies(j, 0, point)
	if err != nil || !died {
		return err
	}
	r.res.fault(point, v)
	return r.replace(v)
}

// pause stops a rank for less than the deadline.
func (r *runner) pause() error {
	v := r.victim()
	m := r.w.Live[v]
	r.res.fault("pause", v)
	r.w.Stop(m, false)
	err := r.sleep(time.Duration(r.rng.Int64N(int64(r.cfg.Deadline / 4))))
	r.w.Cont(m)
	if err != nil {
		return err
	}
	return r.step(m)
}

// step waits until a rank has begun another ten steps.
func (r *runner) step(m *Member) error {
	if err := r.find(m, m.Count(), hang, func(line string) bool { return strings.HasPrefix(line, "step ") }); err != nil {
		return r.broken("P5", "%s does not go on: %s", m.Name, firstLine(err))
	}
	return nil
}

// stop stops a rank until the others have excluded it, and continues it: it must end, and is replaced.
func (r *runner) stop() error {
	v := r.victim()
	m, marks := r.w.Live[v], r.marks()
	r.res.fault("stop", v)
	r.w.Stop(m, true)
	if err := r.survive(marks, "stopped", v); err != nil {
		return err
	}
	r.w.Cont(m)
	if !r.wait(m, hang) {
		return r.broken("P5", "%s was stopped, excluded and continued, and does not end", m.Name)
	}
	return r.replace(v)
}

// hurt does something to a connection of a rank: nobody may be excluded for that.
func (r *runner) hurt(how string) error {
	v := r.victim()
	m := r.w.Live[v]
	from := m.Count()
	if err := m.Tell("%s %d", how, r.rng.IntN(16)); err != nil {
		return r.broken("", "%v", err)
	}
	did := false
	err := r.find(m, from, hang, func(line string) bool {
		did = strings.HasPrefix(line, "did ")
		return did || strings.HasPrefix(line, "cannot ")
	})
	if err != nil {
		return r.broken("P5", "%s does not go on: %s", m.Name, firstLine(err))
	}
	if !did {
		return nil // it had no connection
	}
	r.w.Deed(m, history.Slow, false)
	r.res.fault(how, v)
	return r.step(m)
}

// onHost are the ranks of a host.
func (r *runner) onHost(h int) (ranks []int) {
	for x := range r.w.Live {
		if r.hostOf(x) == h {
			ranks = append(ranks, x)
		}
	}
	return ranks
}

// loseHost kills all ranks of a host, without which the others have a quorum, and takes the host away.
func (r *runner) loseHost() error {
	h := r.rng.IntN(r.cfg.Hosts)
	gone := r.onHost(h)
	if n := 2 * len(gone); n > r.cfg.Ranks || n == r.cfg.Ranks && h == 0 {
		h = r.cfg.Hosts - 1
		gone = r.onHost(h)
	}
	marks := r.marks()
	r.res.fault("host", gone...)
	for _, x := range gone {
		r.w.Kill(r.w.Live[x])
	}
	for _, x := range gone {
		if !r.wait(r.w.Live[x], hang) {
			return r.broken("", "%s was killed and does not end", r.w.Live[x].Name)
		}
	}
	if err := r.net.Renew(h); err != nil {
		return err
	}
	if err := r.survive(marks, "host lost", gone...); err != nil {
		return err
	}
	return r.replace(gone...)
}

// cutHost cuts a host off, until its ranks have ended without a quorum, and lets their replacements in after the cut.
func (r *runner) cutHost() error {
	h := r.rng.IntN(r.cfg.Hosts)
	cut := r.onHost(h)
	if 2*len(cut) >= r.cfg.Ranks {
		return nil
	}
	marks := r.marks()
	r.res.fault("cut", cut...)
	for _, x := range cut {
		m := r.w.Live[x]
		r.w.Deed(m, history.Cut, true)
		r.w.Deed(m, history.Minority, true)
	}
	defer func() { _ = r.net.Hosts[h].Cut(false) }() // the next world is founded on these hosts
	if err := r.net.Hosts[h].Cut(true); err != nil {
		return err
	}
	if err := r.survive(marks, "cut off", cut...); err != nil {
		return err
	}
	for _, x := range cut {
		if m := r.w.Live[x]; !r.wait(m, hang) {
			return r.broken("P5", "%s is cut off and does not end", m.Name)
		}
	}
	if err := r.net.Hosts[h].Cut(false); err != nil {
		return err
	}
	return r.replace(cut...)
}

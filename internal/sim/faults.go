package sim

import (
	"fmt"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/internal/wire"
)

// Kind is a kind of fault, or of what comes with one.
type Kind uint8

// The kinds.
const (
	Crash       Kind = iota // a process dies at any time
	CrashAccess             // at an access to shared memory
	CrashTwo                // two at once
	CrashThree
	CrashHost // all processes of a host
	CrashAllButOne
	CoordPrepare // the coordinator of a change, as it sends its prepare to somebody
	CoordAccept
	CoordCommit
	CoordGrowth // of a growth, in one of its phases
	VoterPromise
	VoterAccepted
	Restart // a new incarnation
	PauseShort
	PauseLong // beyond the deadline: it is excluded, and goes on
	Cut       // between two hosts
	CutOneWay
	CutHost // from all others, so that links are not transitive, or a minority is cut off
	Reset   // a connection, with what is under way
	Corrupt // a bit on the way
	Delay   // between two hosts, for a while
	FullPipe
	Skew // a clock that is slow or fast
	Jump // a clock that jumps forward
	Leave
	Join // of one more rank
	Replay
	kinds
)

var kindNames = [kinds]string{"crash", "crash_at_access", "crash_two", "crash_three", "crash_host", "crash_all_but_one", "coordinator_prepare",
	"coordinator_accept", "coordinator_commit", "coordinator_growth", "voter_promise", "voter_accepted", "restart", "pause_short", "pause_long",
	"cut", "cut_one_way", "cut_host", "reset", "corrupt", "delay", "full_pipe", "clock_skew", "clock_jump", "leave", "join", "duplicate_replay"}

func (k Kind) String() string { return kindNames[k] }

// strike is a fault that the plan has, at a place of the program.
type strike struct {
	kind Kind
	step int
	wait time.Duration
	done bool
}

func (s *strike) String() string {
	return fmt.Sprintf("%v at step %d, after %v", s.kind, s.step, s.wait)
}

// Coverage counts what happened.
type Coverage struct {
	Kinds    [kinds]int
	Views    int
	Returns  int
	Accesses uint64
}

func (w *World) count(k Kind) { w.Coverage.Kinds[k]++ }

// weights of the kinds that a plan draws from.
var weights = [...]struct {
	k Kind
	n int
}{{Crash, 10}, {CrashAccess, 14}, {CrashTwo, 5}, {CrashThree, 4}, {CrashHost, 4}, {CrashAllButOne, 3}, {CoordPrepare, 6}, {CoordAccept, 6},
	{CoordCommit, 6}, {CoordGrowth, 5}, {VoterPromise, 5}, {VoterAccepted, 5}, {PauseShort, 6}, {PauseLong, 6}, {Cut, 5}, {CutOneWay, 5},
	{CutHost, 5}, {Reset, 8}, {Corrupt, 5}, {Delay, 6}, {FullPipe, 4}, {Jump, 4}, {Leave, 3}, {Join, 4}}

// threaten draws the faults: at least three, after the world has formed.
func (w *World) threaten() {
	all := 0
	for _, x := range weights {
		all += x.n
	}
	for range 3 + w.rnd.IntN(4) {
		n := w.rnd.IntN(all)
		for _, x := range weights {
			if n -= x.n; n < 0 {
				w.faults = append(w.faults, &strike{kind: x.k, step: 1 + w.rnd.IntN(len(w.steps)-2), wait: w.between(0, 2*time.Millisecond)})
				break
			}
		}
	}
	if len(w.hosts) == 1 {
		for _, f := range w.faults { // there is nothing to cut
			switch f.kind {
			case Cut, CutOneWay, CutHost, Delay, Corrupt:
				f.kind = []Kind{Crash, CrashAccess, PauseLong, CrashTwo, Reset}[w.rnd.IntN(5)]
			}
		}
	}
}

// strikeAt sets off the faults of a place of the program.
func (w *World) strikeAt(front int) {
	for _, f := range w.faults {
		if !f.done && f.step <= front {
			w.after(f.wait, func() {
				if !f.done {
					f.done = true
					w.strike(f)
				}
			})
		}
	}
}

// members are the living ones.
func (w *World) members() (ps []*proc) {
	for _, p := range w.procs {
		if !p.dead && p.member && !p.stopped {
			ps = append(ps, p)
		}
	}
	return ps
}

func (w *World) victim() *proc {
	ps := w.members()
	if len(ps) < 2 {
		return nil
	}
	return ps[w.rnd.IntN(len(ps))]
}

func (w *World) deed(p *proc, what history.Done, d time.Duration, fair bool) {
	x := history.Deed{Time: int64(w.now), What: what, Proc: p.pid, Fair: fair}
	if d > 0 {
		x.Until = int64(w.now + d)
	}
	w.deeds = append(w.deeds, x)
}

// kill is SIGKILL; a replacement may follow.
func (w *World) kill(p *proc, k Kind) {
	if p.dead {
		return
	}
	w.count(k)
	w.tell("-- kill %v: %v", p, k)
	w.deed(p, history.Kill, 0, true)
	if w.chance(0.6) {
		w.restart(p, w.between(500*time.Microsecond, 150*time.Millisecond))
	}
	w.crash(p, 0)
}

// later ends a fault.
func (w *World) later(d time.Duration, f func()) {
	w.running++
	w.after(d, func() { w.running--; f() })
}

func (w *World) strike(f *strike) {
	p := w.victim()
	if p == nil {
		return
	}
	w.tell("-- %v, %v", f, p)
	switch f.kind {
	case Crash:
		w.kill(p, f.kind)
	case CrashAccess:
		w.fuse.on, w.fuse.left = true, w.rnd.IntN(40)
		if w.fuse.p = nil; w.chance(0.5) {
			w.fuse.p = p
		}
	case CrashTwo, CrashThree:
		n := 2 + int(f.kind-CrashTwo)
		ps := w.members()
		if len(ps) <= n {
			n = len(ps) - 1
		}
		w.rnd.Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
		for i, q := range ps[:n] {
			d := time.Duration(0)
			if i > 0 && w.chance(0.7) {
				d = w.between(0, 4*time.Millisecond)
			}
			k := f.kind
			if n < 2 {
				k = Crash
			}
			w.later(d, func() { w.kill(q, k) })
		}
	case CrashHost:
		mates := 0
		for _, q := range w.members() {
			if q.host == p.host {
				mates++
			}
		}
		if mates == len(w.members()) {
			w.kill(p, Crash)
			return
		}
		for _, q := range w.procs {
			if q.host == p.host && !q.dead && q.member {
				w.kill(q, f.kind)
			}
		}
	case CrashAllButOne:
		for _, q := range w.members() {
			if q != p && (q.host == p.host || w.chance(0.8)) {
				w.later(w.between(0, 3*time.Millisecond), func() { w.kill(q, CrashAllButOne) })
			}
		}
	case CoordPrepare, CoordAccept, CoordCommit, VoterPromise, VoterAccepted, CoordGrowth:
		w.trap.kind = f.kind
		w.trap.msg = map[Kind]string{CoordPrepare: "fault.prepare", CoordAccept: "fault.accept", CoordCommit: "fault.commit", VoterPromise: "fault.promise",
			VoterAccepted: "fault.accepted", CoordGrowth: []string{"fault.growAsk", "fault.growAt"}[w.rnd.IntN(2)]}[f.kind]
		w.trap.left = 1 + w.rnd.IntN(max(1, len(w.members())-1))
		if f.kind == VoterPromise || f.kind == VoterAccepted {
			w.trap.left = 1 + w.rnd.IntN(3)
		}
		if f.kind == CoordGrowth {
			w.another()
			return
		}
		w.kill(p, Crash)
	case PauseShort:
		d := w.between(time.Millisecond, 80*time.Millisecond)
		w.pause(p, d, f.kind, false)
	case PauseLong:
		w.pause(p, opTimeout+w.between(50*time.Millisecond, 700*time.Millisecond), f.kind, true)
	case Cut, CutOneWay:
		a, b := p.host, w.hosts[w.rnd.IntN(len(w.hosts))]
		if a == b {
			b = w.hosts[(a.id+1)%len(w.hosts)]
		}
		w.sever(f.kind, func(x, y *hostOf) bool { return x == a && y == b || f.kind == Cut && x == b && y == a })
	case CutHost:
		some := map[int]bool{p.host.id: true}
		for _, h := range w.hosts {
			if w.chance(0.25) {
				some[h.id] = true
			}
		}
		w.sever(f.kind, func(x, y *hostOf) bool { return some[x.id] != some[y.id] })
	case Reset:
		w.count(f.kind)
		for _, x := range p.linked {
			if x.conn != nil && !x.gone && w.chance(0.5) {
				x.conn.reset()
			}
		}
	case Corrupt:
		w.count(f.kind)
		w.corrupt += 1 + w.rnd.IntN(3)
	case Delay:
		w.count(f.kind)
		b := w.hosts[w.rnd.IntN(len(w.hosts))]
		k := [2]int{p.host.id, b.id}
		d := w.between(2*time.Millisecond, 60*time.Millisecond)
		w.slow[k] += d
		w.later(w.between(5*time.Millisecond, 200*time.Millisecond), func() { w.slow[k] -= d })
	case FullPipe:
		w.count(f.kind)
		was := w.pipeBytes
		w.pipeBytes = 200 + w.rnd.IntN(2000)
		w.later(w.between(5*time.Millisecond, 100*time.Millisecond), func() {
			w.pipeBytes = was
			for _, q := range w.procs {
				for _, x := range q.linked {
					x.touch()
				}
			}
		})
	case Jump:
		w.count(f.kind)
		p.setClock(p.rate, w.between(time.Millisecond, opTimeout/5))
	case Leave:
		w.count(f.kind)
		p.prog.leaving = true
	case Join:
		w.another()
	}
}

// another starts one more rank, or the replacement of one that lives (which is excluded for it).
func (w *World) another() {
	used := map[int]bool{}
	for _, p := range w.procs {
		if !p.dead {
			used[p.slot] = true
		}
	}
	h := w.hosts[w.rnd.IntN(len(w.hosts))]
	for s := range w.capacity {
		if !used[s] {
			w.count(Join)
			w.newProc(h, s, true)
			return
		}
	}
	if p := w.victim(); p != nil && !w.taken(p) {
		w.count(Join)
		w.deed(p, history.Slow, time.Millisecond, true)
		w.newProc(h, p.slot, true)
	}
}

func (w *World) pause(p *proc, d time.Duration, k Kind, fair bool) {
	w.count(k)
	w.deed(p, history.Stop, d, fair)
	w.stop(p)
	w.later(d, func() { w.cont(p) })
}

// sever cuts ways between hosts for a while.
func (w *World) sever(k Kind, which func(x, y *hostOf) bool) {
	w.count(k)
	d := w.between(10*time.Millisecond, 100*time.Millisecond)
	if w.chance(0.7) {
		d = heartbeatLimit + w.between(50*time.Millisecond, 900*time.Millisecond)
	}
	var ways [][2]int
	for _, x := range w.hosts {
		for _, y := range w.hosts {
			if x != y && which(x, y) {
				ways = append(ways, [2]int{x.id, y.id})
				w.cut[[2]int{x.id, y.id}]++
			}
		}
	}
	for _, p := range w.procs {
		if p.dead {
			continue
		}
		cut, all := false, true
		for _, q := range w.procs {
			if q == p || q.dead {
				continue
			}
			x := q.host != p.host && (which(p.host, q.host) || which(q.host, p.host))
			cut, all = cut || x, all && x
		}
		switch fair := d > heartbeatLimit/2; {
		case cut && all:
			w.deed(p, history.Cut, d, fair)
		case cut:
			w.deed(p, history.Slow, d, fair)
		}
	}
	w.tell("-- cut %v for %v", ways, d)
	w.watchAll()
	w.later(d, func() {
		w.tell("-- healed %v", ways)
		for _, x := range ways {
			w.cut[x]--
		}
		w.watchAll()
		w.flood()
	})
}

// flood delivers what has waited at cuts that are healed.
func (w *World) flood() {
	for _, p := range w.procs {
		for _, x := range p.linked {
			c := x.conn
			if c == nil || c.over {
				continue
			}
			d := &c.dirs[x.side]
			if (d.held || len(d.fly) > 0) && !w.isCut(p.host, x.to.host) {
				d.held = false
				side := x.side
				w.after(w.between(time.Millisecond, 20*time.Millisecond), func() { c.arrive(side) })
			}
		}
	}
}

// burnt says that a process dies at this access to memory.
func (w *World) burnt(p *proc) bool {
	f := &w.fuse
	if !f.on || f.p != nil && f.p != p || !p.member {
		return false
	}
	if f.left--; f.left > 0 {
		return false
	}
	f.on = false
	if len(w.members()) < 2 || p.stopped {
		return false
	}
	w.count(CrashAccess)
	w.tell("-- %v dies at an access to memory", p)
	w.deed(p, history.Kill, 0, true)
	if w.chance(0.6) {
		w.restart(p, w.between(500*time.Microsecond, 150*time.Millisecond))
	}
	return true
}

// sending looks at a message for whose sender a trap is set.
func (w *World) sending(x *peer, f *device.Frame) {
	t := &w.trap
	if t.msg == "" || f.Kind != wire.KindControl || f.Total != 0 {
		return
	}
	m, err := fault.ParseMsg(f.Payload)
	if err != nil || fmt.Sprintf("%T", m) != t.msg {
		return
	}
	if t.left--; t.left > 0 {
		return
	}
	t.msg = ""
	if len(w.members()) < 2 {
		return
	}
	w.kill(x.p, t.kind)
}

// leaves says that the process was asked to leave at the end.
func (p *proc) leaves() bool { return p.prog.leaving }

// Kinds lists them all.
func Kinds() []Kind {
	ks := make([]Kind, kinds)
	for i := range ks {
		ks[i] = Kind(i)
	}
	return ks
}

// Death says that the kind is a death in a phase of an agreement, which needs one to happen.
func (k Kind) Death() bool {
	switch k {
	case CoordPrepare, CoordAccept, CoordCommit, CoordGrowth, VoterPromise, VoterAccepted:
		return true
	}
	return false
}

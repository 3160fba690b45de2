package collectives

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// stDo is a kind of choice.
type stDo uint8

const (
	stStep    stDo = iota // thread a runs to its next stop
	stCrash               // rank a dies
	stClose               // the loop of rank a begins to close the word, for a change that drops the ranks in b
	stDecide              // the change is decided, and rank a begins to install it
	stInstall             // rank a begins to install the next view
)

type stChoice struct {
	do   stDo
	a, b uint8
}

func (w *stWorld) describe(c stChoice) string {
	switch c.do {
	case stStep:
		t := w.threads[c.a]
		if t.op == "" {
			return fmt.Sprintf("%v: begins", t)
		}
		s := fmt.Sprintf("%v: %s %v", t, t.op, t.access)
		if t.of >= 0 && t.access == stPub {
			s += fmt.Sprintf(" of slot %d", t.slot)
		}
		if t.of >= 0 && t.of != t.rank {
			s += fmt.Sprintf(" of rank %d", t.of)
		}
		return s
	case stCrash:
		return fmt.Sprintf("rank %d dies", c.a)
	case stClose:
		return fmt.Sprintf("loop of rank %d closes the word for epoch %d without %b", c.a, w.oracle.n+1, c.b)
	case stDecide:
		return fmt.Sprintf("the change is decided, rank %d installs it", c.a)
	}
	return fmt.Sprintf("rank %d installs the view", c.a)
}

// runs is the thread that a choice runs; -1: none.
func (w *stWorld) runs(c stChoice) int {
	switch c.do {
	case stStep:
		return int(c.a)
	case stCrash:
		return -1
	}
	return w.cfg.ranks + int(c.a)
}

func (w *stWorld) enabled(t *stThread) bool {
	return t.busy && !t.asleep && w.oracle.alive(t.rank)
}

// settled says that no change is under way, and none can come.
func (w *stWorld) settled() bool {
	o := &w.oracle
	if o.faults > 0 || o.open || o.view().members&o.dead != 0 {
		return false
	}
	for _, t := range w.threads[w.cfg.ranks:] {
		if t.busy && o.alive(t.rank) {
			return false
		}
	}
	return true
}

// choices appends all that may happen next.
func (w *stWorld) choices(cs []stChoice) []stChoice {
	from, o := len(cs), &w.oracle
	add := func(do stDo, a int, b uint8) { cs = append(cs, stChoice{do, uint8(a), b}) }
	waiting := false // somebody who lives has not returned from everything
	for i, t := range w.threads {
		if w.enabled(t) {
			add(stStep, i, 0)
		}
		waiting = waiting || !t.loop && t.busy && o.alive(t.rank)
	}
	if !waiting {
		return cs[:from] // nothing can be returned any more
	}
	view := o.view()
	living := view.members &^ o.dead
	idle := func(r int) bool { return o.alive(r) && !w.threads[w.cfg.ranks+r].busy }
	current := func(r int) bool { return !o.gone(r) && idle(r) && o.at[r] == o.n-1 }
	room := int(o.n) < len(o.views)
	for r := range w.ranks {
		bit := uint8(1) << r
		if o.faults > 0 && w.cfg.crash && living&bit != 0 && living != bit {
			add(stCrash, r, 0)
		}
		if idle(r) && int(o.at[r]) < int(o.n)-1 && o.views[o.at[r]+1].members&bit != 0 {
			add(stInstall, r, 0)
		}
		if !current(r) || !room {
			continue
		}
		switch {
		case o.open:
			if o.spoke&bit == 0 && (w.cfg.all || o.named&bit == 0) {
				add(stClose, r, o.named)
			}
			if members := view.members &^ o.named; members&bit != 0 && w.spokenFor(members) {
				add(stDecide, r, 0)
			}
		default:
			lost := view.members & o.dead
			if lost != 0 {
				add(stClose, r, lost)
			}
			for q := range w.ranks {
				if o.faults > 0 && w.cfg.stop && living&(1<<q) != 0 && living != 1<<q && (w.cfg.all || q != r) {
					add(stClose, r, lost|1<<q)
				}
			}
			if o.faults > 0 && w.cfg.empty && lost == 0 {
				add(stClose, r, 0)
			}
		}
	}
	return cs
}

// costs says that a choice sets a thread aside that could go on.
func (w *stWorld) costs(c stChoice) bool {
	t, last := w.runs(c), int(w.oracle.last)
	return t >= 0 && last >= 0 && t != last && w.enabled(w.threads[last])
}

// spokenFor says that the speakers have said how far each of these has come.
func (w *stWorld) spokenFor(members uint8) bool {
	for m := members; m != 0; m &= m - 1 {
		if w.oracle.said[bits.TrailingZeros8(m)] < 0 {
			return false
		}
	}
	return w.oracle.spoke != 0
}

// do makes a choice.
func (w *stWorld) do(c stChoice) {
	o := &w.oracle
	if t := w.runs(c); t >= 0 {
		if w.costs(c) {
			o.used++
		}
		o.last = int8(t)
	}
	r := int(c.a)
	begin := func(tag uint64, f func(*stThread)) {
		t := w.threads[w.cfg.ranks+r]
		t.hist = mix(tag, uint64(o.n))
		t.op = ""
		t.start(f)
		t.step()
	}
	switch c.do {
	case stStep:
		w.threads[c.a].step()
	case stCrash:
		o.dead |= 1 << r
		o.faults--
		w.threads[r].kill()
		w.threads[w.cfg.ranks+r].kill()
	case stClose:
		if !o.open {
			o.open, o.named, o.spoke, o.said = true, c.b, 0, [3]int8{-1, -1, -1}
			if c.b == 0 || c.b&^o.dead != 0 {
				o.faults--
			}
		}
		begin(3, w.close)
	case stDecide:
		v := stView{members: o.view().members &^ o.named, version: int(o.n)}
		if o.named == 0 {
			v.version = o.view().version
		} else {
			for m := v.members; m != 0; m &= m - 1 {
				v.cut = max(v.cut, uint64(o.said[bits.TrailingZeros8(m)]))
			}
		}
		o.views[o.n] = v
		o.n++
		o.open, o.named, o.spoke, o.said = false, 0, 0, [3]int8{-1, -1, -1}
		begin(4, w.install)
	case stInstall:
		begin(4, w.install)
	}
}

// stuck says whether the survivors can get no further although somebody of them waits.
func (w *stWorld) stuck(cs []stChoice) string {
	alive := w.oracle.survivors()
	for _, c := range cs {
		switch c.do {
		case stStep:
			if alive&(1<<w.threads[c.a].rank) != 0 {
				return ""
			}
		case stCrash:
		case stClose:
			if w.oracle.open || c.b != 0 && c.b&^w.oracle.dead == 0 { // else it is a fault that need not come
				return ""
			}
		default:
			return ""
		}
	}
	for r := range w.ranks {
		if alive&(1<<r) != 0 && w.threads[r].busy {
			return fmt.Sprintf("P5: rank %d sleeps for ever in operation %d", r, w.ranks[r].head())
		}
	}
	return ""
}

// stReport is what an exploration came to.
type stReport struct {
	states, edges, deepest int
	ends                   map[uint64]int // what paths came to: how often
	complete               bool
	took                   time.Duration
	bad                    string
}

func (r stReport) String() string {
	s := fmt.Sprintf("%d states, %d steps between them, paths of at most %d steps to %d ends, %v",
		r.states, r.edges, r.deepest, len(r.ends), r.took.Round(time.Millisecond))
	if !r.complete {
		s += " (not all of them)"
	}
	return s
}

// explore visits every state that the configuration allows, depth first. A coroutine cannot be copied, so a state is reached
// again by doing the choices that lead to it.
func explore(cfg stConfig) (rep stReport) {
	type frame struct {
		key          uint64
		lo, hi, next int
	}
	var (
		w       = newStWorld(cfg)
		visited = map[uint64]struct{}{}
		frames  []frame
		all     []stChoice // of the frames
		path    []stChoice
		begun   = time.Now()
		stale   bool // the world is not in the state of the last frame
	)
	defer func() {
		rep.states, rep.took = len(visited), time.Since(begun)
		if w.bad != "" {
			rep.bad = w.bad
			rep.bad += "\n" + w.story(path)
		}
		for _, t := range w.threads {
			t.kill()
			if t.stop != nil {
				t.stop()
			}
		}
	}()
	enter := func() bool {
		key := w.key()
		if _, ok := visited[key]; ok {
			// Time only goes forward, unless somebody goes round and round.
			if slices.ContainsFunc(frames, func(f frame) bool { return f.key == key }) {
				w.fail("P5: a state comes back: somebody goes round without end")
			}
			return false
		}
		visited[key] = struct{}{}
		w.agree()
		f := frame{key: key, lo: len(all), next: len(all)}
		all = w.choices(all)
		if s := w.stuck(all[f.lo:]); s != "" {
			w.fail("%s", s)
		}
		if cfg.switches >= 0 && int(w.oracle.used) >= cfg.switches {
			all = all[:f.lo+len(slices.DeleteFunc(all[f.lo:], w.costs))]
		}
		if f.hi = len(all); f.lo == f.hi {
			rep.ends[w.end()]++
		}
		frames = append(frames, f)
		rep.deepest = max(rep.deepest, len(frames))
		return true
	}
	rep.ends = map[uint64]int{}
	w.reset()
	enter()
	for len(frames) > 0 && w.bad == "" {
		f := &frames[len(frames)-1]
		if f.next == f.hi {
			all = all[:f.lo]
			frames = frames[:len(frames)-1]
			path = path[:max(len(frames)-1, 0)]
			stale = true
			continue
		}
		c := all[f.next]
		f.next++
		rep.edges++
		if stale {
			w.reset()
			for _, c := range path {
				w.do(c)
			}
			stale = false
		}
		if c.do == stCrash { // its state is known without going there
			was := w.oracle
			w.oracle.dead |= 1 << c.a
			w.oracle.faults--
			_, ok := visited[w.key()]
			if w.oracle = was; ok {
				continue
			}
		}
		var others [3]uint64
		for r := range w.ranks {
			others[r] = w.bytes(r)
		}
		w.do(c)
		path = append(path, c)
		for r := range w.ranks {
			if t := w.runs(c); w.bytes(r) != others[r] && (t < 0 || w.threads[t].rank != r) {
				w.fail("P4: the area of rank %d was changed by another", r)
			}
		}
		if w.bad == "" && !enter() {
			path = path[:len(path)-1]
			stale = true
		}
		if cfg.limit > 0 && len(visited) >= cfg.limit {
			return rep
		}
	}
	rep.complete = w.bad == ""
	return rep
}

// story does the choices once more and says what happens.
func (w *stWorld) story(path []stChoice) string {
	var b strings.Builder
	w.bad = ""
	w.reset()
	w.trace = func(f string, a ...any) { fmt.Fprintf(&b, "           "+f+"\n", a...) }
	for i, c := range path {
		fmt.Fprintf(&b, "  %4d  %s\n", i, w.describe(c))
		w.do(c)
	}
	w.trace = nil
	return b.String() + w.state()
}

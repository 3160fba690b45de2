package bench

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// population is a world of ranks that run steps (stepper), some of which die and are replaced.
type population struct {
	*crew
	res    *Result
	args   rankArgs
	live   map[int]*member // by rank
	trials int             // for the names of what is kept
}

// member is what a rank has said.
type member struct {
	*proc
	epochs          []epochLine
	lost            []lostLine
	entered         string
	armed, missed   bool
	gone, mayBeGone bool
	dies            string   // where
	heard           []string // all that it said
}

// epochLine is the first step of an epoch: the same on all ranks but for when it was complete.
type epochLine struct {
	epoch, seq uint64
	step       int
	at         int64
	set        string
}

// lostLine is a new view without some ranks.
type lostLine struct {
	epoch     uint64
	at        int64
	who, text string
}

func (e epochLine) String() string {
	return fmt.Sprintf("epoch %d with ranks %s at step %d, operation %d", e.epoch, e.set, e.step, e.seq)
}

// errBroken: the world cannot be used any more; a violation says why.
var errBroken = errors.New("bench: the world is broken")

const (
	hang     = 5 * time.Second  // a survivor that has not gone on by then never will
	patience = 60 * time.Second // for what is not measured
)

func (p *population) everybody() string { return p.ranks(nil) }

// ranks lists the living ones but for one.
func (p *population) ranks(but *member) string {
	var rs []int
	for _, r := range slices.Sorted(maps.Keys(p.live)) {
		if p.live[r] != but {
			rs = append(rs, r)
		}
	}
	return list(rs)
}

// found starts a world and waits until all ranks step.
func (p *population) found() error {
	p.live = map[int]*member{}
	for r := range p.args.Size {
		a := p.args
		a.Rank, a.Grave = r, p.grave(r)
		q, err := p.start(a)
		if err != nil {
			return err
		}
		p.live[r] = &member{proc: q}
	}
	set := p.everybody()
	err := p.until(patience, "the founders to step", func() bool { return p.all(nil, func(m *member) bool { return m.in(set) }) })
	if errors.Is(err, errBroken) {
		return fmt.Errorf("%w: %s", err, p.res.Violations[len(p.res.Violations)-1])
	}
	return err
}

// grave is the file for the time at which a rank dies.
func (p *population) grave(rank int) string {
	return filepath.Join(p.dir, fmt.Sprintf("grave.%d", rank))
}

// in says that the rank has completed a step with that set last.
func (m *member) in(set string) bool {
	return len(m.epochs) > 0 && m.epochs[len(m.epochs)-1].set == set
}

func (p *population) all(but *member, f func(m *member) bool) bool {
	for _, m := range p.live {
		if m != but && !f(m) {
			return false
		}
	}
	return true
}

// until takes in what ranks say until cond holds. errTimeout: it did not in time; errBroken: a rank ended that should not.
func (p *population) until(d time.Duration, what string, cond func() bool) error {
	for end := time.Now().Add(d); !cond(); {
		e, err := p.next(time.Until(end))
		if errors.Is(err, errTimeout) {
			return fmt.Errorf("%w: waited %v for %s", errTimeout, d, what)
		}
		if err != nil {
			return err
		}
		m := p.live[e.p.rank]
		if m == nil || m.proc != e.p {
			continue
		}
		if e.end {
			m.gone = true
			if !m.mayBeGone {
				p.res.violate("%s, while waiting for %s", e.p.ended(), what)
				p.keep()
				return errBroken
			}
			continue
		}
		if err := m.hear(e.text, p.res); err != nil {
			return err
		}
	}
	return nil
}

func (m *member) hear(text string, res *Result) error {
	m.heard = append(m.heard, text)
	word, rest, _ := strings.Cut(text, " ")
	switch word {
	case "epoch":
		var e epochLine
		if _, err := fmt.Sscan(rest, &e.epoch, &e.seq, &e.step, &e.at, &e.set); err != nil {
			return fmt.Errorf("bench: rank %d says %q: %w", m.rank, text, err)
		}
		m.epochs = append(m.epochs, e)
	case "lost":
		l := lostLine{text: text}
		if _, err := fmt.Sscan(rest, &l.epoch, &l.at, &l.who); err != nil {
			return fmt.Errorf("bench: rank %d says %q: %w", m.rank, text, err)
		}
		m.lost = append(m.lost, l)
	case "entered":
		m.entered = rest
	case "armed":
		m.armed = true
	case "missed":
		m.missed = true
	case "violation":
		res.violate("rank %d: %s", m.rank, rest)
	}
	return nil
}

// doom forgets what all have said so far and says that a rank is about to die.
func (p *population) doom(victim *member, where string) {
	for _, m := range p.live {
		m.epochs, m.lost, m.entered, m.armed, m.missed = nil, nil, "", false, false
	}
	victim.mayBeGone, victim.dies = true, where
}

// outlive waits until all but the victim have gone on without it, checks what they say, and returns when the last of them
// had agreed on a view without it, and had completed its first step (on the clock of mono).
func (p *population) outlive(victim *member) (view, last int64, err error) {
	err = p.until(hang, "the survivors to go on", func() bool {
		return p.all(victim, func(m *member) bool { return len(m.epochs) > 0 && len(m.lost) > 0 })
	})
	if errors.Is(err, errTimeout) {
		var stuck []string
		for _, r := range slices.Sorted(maps.Keys(p.live)) {
			if m := p.live[r]; m != victim && len(m.epochs) == 0 {
				stuck = append(stuck, fmt.Sprint(r))
			}
		}
		p.res.violate("hang: %v after rank %d died in %s, ranks %s have completed no step without it", hang, victim.rank, victim.dies, strings.Join(stuck, ","))
		p.keep()
		return 0, 0, errBroken
	}
	if err != nil {
		return 0, 0, err
	}
	var first *epochLine
	want := p.ranks(victim)
	for _, r := range slices.Sorted(maps.Keys(p.live)) {
		m := p.live[r]
		if m == victim {
			continue
		}
		e := m.epochs[0]
		last = max(last, e.at)
		if e.set != want {
			p.res.violate("rank %d died in %s: rank %d goes on with ranks %s, want %s", victim.rank, victim.dies, r, e.set, want)
		}
		for _, l := range m.lost {
			if l.who != fmt.Sprint(victim.rank) {
				p.res.violate("rank %d died in %s: rank %d was told that rank %s is lost (%s)", victim.rank, victim.dies, r, l.who, l.text)
			}
		}
		view = max(view, m.lost[0].at)
		if first == nil {
			first = &e
		} else if e.epoch != first.epoch || e.seq != first.seq || e.step != first.step || e.set != first.set {
			p.res.violate("survivors of rank %d differ: %v; rank %d: %v", victim.rank, *first, r, e)
		}
	}
	return view, last, nil
}

// replace starts a process for the victim's place and waits until all run with it.
func (p *population) replace(victim *member) (*member, error) {
	a := victim.args
	a.Rejoin = true
	q, err := p.start(a)
	if err != nil {
		return nil, err
	}
	m := &member{proc: q}
	p.live[a.Rank] = m
	set := p.everybody()
	err = p.until(2*hang, "the replacement to step", func() bool {
		return m.entered != "" && p.all(nil, func(m *member) bool { return m.in(set) })
	})
	if errors.Is(err, errTimeout) {
		p.res.violate("the replacement of rank %d, killed in %s, was not let in within %v", a.Rank, victim.dies, 2*hang)
		p.keep()
		return nil, errBroken
	}
	return m, err
}

// keep asks what still lives where it is, and for its goroutines, by SIGQUIT, which ends it, and writes down what all have
// said.
func (p *population) keep() {
	p.trials++
	if p.o.Keep == "" {
		return
	}
	listen := func(d time.Duration, until func() bool) {
		for t := time.After(d); !until(); {
			select {
			case e := <-p.events:
				if m := p.live[e.p.rank]; m != nil && m.proc == e.p {
					m.heard = append(m.heard, e.text)
				}
			case <-t:
				return
			}
		}
	}
	for _, m := range p.live {
		_ = m.tell("state")
	}
	listen(200*time.Millisecond, func() bool { return false })
	for _, m := range p.live {
		_ = m.cmd.Process.Signal(syscall.SIGQUIT)
	}
	listen(3*time.Second, func() bool {
		return p.all(nil, func(m *member) bool {
			select {
			case <-m.done:
				return true
			default:
				return false
			}
		})
	})
	for r, m := range p.live {
		s := fmt.Sprintf("%s\n\n%s\n\n%s\n", strings.Join(p.res.Violations, "\n"), strings.Join(m.heard, "\n"), m.stderr())
		_ = os.WriteFile(filepath.Join(p.o.Keep, fmt.Sprintf("%s.%d.rank%d.txt", p.res.Name, p.trials, r)), []byte(s), 0o644)
	}
}

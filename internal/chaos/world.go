package chaos

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

// World is the processes that run one program together, those that have ended included.
type World struct {
	Args RankArgs // of all; Start fills in what is each one's own
	Dir  string   // where they meet, and where their histories are
	// Launch starts a rank with its arguments.
	Launch func(rank int, args string) (*harness.Proc, error)
	// Edit changes the arguments of a rank; it may be nil.
	Edit func(a *RankArgs)
	// Host is which host a rank is on; nil: all on one.
	Host func(rank int) int

	Live []*Member // by rank: the last that was started; nil: none
	Ever []*Member

	deeds []history.Deed
}

// Member is one process of a World.
type Member struct {
	*harness.Proc
	Args   RankArgs
	index  int   // in World.Ever
	killed int64 // 0: not; 1: its grave says when
	doomed bool  // it is left where it is, stopped
	stop   int   // index in World.deeds, of a stop that lasts
	cont   int64 // when it was continued last

	counted *point // its death is measured there
}

// NewWorld makes a World in a directory of its own, which Close removes.
func NewWorld(args RankArgs, launch func(rank int, args string) (*harness.Proc, error)) (*World, error) {
	dir, err := os.MkdirTemp("", "serry-chaos-")
	if err != nil {
		return nil, err
	}
	w := &World{Args: args, Dir: dir, Launch: launch, Live: make([]*Member, args.Ranks)}
	w.Args.Dir = dir
	return w, nil
}

// Close ends all processes and removes the directory.
func (w *World) Close() {
	for _, m := range w.Ever {
		m.Signal(syscall.SIGKILL)
	}
	for _, m := range w.Ever {
		<-m.Done()
	}
	_ = os.RemoveAll(w.Dir)
}

// Start starts a rank; edit (or nil) changes its arguments.
func (w *World) Start(rank int, edit func(*RankArgs)) (*Member, error) {
	m := &Member{Args: w.Args, index: len(w.Ever), stop: -1}
	a := &m.Args
	a.Rank = rank
	a.History = filepath.Join(w.Dir, fmt.Sprintf("history.%d.%d", rank, m.index))
	a.Grave = filepath.Join(w.Dir, fmt.Sprintf("grave.%d.%d", rank, m.index))
	if w.Edit != nil {
		w.Edit(a)
	}
	if edit != nil {
		edit(a)
	}
	b, err := json.Marshal(a)
	if err != nil {
		return nil, err
	}
	if m.Proc, err = w.Launch(rank, string(b)); err != nil {
		return nil, err
	}
	w.Live[rank] = m
	w.Ever = append(w.Ever, m)
	return m, nil
}

// StartAll starts the founders.
func (w *World) StartAll() error {
	for r := range w.Live {
		if _, err := w.Start(r, nil); err != nil {
			return err
		}
	}
	return nil
}

// Deed notes what is done to a process.
func (w *World) Deed(m *Member, what history.Done, fair bool) int {
	w.deeds = append(w.deeds, history.Deed{Time: harness.Mono(), What: what, Proc: m.index, Fair: fair})
	return len(w.deeds) - 1
}

// Until notes that a deed is over.
func (w *World) Until(deed int) { w.deeds[deed].Until = harness.Mono() }

// Kill kills a process.
func (w *World) Kill(m *Member) {
	m.killed = harness.Mono()
	m.Signal(syscall.SIGKILL)
}

// Stop stops a process; fair says that it may be excluded for that.
func (w *World) Stop(m *Member, fair bool) {
	m.stop = w.Deed(m, history.Stop, fair)
	m.Signal(syscall.SIGSTOP)
}

// Cont lets it go on.
func (w *World) Cont(m *Member) {
	m.Signal(syscall.SIGCONT)
	m.cont = harness.Mono()
	if m.stop >= 0 {
		w.Until(m.stop)
		m.stop = -1
	}
}

// Finish ends the program, waits for the ranks that are not among the dead (who were killed, or may have been), and checks
// the histories of all.
func (w *World) Finish(dead ...int) (r *Report, err error) {
	if err := os.WriteFile(filepath.Join(w.Dir, "stop"), nil, 0o644); err != nil {
		return nil, err
	}
	var problems []string
	for rank, m := range w.Live {
		if m == nil || slices.Contains(dead, rank) {
			continue
		}
		if _, err := m.Wait(finishIn); err != nil {
			problems = append(problems, err.Error())
		}
	}
	if r, err = w.Check(); err != nil {
		return nil, err
	}
	r.Problems = append(problems, r.Problems...)
	return r, nil
}

// finishIn is how long a rank may need to end once it is told to.
const finishIn = 25 * time.Second

// Report is what became of a World.
type Report struct {
	Problems   []string // what was not kept, or went wrong otherwise; none: all is well
	Violations []history.Violation
	Count      map[string]int // outcomes, and of messages "send ok" and the like
	Run        *history.Run
}

// Check reads the histories and checks them.
func (w *World) Check() (*Report, error) {
	run, err := w.run()
	if err != nil {
		return nil, err
	}
	r := &Report{Run: run, Count: map[string]int{}}
	for i := range run.Procs {
		for j := range run.Procs[i].Events {
			e := &run.Procs[i].Events[j]
			if e.Kind != history.Return || e.Op == history.Boundary {
				continue
			}
			r.Count[e.Outcome.String()]++
			if e.Op.Local() {
				r.Count[e.Op.String()+" "+e.Outcome.String()]++
			}
		}
	}
	r.Violations = history.Check(run)
	for i, m := range w.Ever {
		for _, line := range m.Lines() {
			if why, ok := strings.CutPrefix(line, "violation "); ok {
				r.Violations = append(r.Violations, history.Violation{Property: "P4", Text: fmt.Sprintf("rank %d (incarnation %d): %s", m.Args.Rank, run.Procs[i].Inc, why)})
			}
		}
	}
	for _, v := range r.Violations {
		r.Problems = append(r.Problems, v.String())
	}
	for _, m := range w.Ever {
		if m.Ended() && m.Crashed() {
			r.Problems = append(r.Problems, fmt.Sprintf("%s crashed:\n%s", m.Name, m.Stderr()))
		}
	}
	return r, nil
}

// run puts the histories and what was done together.
func (w *World) run() (*history.Run, error) {
	run := &history.Run{End: harness.Mono(), Deadline: int64(w.Args.Late)}
	if w.Args.Late == 0 {
		run.Deadline = int64(UsualLate)
	}
	limit := w.Args.Limit
	if limit == 0 {
		limit = time.Second
	}
	for _, m := range w.Ever {
		run.Frames = run.Frames || m.Args.Links == "tcp" || m.Args.Listen != ""
	}
	run.Detect = int64(limit + 4*time.Second) // the rest is for a machine that has other things to do
	run.Deeds = append(run.Deeds, w.deeds...)
	for i, m := range w.Ever {
		p := history.Process{Slot: m.Args.Rank, Killed: m.killed, Doomed: m.doomed}
		if w.Host != nil {
			p.Host = w.Host(m.Args.Rank)
		}
		b, err := os.ReadFile(m.Args.History)
		if err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		if p.Events, err = history.Parse(b); err != nil {
			return nil, fmt.Errorf("%s: %w", m.Args.History, err)
		}
		for j := range p.Events {
			if e := &p.Events[j]; e.Kind == history.Joined {
				p.Inc = e.Inc
			} else if e.Kind == history.Made && run.World == 0 {
				run.World = e.Group // the first that a process has is the world
			}
		}
		killed, stopped := readGrave(m.Args.Grave)
		if killed != 0 {
			p.Killed = killed
		}
		if p.Killed != 0 {
			run.Deeds = append(run.Deeds, history.Deed{Time: p.Killed, Until: p.Killed, What: history.Kill, Proc: i, Fair: true})
		}
		if stopped != 0 {
			until := run.End
			if m.cont > stopped {
				until = m.cont
			}
			run.Deeds = append(run.Deeds, history.Deed{Time: stopped, Until: until, What: history.Stop, Proc: i, Fair: true})
		}
		run.Procs = append(run.Procs, p)
	}
	if w.Args.Mode == pg.Continue { // P and E raise always, but no messages go in them
		run.Continue = func(uint64) bool { return true }
	}
	run.Want = newOracle(&Program{Seed: w.Args.Seed, Ranks: w.Args.Ranks}, run.World).sum
	return run, nil
}

// Keep copies the histories, and what the processes have said, into a directory.
func (w *World) Keep(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, m := range w.Ever {
		b, err := os.ReadFile(m.Args.History)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(m.Args.History)+".jsonl"), b, 0o644)
		}
		said := strings.Join(m.Lines(), "\n") + "\n\n" + m.Stderr()
		if err2 := os.WriteFile(filepath.Join(dir, filepath.Base(m.Args.History)+".txt"), []byte(said), 0o644); err == nil {
			err = err2
		}
		if err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	b, err := json.MarshalIndent(w.deeds, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "deeds.json"), b, 0o644)
	}
	return err
}

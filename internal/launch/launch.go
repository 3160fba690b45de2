package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/serry-project/serry/rendezvous"
)

// ErrStopping is the refusal to start a rank while all are told to end.
var ErrStopping = errors.New("the launcher is stopping")

// ExitError is a run that did not end well.
type ExitError struct {
	Rank   int            // the rank that failed first for good; -1 if the launcher was stopped
	Code   int            // of the rank, or 128 + the signal's number
	Signal syscall.Signal // what ended the rank, or stopped the launcher; 0 if none did
}

func (e *ExitError) Error() string {
	switch {
	case e.Rank < 0:
		return "stopped by " + SignalName(e.Signal)
	case e.Signal != 0:
		return fmt.Sprintf("rank %d was ended by %s", e.Rank, SignalName(e.Signal))
	}
	return fmt.Sprintf("rank %d ended with exit code %d", e.Rank, e.Code)
}

// Result is how a rank fared.
type Result struct {
	Rank     int
	Pid      int // 0 if it does not run
	Restarts int
	Code     int            // of its last end: exit code, or 128 + the signal's number
	Signal   syscall.Signal // of its last end, 0 if none
	Ended    bool           // false if it runs, waits for its restart, or was never started
	Duration time.Duration  // from its first start to its last end, or until now
}

// Launcher starts and watches the ranks of this host. Ranks are named by their number in the whole group. All methods
// may be called from any goroutine.
type Launcher struct {
	cfg     Config
	server  *rendezvous.Server // nil if another launcher or program serves
	store   rendezvous.Store
	url     string // for SERRY_RENDEZVOUS
	nodes   *nodes // nil for one node
	events  *events
	printer *printer
	logs    []*logFile // by rank of this host, nil without LogDir

	mu       sync.Mutex
	ranks    []*rank
	active   int        // ranks that run or wait for their restart
	idle     *sync.Cond // active has become 0
	stopping int        // how often Stop was called
	stopped  syscall.Signal
	killer   *time.Timer // kills what is left after the grace
	failed   *ExitError  // the first failure for good
	tasks    sync.WaitGroup
}

// New checks cfg, serves or finds the rendezvous, and starts nothing yet. The Launcher must be closed. What cfg cannot
// have is a [*UsageError] or a [*StartError].
func New(ctx context.Context, cfg Config) (*Launcher, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	l := &Launcher{cfg: cfg}
	l.idle = sync.NewCond(&l.mu)
	for i := range cfg.Ranks {
		l.ranks = append(l.ranks, &rank{index: cfg.Node*cfg.Ranks + i})
	}
	if err := l.openStore(ctx); err != nil {
		return nil, err
	}
	if cfg.LogDir != "" {
		if err := os.MkdirAll(cfg.LogDir, 0o755); err != nil {
			cfg.Log.Warn("no log files; the ranks go on", "err", err)
		} else {
			for _, r := range l.ranks {
				l.logs = append(l.logs, openLog(cfg.LogDir, r.index, cfg.Log))
			}
		}
	}
	l.printer = &printer{log: cfg.Log}
	l.printer.to[0], l.printer.to[1] = cfg.Stdout, cfg.Stderr
	l.events = newEvents(cfg.OnEvent)
	if l.nodes != nil {
		l.nodes.watch(&l.tasks, func() { l.stop(syscall.SIGTERM, "a rank of another node failed", false) })
	}
	return l, nil
}

func (l *Launcher) openStore(ctx context.Context) (err error) {
	addr := l.cfg.Rendezvous
	if l.cfg.serves() {
		if l.server, err = rendezvous.Listen(ctx, addr, l.cfg.Log); err != nil {
			return err
		}
		l.store, l.url = l.server.Store(), l.server.URL()
		if l.cfg.Nodes > 1 { // as the others write it
			l.url = "tcp://" + addr
		}
	} else {
		l.url = addr
		if !strings.Contains(addr, "://") {
			l.url = "tcp://" + addr
		}
		if l.store, err = rendezvous.Open(ctx, l.url); err != nil {
			return err
		}
	}
	if l.cfg.Nodes > 1 {
		l.nodes, err = meet(ctx, l.store, &l.cfg)
	}
	if err != nil {
		_ = l.closeStore()
		return err
	}
	if l.cfg.RunID == "" {
		l.cfg.RunID = randomID()
	}
	return nil
}

func (l *Launcher) closeStore() error {
	err := l.store.Close()
	if l.server != nil {
		err = errors.Join(err, l.server.Close())
	}
	return err
}

// Run starts all ranks, waits until all have ended, and closes. When ctx ends, the ranks get SIGTERM as by [Launcher.Stop].
func Run(ctx context.Context, cfg Config) error {
	l, err := New(ctx, cfg)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { l.Stop(syscall.SIGTERM) })()
	err = l.StartAll()
	if waitErr := l.Wait(); err == nil {
		err = waitErr
	}
	_ = l.Linger(ctx) // ends with ctx
	return errors.Join(err, l.Close())
}

// Store returns the rendezvous, for the launcher's own use. It ends with Close.
func (l *Launcher) Store() rendezvous.Store { return l.store }

// URL is that of the rendezvous, as the ranks get it in SERRY_RENDEZVOUS.
func (l *Launcher) URL() string { return l.url }

// RunID is what the ranks get in TORCHELASTIC_RUN_ID.
func (l *Launcher) RunID() string { return l.cfg.RunID }

// StartAll starts every rank of this host. If one cannot be started, a [*StartError], those that were are stopped.
func (l *Launcher) StartAll() error {
	for _, r := range l.ranks {
		if err := l.Start(r.index); err != nil {
			l.stop(syscall.SIGKILL, "not all ranks could be started", false)
			return err
		}
	}
	return nil
}

// Start starts a rank that does not run. If it ran before, it gets SERRY_REJOIN and so joins its group anew.
func (l *Launcher) Start(index int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, err := l.rank(index)
	switch {
	case err != nil:
		return err
	case l.stopping > 0:
		return fmt.Errorf("rank %d: %w", index, ErrStopping)
	case r.state == waiting && r.timer.Stop(): // its restart, now
	case r.state == resting:
		l.active++
	default:
		return fmt.Errorf("rank %d: it runs already", index)
	}
	if err := l.begin(r); err != nil {
		if l.failed == nil {
			l.failed = &ExitError{Rank: r.index, Code: r.result.Code}
		}
		l.rest(r)
		return err
	}
	return nil
}

// Kill sends sig to the process of a rank (not to its children). A rank that does not run is an error, os.ErrProcessDone.
func (l *Launcher) Kill(index int, sig syscall.Signal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, err := l.rank(index)
	if err != nil {
		return err
	}
	if r.state != running {
		return fmt.Errorf("rank %d: %w", index, os.ErrProcessDone)
	}
	return r.cmd.Process.Signal(sig)
}

// Pid returns the process id of a rank, 0 if it does not run.
func (l *Launcher) Pid(index int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r, err := l.rank(index); err == nil {
		return r.pid()
	}
	return 0
}

func (l *Launcher) rank(index int) (*rank, error) {
	first := l.ranks[0].index
	if index < first || index >= first+len(l.ranks) {
		return nil, fmt.Errorf("rank %d: this launcher has ranks %d to %d", index, first, first+len(l.ranks)-1)
	}
	return l.ranks[index-first], nil
}

// Stop sends sig to every rank and its children, and SIGKILL to what is left after the grace. The second call sends
// SIGKILL at once. From the first on nothing is started again.
func (l *Launcher) Stop(sig syscall.Signal) { l.stop(sig, "the launcher got "+SignalName(sig), true) }

// stop is Stop; if itself is false, it is not the launcher that was stopped, but a failure that stops it, once.
func (l *Launcher) stop(sig syscall.Signal, reason string, itself bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopping > 0 && !itself {
		return
	}
	if l.stopping++; l.stopping > 1 {
		l.killAll()
		return
	}
	if itself {
		l.stopped = sig
	}
	for _, r := range l.ranks {
		if r.state == waiting && r.timer.Stop() {
			l.rest(r)
		}
	}
	if !slices.ContainsFunc(l.ranks, func(r *rank) bool { return r.state != resting }) {
		return
	}
	l.events.emit(Event{Kind: Stopping, Rank: -1, Signal: sig, Reason: reason})
	if sig == syscall.SIGKILL {
		l.killAll()
		return
	}
	for _, r := range l.ranks {
		if r.state == running {
			r.signalGroup(sig)
		}
	}
	l.killer = time.AfterFunc(l.cfg.Grace, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.killAll()
	})
}

// killAll ends what runs. l.mu is held.
func (l *Launcher) killAll() {
	for _, r := range l.ranks {
		if r.state == running {
			r.signalGroup(syscall.SIGKILL)
		}
	}
}

// Wait returns when no rank runs or waits for its restart. The error is nil if every rank has ended with exit code 0 at
// last, and otherwise an [*ExitError].
func (l *Launcher) Wait() error {
	l.mu.Lock()
	for l.active > 0 {
		l.idle.Wait()
	}
	err := l.outcome()
	l.mu.Unlock()
	code := 0
	if err != nil {
		code = err.Code
	}
	l.events.emit(Event{Kind: Finished, Rank: -1, Code: code})
	l.events.flush()
	if err != nil {
		return err
	}
	return nil
}

// outcome is that of the whole run. l.mu is held.
func (l *Launcher) outcome() *ExitError {
	if l.stopped != 0 {
		return &ExitError{Rank: -1, Code: 128 + int(l.stopped), Signal: l.stopped}
	}
	if l.failed != nil {
		if r, err := l.rank(l.failed.Rank); err == nil && r.result.Code != 0 {
			return l.failed
		} // else it was started again by hand, and ended well
	}
	for _, r := range l.ranks {
		if r.result.Code != 0 {
			return &ExitError{Rank: r.index, Code: r.result.Code, Signal: r.result.Signal}
		}
	}
	return nil
}

// Results returns how each rank of this host fared so far.
func (l *Launcher) Results() []Result {
	l.mu.Lock()
	defer l.mu.Unlock()
	results := make([]Result, len(l.ranks))
	for i, r := range l.ranks {
		results[i] = r.report()
	}
	return results
}

// Linger returns when the launchers of all other nodes are done with their ranks, if this one serves their rendezvous:
// they may need it. It does not wait for a node that was silent for 10 s or never came.
func (l *Launcher) Linger(ctx context.Context) error {
	if l.nodes == nil || l.server == nil {
		return nil
	}
	return l.nodes.linger(ctx)
}

// Close kills what still runs, and ends the rendezvous if this launcher serves it.
func (l *Launcher) Close() error {
	l.mu.Lock()
	l.stopping += 2
	for _, r := range l.ranks {
		if r.state == waiting && r.timer.Stop() {
			l.rest(r)
		}
	}
	l.killAll()
	for l.active > 0 {
		l.idle.Wait()
	}
	if l.killer != nil {
		l.killer.Stop()
	}
	l.mu.Unlock()
	if l.nodes != nil {
		l.nodes.leave()
	}
	l.tasks.Wait()
	l.events.close()
	for _, log := range l.logs {
		log.close()
	}
	return l.closeStore()
}

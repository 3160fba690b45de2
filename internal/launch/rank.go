package launch

import (
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

type state int

const (
	resting state = iota // not started yet, or ended for good
	running
	ending  // its process is dead, its last output is being read
	waiting // for its restart
)

// rank is one rank of this host. All fields are guarded by Launcher.mu.
type rank struct {
	index    int
	state    state
	cmd      *exec.Cmd
	starts   int
	first    time.Time     // of all starts
	began    time.Time     // of the last start
	ended    time.Time     // of the last end
	restarts int           // that were ours to make
	delay    time.Duration // before the latest of them
	timer    *time.Timer   // until the next
	result   Result        // Code and Signal of the last end
}

func (r *rank) pid() int {
	if r.state != running {
		return 0
	}
	return r.cmd.Process.Pid
}

func (r *rank) report() Result {
	res := Result{Rank: r.index, Pid: r.pid(), Restarts: max(r.starts-1, 0), Code: r.result.Code, Signal: r.result.Signal}
	switch {
	case r.starts == 0:
	case r.state == resting:
		res.Ended, res.Duration = true, r.ended.Sub(r.first)
	default:
		res.Duration = time.Since(r.first)
	}
	return res
}

// begin starts the process of r. l.mu is held, and r is counted as active.
func (l *Launcher) begin(r *rank) error {
	restart := r.starts
	cmd := exec.Command(l.cfg.Command[0], l.cfg.Command[1:]...)
	cmd.Env = l.environ(r, restart)
	cmd.SysProcAttr = ownGroup()
	var streams []*stream
	if l.cfg.Untagged {
		cmd.Stdout, cmd.Stderr = l.cfg.Stdout, l.cfg.Stderr
		cmd.WaitDelay = drainMost // for the copying that exec does if these are no files
	} else {
		var err error
		if streams, err = l.streams(r); err != nil {
			return r.notStarted(err)
		}
		cmd.Stdout, cmd.Stderr = streams[0].write, streams[1].write
	}
	err := cmd.Start()
	for _, s := range streams {
		_ = s.write.Close()
		if err != nil {
			_ = s.read.Close()
		}
	}
	now := time.Now()
	if r.starts == 0 {
		r.first = now
	}
	r.began, r.ended = now, now
	r.starts++
	if err != nil {
		return r.notStarted(err)
	}
	for _, s := range streams {
		l.tasks.Go(s.copy)
	}
	r.cmd, r.state = cmd, running
	l.events.emit(Event{Kind: Started, Rank: r.index, Pid: cmd.Process.Pid, Restarts: restart})
	l.tasks.Go(func() { l.watch(r, cmd, streams) })
	return nil
}

// notStarted notes why.
func (r *rank) notStarted(err error) error {
	e := startError(fmt.Errorf("rank %d: cannot start: %w", r.index, err))
	r.result.Code, r.result.Signal = e.Code, 0
	return e
}

func (l *Launcher) streams(r *rank) ([]*stream, error) {
	var log *logFile
	if l.logs != nil {
		log = l.logs[r.index-l.ranks[0].index]
		if r.starts > 0 {
			log.write(fmt.Appendf(nil, "---- restart %d ----\n", r.starts))
		}
	}
	var streams []*stream
	for which := range 2 {
		s, err := newStream(l.printer, which, tag(r.index, l.cfg.Color), log)
		if err != nil {
			for _, s := range streams {
				_, _ = s.read.Close(), s.write.Close()
			}
			return nil, err
		}
		streams = append(streams, s)
	}
	return streams, nil
}

// watch waits for the end of a process and decides what comes then.
func (l *Launcher) watch(r *rank, cmd *exec.Cmd, streams []*stream) {
	err := l.reap(r, cmd)
	for _, s := range streams {
		s.end()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r.ended = time.Now()
	r.result.Code, r.result.Signal = exitOf(cmd, err)
	l.events.emit(Event{
		Kind: Exited, Rank: r.index, Pid: cmd.Process.Pid, Restarts: r.starts - 1, Code: r.result.Code, Signal: r.result.Signal,
	})
	l.next(r)
}

func exitOf(cmd *exec.Cmd, err error) (int, syscall.Signal) {
	if cmd.ProcessState == nil {
		return 1, 0 // Wait itself failed: it was reaped by someone else
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), ws.Signal()
	}
	return cmd.ProcessState.ExitCode(), 0
}

// next decides what comes after an end of r, or after a start that failed. l.mu is held.
func (l *Launcher) next(r *rank) {
	switch {
	case r.result.Code == 0 || l.stopping > 0:
		l.rest(r)
	case l.cfg.MaxRestarts == Unlimited || r.restarts < l.cfg.MaxRestarts:
		r.restarts++
		if r.delay = 2 * r.delay; r.restarts == 1 || r.ended.Sub(r.began) > l.cfg.BackoffMax {
			r.delay = l.cfg.Backoff
		}
		r.delay = min(r.delay, l.cfg.BackoffMax)
		r.state = waiting
		l.events.emit(Event{
			Kind: Restarting, Rank: r.index, Restarts: r.starts, Code: r.result.Code, Signal: r.result.Signal, Delay: r.delay,
		})
		r.timer = time.AfterFunc(r.delay, func() { l.restart(r) })
	default:
		l.events.emit(Event{
			Kind: GaveUp, Rank: r.index, Restarts: r.starts - 1, Code: r.result.Code, Signal: r.result.Signal,
		})
		if l.failed == nil {
			l.failed = &ExitError{Rank: r.index, Code: r.result.Code, Signal: r.result.Signal}
		}
		if !l.cfg.FailFast {
			l.rest(r)
			return
		}
		r.state = resting // and counted as active until the others are told
		l.tasks.Go(func() {
			if l.nodes != nil {
				l.nodes.tellAll()
			}
			l.stop(syscall.SIGTERM, fmt.Sprintf("rank %d failed", r.index), false)
			l.mu.Lock()
			defer l.mu.Unlock()
			l.lessActive()
		})
	}
}

func (l *Launcher) restart(r *rank) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.state != waiting {
		return
	}
	if l.stopping > 0 {
		l.rest(r)
		return
	}
	if err := l.begin(r); err != nil {
		l.cfg.Log.Warn("a restart failed", "err", err)
		l.next(r)
	}
}

// rest counts r as no longer active. l.mu is held.
func (l *Launcher) rest(r *rank) {
	r.state = resting
	l.lessActive()
}

func (l *Launcher) lessActive() {
	if l.active--; l.active == 0 {
		l.idle.Broadcast()
	}
}

// environ is the environment of one start of r.
func (l *Launcher) environ(r *rank, restart int) []string {
	_, addr, _ := strings.Cut(l.url, "://")
	host, port, _ := net.SplitHostPort(addr)
	var env []string
	for _, v := range l.cfg.Env {
		// Of a launcher that is itself a rank; here it would make founders wait for a group.
		if !strings.HasPrefix(v, "SERRY_REJOIN=") && !strings.HasPrefix(v, "SERRY_PEERS=") {
			env = append(env, v)
		}
	}
	set := func(name, value string) { env = append(env, name+"="+value) }
	number := func(name string, n int) { set(name, strconv.Itoa(n)) }
	set("MASTER_ADDR", host)
	set("MASTER_PORT", port)
	number("RANK", r.index)
	number("LOCAL_RANK", r.index-l.ranks[0].index)
	number("WORLD_SIZE", l.cfg.world())
	number("LOCAL_WORLD_SIZE", l.cfg.Ranks)
	number("GROUP_RANK", l.cfg.Node)
	number("GROUP_WORLD_SIZE", l.cfg.Nodes)
	set("TORCHELASTIC_USE_AGENT_STORE", "True")
	// How often the whole group was restarted, which we never do: torch's env:// makes it part of every key.
	number("TORCHELASTIC_RESTART_COUNT", 0)
	number("TORCHELASTIC_MAX_RESTARTS", max(l.cfg.MaxRestarts, 0))
	set("TORCHELASTIC_RUN_ID", l.cfg.RunID)
	set("SERRY_RENDEZVOUS", l.url)
	if restart > 0 {
		number("SERRY_REJOIN", restart)
	}
	if l.cfg.RankEnv != nil {
		env = append(env, l.cfg.RankEnv(r.index, restart)...)
	}
	return env
}

// Package launch starts the ranks of a group on one host, as `serry run` does and as the demo does: it hosts the
// rendezvous, starts dead ranks again, passes their output on line by line, and leaves no process behind.
//
// The launcher is no member of the group. A rank's death is its business only in that it may start it again, and its own
// death ends no rank.
package launch

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Defaults of Config.
const (
	DefaultGrace      = 5 * time.Second
	DefaultBackoff    = 200 * time.Millisecond
	DefaultBackoffMax = 15 * time.Second
)

// Unlimited restarts, for Config.MaxRestarts.
const Unlimited = -1

// Config says what to start. Only Command is required.
type Config struct {
	Command []string // program and arguments
	Env     []string // environment of the ranks, "NAME=value"; what the launcher sets is added. Nil is empty

	// RankEnv, if set, returns variables to add for one start of a rank; restart is 0 for the first. It is called while the
	// launcher holds its lock: it must not block, nor call the Launcher.
	RankEnv func(rank, restart int) []string

	Ranks int // to start on this host, the same on each; default 1
	Nodes int // hosts, each with a launcher of its own; default 1
	Node  int // number of this host, from 0. Its ranks are Node*Ranks and following

	// Rendezvous is host:port of the store, which the launcher of node 0 serves; default a free port of 127.0.0.1. As
	// tcp://host:port or torch://host:port it is one that runs already (`serry rendezvous`), and RunID is required.
	Rendezvous string
	RunID      string // tells runs on one store apart; default random

	MaxRestarts int           // of each rank; default 0; Unlimited
	Backoff     time.Duration // before the first restart, then twice as long each time; default DefaultBackoff
	BackoffMax  time.Duration // and at most this; a rank that lived longer starts over; default DefaultBackoffMax
	FailFast    bool          // a rank that failed for good ends all, instead of letting the others go on
	Grace       time.Duration // from a signal that is passed on to SIGKILL; default DefaultGrace

	// Stdout and Stderr get the ranks' output, each line whole and with the rank before it. Nil drops it.
	Stdout, Stderr io.Writer
	Color          bool // colour the rank
	// Untagged hands Stdout and Stderr to the ranks as they are: their lines are not marked, and a rank that prints
	// after the launcher was killed goes on (otherwise it then writes to a broken pipe).
	Untagged bool
	LogDir   string // if set, gets a file rank-N.log for each rank

	// OnEvent, if set, is told what happens, one call at a time and in order. It may call all methods of the Launcher
	// but Wait and Close.
	OnEvent func(Event)
	Log     *slog.Logger // warnings; nil drops them
}

// UsageError is a Config that says nothing that can be done.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns all that is wrong, joined.
func (e *UsageError) Unwrap() error { return e.Err }

// ExitStatus is that of a command line which is wrong.
func (e *UsageError) ExitStatus() int { return 2 }

// StartError is a program that cannot be started.
type StartError struct {
	Code int // as a shell has it: 127 if it is not there, 126 if it is and cannot be run
	Err  error
}

func (e *StartError) Error() string { return e.Err.Error() }

// Unwrap returns what the system said.
func (e *StartError) Unwrap() error { return e.Err }

// ExitStatus is the Code.
func (e *StartError) ExitStatus() int { return e.Code }

func startError(err error) *StartError {
	code := 126
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, exec.ErrNotFound) {
		code = 127
	}
	return &StartError{code, err}
}

// fill sets defaults and returns all that is wrong.
func (c *Config) fill() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Grace, DefaultGrace)
	def(&c.Backoff, DefaultBackoff)
	def(&c.BackoffMax, DefaultBackoffMax)
	if c.Ranks == 0 {
		c.Ranks = 1
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Stdout == nil {
		c.Stdout = io.Discard
	}
	if c.Stderr == nil {
		c.Stderr = io.Discard
	}
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if len(c.Command) == 0 {
		fault("no program to start")
	}
	if c.Ranks < 0 || c.Nodes < 0 {
		fault("%d nodes of %d ranks: want at least 1", c.Nodes, c.Ranks)
	} else if c.Node < 0 || c.Node >= c.Nodes {
		fault("node %d of %d: nodes are numbered from 0", c.Node, c.Nodes)
	}
	if c.Grace < 0 || c.Backoff < 0 {
		fault("a grace of %v, a back-off of %v: want a time from 0", c.Grace, c.Backoff)
	}
	if c.BackoffMax < c.Backoff {
		fault("a longest back-off (%v) below the first (%v)", c.BackoffMax, c.Backoff)
	}
	if c.MaxRestarts < Unlimited {
		fault("%d restarts: 0 is none, %d is no limit", c.MaxRestarts, Unlimited)
	}
	if err := c.fillRendezvous(); err != nil {
		faults = append(faults, err)
	}
	if len(faults) > 0 {
		return &UsageError{errors.Join(faults...)}
	}
	path, err := exec.LookPath(c.Command[0])
	if err != nil {
		return startError(fmt.Errorf("cannot start %s: %w", c.Command[0], err))
	}
	c.Command = append([]string{path}, c.Command[1:]...)
	return nil
}

func (c *Config) fillRendezvous() error {
	if c.Rendezvous == "" {
		if c.Nodes > 1 {
			return errors.New("several nodes need a rendezvous: host:port of node 0, the same for all")
		}
		c.Rendezvous = "127.0.0.1:0"
	}
	scheme, addr, external := strings.Cut(c.Rendezvous, "://")
	if !external {
		addr = c.Rendezvous
	} else if scheme != "tcp" && scheme != "torch" {
		return fmt.Errorf("rendezvous %s: one that runs already is tcp://host:port or torch://host:port", c.Rendezvous)
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("rendezvous %s: write host:port (%w)", c.Rendezvous, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil:
		return fmt.Errorf("rendezvous %s: the port is a number up to 65535", c.Rendezvous)
	case host == "":
		return fmt.Errorf("rendezvous %s: name the host, as the ranks reach it", c.Rendezvous)
	case n == 0 && (c.Nodes > 1 || external):
		return fmt.Errorf("rendezvous %s: port 0 is for one node alone, the others must know the port", c.Rendezvous)
	case external && c.RunID == "":
		return fmt.Errorf("rendezvous %s: a rendezvous that outlives a run needs a run id (--run-id), new for each run", c.Rendezvous)
	}
	return nil
}

// serves reports whether this launcher is to serve the rendezvous.
func (c *Config) serves() bool { return c.Node == 0 && !strings.Contains(c.Rendezvous, "://") }

func (c *Config) world() int { return c.Nodes * c.Ranks }

func randomID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

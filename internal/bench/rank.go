package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

// rankArgs say what a process is to run. They travel as JSON in its last argument.
type rankArgs struct {
	Program    string // allreduce, ep, steps, idle
	Rank, Size int
	Dir        string // where the ranks meet
	Links      string
	Rejoin     bool          `json:",omitempty"`
	N          int           `json:",omitempty"` // calls to time
	Bytes      int           `json:",omitempty"`
	Shape      shape         `json:",omitzero"`  // of an ep step
	Resident   int64         `json:",omitempty"` // bytes to touch before a kill
	Pace       time.Duration `json:",omitempty"` // to sleep before each step
	Grave      string        `json:",omitempty"` // file for the time of death
	Profile    string        `json:",omitempty"`
}

// rank is a process that runs one of the programs.
type rank struct {
	rankArgs
	ctx  context.Context
	out  io.Writer
	told chan string // lines from the crew
}

var programs = map[string]func(*rank) error{
	"allreduce": (*rank).allreduce,
	"ep":        (*rank).ep,
	"steps":     (*rank).steps,
	"idle":      (*rank).idle,
}

// Rank is one rank of a measurement: what the command line Options.Self, with one more argument, has to call. It ends when
// in does.
func Rank(ctx context.Context, args string, in io.Reader, out io.Writer) error {
	r := &rank{ctx: ctx, out: out, told: make(chan string, 16)}
	if err := json.Unmarshal([]byte(args), &r.rankArgs); err != nil {
		return fmt.Errorf("bench: a rank is started by the other subcommands, not by hand: %w", err)
	}
	program := programs[r.Program]
	if program == nil {
		return fmt.Errorf("bench: no program %q", r.Program)
	}
	go func() {
		sc := bufio.NewScanner(in)
		for sc.Scan() {
			r.told <- sc.Text()
		}
		os.Exit(3) // who started us is gone
	}()
	if r.Profile != "" {
		f, err := os.Create(filepath.Join(r.Profile, fmt.Sprintf("%s.%d.pprof", r.Program, r.Rank)))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	if err := program(r); err != nil {
		return fmt.Errorf("rank %d: %w", r.Rank, err)
	}
	return nil
}

func (r *rank) say(format string, a ...any) { fmt.Fprintf(r.out, format+"\n", a...) }

// give hands a histogram over.
func (r *rank) give(name string, t times) error {
	text, err := t.text()
	if err != nil {
		return err
	}
	r.say("times %s\t%s", name, text)
	return nil
}

// join makes this process a member of the measurement's world.
func (r *rank) join() (*pg.World, error) {
	st, err := rendezvous.Open(r.ctx, "file://"+r.Dir)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	if name, _ := knob.Log.Get(); name != "off" {
		var level slog.Level
		if err := level.UnmarshalText([]byte(strings.ToUpper(name))); err == nil {
			log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", r.Rank)
		}
	}
	return pg.Join(r.ctx, pg.Config{
		Rank: r.Rank, Size: r.Size, Store: st, Links: r.Links, Rejoin: r.Rejoin, Log: log,
		Options: pg.Options{Mode: pg.Continue},
	})
}

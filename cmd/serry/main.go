// Command serry starts groups of ranks, and looks at them.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// Exit codes beside those of the ranks. Help says them too.
const (
	exitFailed = 1
	exitUsage  = 2
)

const help = `Groups of processes that keep answering while members die and come back.

Exit codes of all commands: 0 when all went well, 1 for a failure, 2 for a wrong command line (nothing was done), 130
after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (but 0 of serry rendezvous, which ends no other way). serry run passes
on that of a rank which failed.`

// root is the command with all its subcommands: a file and a line each.
func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "serry",
		Short:         "Groups of processes that keep answering while members die and come back",
		Long:          help,
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	cmd.CompletionOptions.HiddenDefaultCmd = true
	cmd.AddCommand(
		runCommand(),
		benchCommand(),
		simCommand(),
		chaosCommand(),
		rendezvousCommand(),
		envCommand(),
		versionCommand(),
	)
	cmd.InitDefaultCompletionCmd()
	cmd.SetHelpCommand(helpCommand())
	groups(cmd)
	return cmd
}

// groups has each command that does nothing itself say what it has, and refuse what it has not.
func groups(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.HasSubCommands() && !c.Runnable() {
			c.Args = cobra.NoArgs
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
		groups(c)
	}
}

func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]...",
		Short: "Explain a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, rest, err := cmd.Root().Find(args)
			if err == nil && len(rest) > 0 {
				err = fmt.Errorf("unknown command %q for %q", rest[0], c.CommandPath())
			}
			if err != nil {
				return &exitCode{exitUsage, err}
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

// run is main without the process around it.
func run(args []string, stdout, stderr io.Writer) int {
	cmd := root()
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	started := false // so that what fails before is the caller's use of it
	cmd.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	c, err := cmd.ExecuteC()
	if err == nil {
		return 0
	}
	code := exitFailed
	var known interface{ ExitStatus() int }
	switch {
	case errors.As(err, &known):
		code = known.ExitStatus()
	case !started:
		code = exitUsage
	}
	text := err.Error()
	if text == "" { // it is a rank's, and was told
		return code
	}
	for _, line := range strings.Split(text, "\n") { // cobra's suggestions have empty ones
		if line = strings.TrimSpace(line); line != "" {
			fmt.Fprintln(stderr, "serry:", line)
		}
	}
	if code == exitUsage {
		fmt.Fprintf(stderr, "See %s --help.\n", c.CommandPath())
	}
	return code
}

// exitCode is an error of a subcommand that wants a certain exit code. Without err nothing is printed.
type exitCode struct {
	code int
	err  error
}

func (e *exitCode) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

// ExitStatus is the code.
func (e *exitCode) ExitStatus() int { return e.code }

// oneAtATime lets several goroutines write to w.
type oneAtATime struct {
	mu *sync.Mutex
	w  io.Writer
}

func (o oneAtATime) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.w.Write(b)
}

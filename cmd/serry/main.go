// Command serry starts groups of ranks, and looks at them.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// Exit codes beside those of the ranks.
const (
	exitFailed = 1
	exitUsage  = 2
)

// root is the command with all its subcommands: a file and a line each.
func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "serry",
		Short:         "Groups of processes that keep answering while members die and come back",
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	cmd.CompletionOptions.HiddenDefaultCmd = true
	cmd.AddCommand(
		runCommand(),
		benchCommand(),
		rendezvousCommand(),
		envCommand(),
		versionCommand(),
	)
	return cmd
}

// run is main without the process around it.
func run(args []string, stdout, stderr io.Writer) int {
	cmd := root()
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	started := false // so that what fails before is the caller's use of it
	cmd.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	err := cmd.Execute()
	var code *exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		if code.err != nil {
			fmt.Fprintln(stderr, "serry:", code.err)
		}
		return code.code
	case started:
		fmt.Fprintln(stderr, "serry:", err)
		return exitFailed
	}
	fmt.Fprintf(stderr, "serry: %v\nSee serry --help, or serry COMMAND --help.\n", err)
	return exitUsage
}

// exitCode is an error of a subcommand that wants a certain exit code. Without err nothing is printed.
type exitCode struct {
	code int
	err  error
}

func (e *exitCode) Error() string { return fmt.Sprintf("exit code %d", e.code) }

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

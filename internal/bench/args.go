package bench

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/slots"
)

// UsageError is a measurement that cannot be meant: values of flags that do not go together, or not at all.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns all that is wrong, joined.
func (e *UsageError) Unwrap() error { return e.Err }

// ExitStatus is that of a command line which is wrong.
func (e *UsageError) ExitStatus() int { return 2 }

// most is beyond what anybody waits for, and far from where numbers overflow.
const most = 1 << 40

// checks collects what is wrong with the values of flags.
type checks []error

// that refuses the value of a flag unless ok.
func (c *checks) that(ok bool, flag string, value any, want string, a ...any) {
	if !ok {
		*c = append(*c, fmt.Errorf("--%s %v: want %s", flag, value, fmt.Sprintf(want, a...)))
	}
}

func (c *checks) number(flag string, v, low, high int) {
	c.that(low <= v && v <= high, flag, v, "a number from %d to %d", low, high)
}

func (c *checks) ranks(v, low int) { c.number("ranks", v, low, slots.Max) }

func (c *checks) links(v string) { c.that(v == "auto" || v == "tcp", "links", v, "auto or tcp") }

func (c *checks) shape(s shape, ranks, replicas int) {
	c.number("tokens", s.Tokens, 1, 1<<20)
	c.number("hidden", s.Hidden, 1, 1<<20)
	c.number("experts", s.Experts, 1, 1<<16)
	c.that(1 <= s.TopK && s.TopK <= s.Experts, "topk", s.TopK, "a number from 1 to that of the experts, %d", s.Experts)
	c.that(replicas <= s.Replicas && s.Replicas <= ranks, "replicas", s.Replicas, "a number from %d to that of the ranks, %d", replicas, ranks)
}

func (c checks) err() error {
	if len(c) == 0 {
		return nil
	}
	return &UsageError{errors.Join(c...)}
}

// size is a flag: a number of bytes, with KiB, MiB or GiB if wanted.
type size int64

func (s *size) String() string { return strings.ReplaceAll(sizeText(int64(*s)), " ", "") }

// Type is what help calls the value.
func (s *size) Type() string { return "bytes" }

// Set takes the value.
func (s *size) Set(text string) error {
	unit := int64(1)
	for name, u := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if rest, ok := strings.CutSuffix(text, name); ok {
			text, unit = strings.TrimSpace(rest), u
		}
	}
	n, err := strconv.ParseInt(strings.TrimSuffix(text, "B"), 10, 64)
	if err != nil || n < 0 || n > most/unit {
		return errors.New("want a number of bytes, such as 8, 64KiB, 256MiB or 1GiB")
	}
	*s = size(n * unit)
	return nil
}

// resultFile is where a result will be written. What is there stays until then.
type resultFile struct {
	file  *os.File
	fresh bool // it was not there
}

// openResult finds out now what would otherwise fail after a long measurement.
func openResult(name string) (*resultFile, error) {
	_, err := os.Stat(name)
	r := &resultFile{fresh: errors.Is(err, os.ErrNotExist)}
	if r.file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o644); err != nil {
		return nil, fmt.Errorf("--json: %w", err)
	}
	return r, nil
}

// write replaces what is there.
func (r *resultFile) write(b []byte) error {
	_ = r.file.Truncate(0) // what cannot be cut is a pipe or a terminal
	_, err := r.file.Write(b)
	if closeErr := r.file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}

// giveUp leaves things as they were.
func (r *resultFile) giveUp() {
	if r.file.Close() == nil && r.fresh { // else it was written
		_ = os.Remove(r.file.Name())
	}
}

// part of a whole, at least 1.
func part(of int, p float64) int { return max(1, int(float64(of)*p)) }

// partOf is a part of a time, long enough to measure something.
func partOf(d time.Duration, p float64) time.Duration {
	return max(100*time.Millisecond, time.Duration(float64(d)*p))
}

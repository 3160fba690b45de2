package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// What the cause of an [*Error] may be, for errors.Is; besides these the context's error, or that of the system.
var (
	ErrBadURL         = errors.New("not the URL of a rendezvous")
	ErrBadKey         = errors.New("bad key")
	ErrTooLarge       = errors.New("value too large")
	ErrFull           = errors.New("the store is full")
	ErrNotNumber      = errors.New("the value is not a number")
	ErrClosed         = errors.New("the store is closed")
	ErrNotRendezvous  = errors.New("what answers there is no rendezvous")
	ErrRestarted      = errors.New("the server was restarted and has forgotten everything")
	ErrUnknownOutcome = errors.New("the connection was lost before the answer, so it may have happened or not")
	ErrCorrupt        = errors.New("damaged file")
)

// Error says which store failed, at what, and what a person can do about it.
type Error struct {
	Store string // URL of the store
	Op    string // open, connect, get, set, wait, add, compare-and-set, listen
	Key   string // the key, or some of the keys; empty if none is concerned
	Err   error  // the cause
	Hint  string // what to do; may be empty
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rendezvous %s: %s", e.Store, e.Op)
	if e.Key != "" {
		fmt.Fprintf(&b, " %s", quoteKey(e.Key))
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if e.Hint != "" {
		fmt.Fprintf(&b, "; %s", e.Hint)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// quoteKey keeps a message readable when a key is long or binary.
func quoteKey(key string) string {
	const most = 80
	if len(key) > most {
		return fmt.Sprintf("%s... (%d bytes)", strconv.Quote(key[:most]), len(key))
	}
	return strconv.Quote(key)
}

const (
	hintWait   = "another rank sets it: has every rank started, and with the same rendezvous?"
	hintServer = "is the launcher (or rank 0, if it hosts the rendezvous) running, and does its address reach from here?"
	hintURL    = "write mem://name, file:///directory, tcp://host:port or torch://host:port"
	hintReopen = "open it anew; what was in it before is gone"
	hintOther  = "is another program listening on that port? Compare host and port with those of the launcher"
	hintSilent = "is another program listening on that port (torch's store is torch://, not tcp://), or is the launcher stopped?"
	hintClosed = "is another program listening on that port, or a proxy before a server that is not up?"
)

// waitedError is the end of a wait. It reads "no answer after 10s (connection refused)".
type waitedError struct {
	what  string
	after time.Duration
	cause error // the error of the context that ended it; nil if a limit of ours did
	last  error // the last failure meanwhile, may be nil
}

func (e *waitedError) Error() string {
	s := e.what
	if errors.Is(e.cause, context.Canceled) {
		s = "canceled, " + s
	}
	s += " after " + roundDuration(e.after).String()
	if e.last != nil {
		s += " (" + shortCause(e.last) + ")"
	}
	return s
}

// Unwrap does not pass on that one attempt timed out: that is not the caller's deadline.
func (e *waitedError) Unwrap() []error {
	var causes []error
	if e.cause != nil {
		causes = append(causes, e.cause)
	}
	if e.last != nil && !errors.Is(e.last, context.DeadlineExceeded) && !errors.Is(e.last, context.Canceled) {
		causes = append(causes, e.last)
	}
	return causes
}

func roundDuration(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Millisecond)
}

// shortCause drops the addresses that the message around it has already.
func shortCause(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err.Error()
	}
	return err.Error()
}

// ctxError is the cause to report for a wait since the given time that ctx has ended.
func ctxError(ctx context.Context, what string, since time.Time, last error) error {
	return &waitedError{what: what, after: time.Since(since), cause: ctx.Err(), last: last}
}

func checkKey(key string) error {
	if key == "" {
		return fmt.Errorf("%w: it is empty", ErrBadKey)
	}
	if len(key) > MaxKey {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrBadKey, len(key), MaxKey)
	}
	return nil
}

func checkValue(value []byte) error {
	if len(value) > MaxValue {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(value), MaxValue)
	}
	return nil
}

// isInUse reports whether listening failed because another socket has the port.
func isInUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

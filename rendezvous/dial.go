package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// OpenTimeout is how long Open tries to reach a server if its context has no deadline.
	OpenTimeout = 60 * time.Second

	reconnectTime = 5 * time.Second // to mend a lost connection
	dialPauseMin  = 10 * time.Millisecond
	dialPauseMax  = time.Second

	// How long a server may take to greet back, and after how many connections without a greeting it is no rendezvous.
	// Torch's server takes longer: it asks for the name of each client first, which costs 5 s and more where no name
	// server answers.
	answerTime  = 3 * time.Second
	silentTries = 2
	torchTime   = 10 * time.Second
	torchTries  = 3
	webTime     = time.Second // for a web server to answer what it cannot read
)

// past is a deadline that ends what is in progress.
var past = time.Unix(1, 0)

// guard ends the reads and writes of conn when ctx ends. The returned function stops that; after it, no deadline is set.
func guard(ctx context.Context, conn net.Conn) (release func()) {
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = conn.SetDeadline(past)
		close(fired)
	})
	return func() {
		if !stop() {
			<-fired
			_ = conn.SetDeadline(time.Time{})
		}
	}
}

// dial connects to addr and greets, again and again until that works, ctx ends, or what answers is not what we want: one
// that greets otherwise, or takes connections and stays silent. One that closes them may be a proxy before a server that
// is not up yet.
func dial(ctx context.Context, url, addr string, most time.Duration, greet func(net.Conn) error) (net.Conn, error) {
	fail := func(err error, hint string) (net.Conn, error) {
		return nil, &Error{Store: url, Op: "connect", Err: err, Hint: hint}
	}
	if err := checkAddr(addr, 1); err != nil {
		return fail(fmt.Errorf("%w: %w", ErrBadURL, err), "write host:port")
	}
	caller := ctx
	if _, ok := ctx.Deadline(); !ok || most < OpenTimeout {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, most)
		defer cancel()
	}
	since, pause := time.Now(), dialPauseMin
	v := visit{addr: addr, answer: torchTime, tries: torchTries, asked: true, hint: hintServer}
	if strings.HasPrefix(url, "tcp://") {
		v.answer, v.tries, v.asked = answerTime, silentTries, false
	}
	for {
		conn, err := dialOnce(ctx, addr, v.answer, greet)
		if err == nil {
			return conn, nil
		}
		if hint, final := v.judge(ctx, err); final != nil {
			return fail(final, hint)
		}
		select {
		case <-ctx.Done():
			return fail(ctxError(caller, "no answer", since, v.last), v.hint)
		case <-time.After(pause):
			pause = min(2*pause, dialPauseMax)
		}
	}
}

// visit is what dial has found at an address so far.
type visit struct {
	addr   string
	answer time.Duration // for a greeting
	tries  int           // without one
	silent int           // connections without one
	asked  bool          // with torch's protocol
	torch  bool          // and got an answer
	last   error
	hint   string // about last
}

// judge takes in how an attempt has failed. If another one is of no use, it says why and what to do.
func (v *visit) judge(ctx context.Context, err error) (hint string, final error) {
	ended := ctx.Err() != nil
	switch {
	case errors.Is(err, ErrNotRendezvous):
		return hintOther, err
	case errors.Is(err, ErrRestarted):
		return hintReopen, err
	case ended && v.last != nil: // that is why it failed
		return "", nil
	}
	v.last, v.hint = err, hintServer
	switch {
	case errors.Is(err, errSilent):
		v.hint = hintSilent
		v.silent++
	case errors.Is(err, errClosed):
		v.hint = hintClosed
	default:
		return "", nil
	}
	switch {
	case ended:
		return "", nil
	case v.torch:
		return "write torch://" + v.addr, fmt.Errorf("%w of ours: it is a TCPStore of torch", ErrNotRendezvous)
	case !v.asked:
		v.asked = true
		// Our own server would answer too, if it could not before: so our protocol gets another try.
		conn, err := dialOnce(ctx, v.addr, v.answer, torchGreet)
		if err == nil {
			_ = conn.Close()
			v.torch = true
			return "", nil
		}
		if errors.Is(err, errSilent) {
			v.silent++
		}
	}
	if v.silent >= v.tries && ctx.Err() == nil {
		return hintSilent, fmt.Errorf("%w: %w within %v", ErrNotRendezvous, errSilent, v.answer)
	}
	return "", nil
}

// How a server does not greet.
var (
	errSilent = errors.New("it accepts connections and does not greet")
	errClosed = errors.New("it accepts connections and closes them without a greeting")
)

// checkAddr refuses what no attempt to connect can mend, and no attempt to listen.
func checkAddr(addr string, leastPort uint64) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n < leastPort {
		return fmt.Errorf("port %q is no number from %d to 65535", port, leastPort)
	}
	return nil
}

// dialOnce connects and greets, and gives the server so long to greet back.
func dialOnce(ctx context.Context, addr string, answer time.Duration, greet func(net.Conn) error) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	hurry, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	release := guard(hurry, conn)
	err = greet(conn)
	release()
	if err == nil {
		return conn, nil
	}
	defer func() { _ = conn.Close() }()
	switch {
	case errors.Is(err, ErrNotRendezvous) || errors.Is(err, ErrRestarted):
	case hurry.Err() != nil && ctx.Err() == nil && isWeb(conn):
		err = errWeb
	case hurry.Err() != nil:
		err = errSilent
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET):
		err = errClosed
	}
	return nil, err
}

// isWeb says whether a server that stays silent waits for the end of a request: then it complains about ours.
func isWeb(conn net.Conn) bool {
	if conn.SetDeadline(time.Now().Add(webTime)) != nil {
		return false
	}
	b := make([]byte, len(webBegins))
	_, _ = io.WriteString(conn, "\r\n\r\n")
	_, _ = io.ReadFull(conn, b)
	return string(b) == webBegins
}

const webBegins = "HTTP"

var errWeb = fmt.Errorf("%w: it is a web server", ErrNotRendezvous)

// foreign is about a server whose answer begins with b. A web server answers at once where our greeting, which has random
// bytes, happens to end a line; else see isWeb.
func foreign(b []byte) error {
	err := ErrNotRendezvous
	if strings.HasPrefix(string(b), webBegins) {
		err = errWeb
	}
	return fmt.Errorf("%w: it began with %q", err, b[:min(len(b), 16)])
}

// readGreeting fills b, which has to begin with want. It does not wait for the rest of one that begins otherwise.
func readGreeting(conn net.Conn, b, want []byte) error {
	for n := 0; n < len(b); {
		m, err := conn.Read(b[n:])
		n += m
		if k := min(n, len(want)); !bytes.Equal(b[:k], want[:k]) {
			return foreign(b[:n])
		}
		if err != nil && n < len(b) {
			return err
		}
	}
	return nil
}

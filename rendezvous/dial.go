package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"syscall"
	"time"
)

const (
	// OpenTimeout is how long Open tries to reach a server if its context has no deadline.
	OpenTimeout = 60 * time.Second

	reconnectTime = 5 * time.Second // to mend a lost connection
	answerTime    = 3 * time.Second // for a server to greet back
	silentTries   = 2               // connections without a greeting after which it is no rendezvous
	dialPauseMin  = 10 * time.Millisecond
	dialPauseMax  = time.Second
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
	since, pause, silent := time.Now(), dialPauseMin, 0
	var last error
	for {
		conn, err := dialOnce(ctx, addr, greet)
		switch {
		case err == nil:
			return conn, nil
		case errors.Is(err, ErrNotRendezvous):
			return fail(err, hintOther)
		case errors.Is(err, ErrRestarted):
			return fail(err, hintReopen)
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		hint := hintServer
		switch {
		case errors.Is(err, errSilent):
			if silent++; silent == silentTries {
				return fail(fmt.Errorf("%w: %w within %v", ErrNotRendezvous, err, answerTime), hintSilent)
			}
			hint = hintSilent
		case errors.Is(last, errClosed):
			hint = hintClosed
		}
		select {
		case <-ctx.Done():
			return fail(ctxError(caller, "no answer", since, last), hint)
		case <-time.After(pause):
			pause = min(2*pause, dialPauseMax)
		}
	}
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

func dialOnce(ctx context.Context, addr string, greet func(net.Conn) error) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	hurry, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	release := guard(hurry, conn)
	err = greet(conn)
	release()
	if err == nil {
		return conn, nil
	}
	_ = conn.Close()
	switch {
	case errors.Is(err, ErrNotRendezvous) || errors.Is(err, ErrRestarted):
	case hurry.Err() != nil:
		err = errSilent
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET):
		err = errClosed
	}
	return nil, err
}

// readGreeting fills b, which has to begin with want. It does not wait for the rest of one that begins otherwise.
func readGreeting(conn net.Conn, b, want []byte) error {
	for n := 0; n < len(b); {
		m, err := conn.Read(b[n:])
		n += m
		if k := min(n, len(want)); !bytes.Equal(b[:k], want[:k]) {
			return fmt.Errorf("%w: it began with %q", ErrNotRendezvous, b[:n])
		}
		if err != nil && n < len(b) {
			return err
		}
	}
	return nil
}

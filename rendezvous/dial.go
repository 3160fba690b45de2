package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

const (
	// OpenTimeout is how long Open tries to reach a server if its context has no deadline.
	OpenTimeout = 60 * time.Second

	reconnectTime = 5 * time.Second  // to mend a lost connection
	answerTime    = 10 * time.Second // for a server to greet back
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

// dial connects to addr and greets, again and again until that works, ctx ends, or what answers is not what we want.
func dial(ctx context.Context, url, addr string, most time.Duration, greet func(net.Conn) error) (net.Conn, error) {
	fail := func(err error, hint string) (net.Conn, error) {
		return nil, &Error{Store: url, Op: "connect", Err: err, Hint: hint}
	}
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return fail(fmt.Errorf("%w: %w", ErrBadURL, err), "write host:port")
	}
	caller := ctx
	if _, ok := ctx.Deadline(); !ok || most < OpenTimeout {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, most)
		defer cancel()
	}
	since, pause, hint := time.Now(), dialPauseMin, hintServer
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
		if hint = hintServer; errors.Is(last, errSilent) {
			hint = hintOther
		}
		select {
		case <-ctx.Done():
			return fail(ctxError(caller, "no answer", since, last), hint)
		case <-time.After(pause):
			pause = min(2*pause, dialPauseMax)
		}
	}
}

// errSilent is a server that takes connections and says nothing.
var errSilent = errors.New("it accepts connections and does not greet")

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
	if hurry.Err() != nil {
		err = errSilent
	}
	return nil, err
}

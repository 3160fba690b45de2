// Package rendezvous is how the ranks of a group find each other: a small key-value store that all of them reach, in
// memory, in a directory, or over TCP, where one port answers both our own clients and those of torch.distributed's
// TCPStore.
//
// It is for the minutes in which a group is founded. Nothing in it is on the path of a collective, and a founded group
// outlives it.
package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Limits of every store, in bytes. Torch's default server allows them too, so that a program that works on one store
// works on all. A [Prefix] counts towards the key.
const (
	MaxKey   = 4 << 10
	MaxValue = 8 << 20
)

// Store is a map from keys to values that all ranks of a group share.
//
// Order. Each call takes effect at one instant between its start and its return, and all processes see these instants
// in one order. A key, once set, stays set (only programs of torch can delete one).
//
// Blocking. Get and Wait wait for keys that are not there yet; nothing else waits for another rank. Every call ends
// when its context does, whatever the server or the network are doing, and its error then unwraps to
// context.DeadlineExceeded or context.Canceled. Without a deadline in ctx a wait has none.
//
// Concurrency. All methods may be called from many goroutines at once; a waiting call holds up no other.
//
// Ownership. Keys and values are copied: after the return a caller may change what it passed and what it got.
//
// Keys are 1 to [MaxKey] bytes, values 0 to [MaxValue]; any bytes. An empty value is a value: its key exists.
//
// Errors are of type [*Error], which names store, operation and key and says what to do. A store over a network mends a
// lost connection once per call. It is bound to one run of its server: when that was restarted, and so has forgotten
// everything, our own protocol returns [ErrRestarted] (torch's cannot tell).
type Store interface {
	// Get returns the value of key, and waits until there is one.
	Get(ctx context.Context, key string) ([]byte, error)

	// Set stores value under key, over an earlier one if there is one.
	Set(ctx context.Context, key string, value []byte) error

	// Wait returns when each key has been set. Without keys it returns at once.
	Wait(ctx context.Context, keys ...string) error

	// Add adds delta to the number stored under key (0 if there is none) and returns the sum, which wraps around like
	// an int64. The number is stored as decimal text, so that Get reads it and Set can start it. A value that is not a
	// number is an error, [ErrNotNumber], and stays.
	Add(ctx context.Context, key string, delta int64) (int64, error)

	// CompareAndSet stores desired under key if the value there equals expected, or if expected is empty and the key is
	// not there. It returns the value that is there afterwards, nil if there is none. So with expected empty, which is
	// how a group is founded, one caller of many finds its own value in the answer and the others find that one's.
	CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error)

	// Close releases what this Store holds; calls in progress and later ones return [ErrClosed]. Values stay where
	// they are, unless this process hosts them. Closing twice is allowed.
	Close() error
}

// Open returns the store that rawURL names:
//
//	mem://name         in this process; the same name is the same store until its last handle is closed
//	file:///directory  in a directory, also a shared one, made if the one around it exists; one for each run
//	tcp://host:port    a [Server], in our own protocol
//	torch://host:port  a TCPStore of torch.distributed, or a [Server]
//
// A server that is not up yet is tried again until ctx ends, without a deadline in ctx for [OpenTimeout]. Another program
// at its address is [ErrNotRendezvous] within seconds, for torch:// within half a minute if it says nothing at all.
func Open(ctx context.Context, rawURL string) (Store, error) {
	scheme, rest, err := parseURL(rawURL)
	if err != nil {
		return nil, &Error{Store: rawURL, Op: "open", Err: err, Hint: hintURL}
	}
	switch scheme {
	case "mem":
		return openMem(rest), nil
	case "file":
		return OpenFile(ctx, rest)
	case "tcp":
		return DialTCP(ctx, rest)
	}
	return DialTorch(ctx, rest)
}

// parseURL returns the scheme, one of four, and the name, path or address after it.
func parseURL(rawURL string) (scheme, rest string, err error) {
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if !ok {
		return "", "", fmt.Errorf("%w: no scheme", ErrBadURL)
	}
	switch scheme {
	case "mem":
	case "file":
		var u *url.URL
		if u, err = url.Parse(rawURL); err == nil && (u.Host != "" || u.Path == "") {
			err = errors.New("a path begins with a third slash")
		}
		if err == nil {
			rest = u.Path
		}
	case "tcp", "torch":
		rest = strings.TrimSuffix(rest, "/")
		err = checkAddr(rest, 1)
	default:
		err = fmt.Errorf("unknown scheme %q", scheme)
	}
	if err != nil {
		return "", "", fmt.Errorf("%w: %w", ErrBadURL, err)
	}
	return scheme, rest, nil
}

// Package witness keeps the vote that decides between two halves of a world: one register per world, outside of it, that
// changes only by compare-and-set. What it holds, and what a half does with it, is said in package fault; here it is bytes.
//
//	a rank (pg) ---- Swap ----> Witness ----> etcd (package witness/etcd), or a Memory in tests
//
// A witness that cannot be reached, has lost its register or is asked too late costs at worst a half that stops. One that
// forgets a swap that it has answered, or that goes back to an earlier one (an etcd that is restored from a backup), lets
// two halves go on: remove the registers before such a restore is used.
package witness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
)

// MaxVote is the most bytes that a register is sure to hold: the members of the largest world and their cuts are far less.
const MaxVote = 1 << 20

// ErrExists: the world has a register already.
var ErrExists = errors.New("witness: the world has a register already")

// Witness is the register of one world. Its methods may be called by several goroutines, return soon after ctx ends, and
// name in their errors who was asked and what to do.
type Witness interface {
	// Create makes the register with its first contents. Only the founder calls it, before another process can know the
	// world: a member that made a register anew would forget what was voted. ErrExists: there is one.
	Create(ctx context.Context, vote []byte) error
	// Swap stores new if the register holds old, byte for byte, and returns what it holds then: new if it was swapped, or
	// swapped before. Empty: there is no register, and none is made. After an error it may be swapped, or be swapped later.
	Swap(ctx context.Context, old, new []byte) (held []byte, err error)
	// Remove ends the world: there is no register, and nobody gets a vote any more. It is no error if there is none.
	Remove(ctx context.Context) error
	// Close ends the use of it, and leaves the register as it is.
	Close() error
}

// Opener makes the Witness of a world, named by letters, digits and -. It may return before the witness can be reached.
type Opener func(url, world string, log *slog.Logger) (Witness, error)

var (
	mu      sync.Mutex
	openers = map[string]Opener{}
)

// Register makes a kind of witness known by the scheme of its URLs. Packages that have one do it when they are linked in.
func Register(scheme string, open Opener) {
	mu.Lock()
	defer mu.Unlock()
	if openers[scheme] != nil {
		panic("witness: two packages for " + scheme + "://")
	}
	openers[scheme] = open
}

// Open makes the Witness that a URL names: etcd://host:port,... if witness/etcd is linked in.
func Open(url, world string, log *slog.Logger) (Witness, error) {
	scheme, _, ok := strings.Cut(url, "://")
	mu.Lock()
	open := openers[scheme]
	var known []string
	for s := range openers {
		known = append(known, s+"://")
	}
	mu.Unlock()
	if !ok || open == nil {
		slices.Sort(known)
		if len(known) == 0 {
			return nil, fmt.Errorf("witness: %q: this program has no kind of witness in it: import github.com/serry-project/serry/witness/etcd", url)
		}
		return nil, fmt.Errorf("witness: %q is no witness: this program knows %s", url, strings.Join(known, ", "))
	}
	if world == "" || strings.Trim(world, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") != "" {
		return nil, fmt.Errorf("witness: %q is no name of a world: letters, digits and - are", world)
	}
	return open(url, world, log)
}

// Package etcd is a witness in an etcd, which the URL names as users of etcdctl expect:
//
//	etcd://host:2379,host2:2379,host3:2379/prefix?user=NAME&password-file=FILE&ttl=24h
//	etcds://host:2379?cacert=FILE&cert=FILE&key=FILE        over TLS (etcdctl's --cacert, --cert, --key)
//
// The register of a world is one key, /prefix/witness/WORLD (prefix: serry). It holds the last vote only; nothing is kept
// of earlier epochs. It hangs on a lease of ttl, which each member that lives refreshes: when all of them have been gone,
// or without a way to the etcd, for so long, it expires. That is safe, because no member makes it again: a process that was
// stopped all that time and goes on finds no register, and gets no vote. A world that is left in order removes its key.
//
// Each endpoint has a client of its own. A question goes to the one that answered last, and, if it fails or takes its
// time, to the next one besides: the compare-and-set may arrive twice. A cut that takes one half of the world takes a
// member of the etcd with it as a rule, and the vote is needed then, within tenths of a second.
package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/serry-project/serry/witness"
)

func init() {
	open := func(url, world string, log *slog.Logger) (witness.Witness, error) {
		o, err := Parse(url)
		if err != nil {
			return nil, err
		}
		return Open(o, world, log)
	}
	witness.Register("etcd", open)
	witness.Register("etcds", open)
}

// Etcd is the register of one world. It implements witness.Witness.
type Etcd struct {
	opts Options
	key  string
	ends []*endpoint
	last atomic.Int32 // the endpoint that answered last
	log  *slog.Logger
	ctx  context.Context // ends with Close
	stop context.CancelFunc

	mu     sync.Mutex
	closed bool
	bg     sync.WaitGroup // everything that is under way
}

// errClosed: what was asked after Close.
var errClosed = errors.New("witness: it is closed")

// Open makes the witness of a world, and does not wait for the etcd: Create, which the founder calls, says if there is none.
func Open(o Options, world string, log *slog.Logger) (*Etcd, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &Etcd{opts: o, key: "/" + o.Prefix + "/witness/" + world, log: log, ctx: ctx, stop: stop}
	for _, a := range o.Endpoints {
		w.ends = append(w.ends, &endpoint{addr: a})
	}
	w.bg.Go(w.keep)
	return w, nil
}

type answer[T any] struct {
	v   T
	err error
	end int
}

// ask asks the endpoints, one after the other and without waiting for long, and returns the first answer. What f does may
// be done more than once, and be done after ask has returned.
func ask[T any](ctx context.Context, w *Etcd, what string, f func(context.Context, *clientv3.Client) (T, error)) (T, error) {
	var zero T
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return zero, errClosed
	}
	w.bg.Add(1)
	w.mu.Unlock()
	defer w.bg.Done()
	begin := time.Now()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, w.opts.DialTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.ctx, cancel)()
	until, _ := ctx.Deadline()
	next := time.NewTimer(0)
	defer next.Stop()
	answers := make(chan answer[T], len(w.ends))
	first := int(w.last.Load())
	errs := make([]error, len(w.ends))
	asked, failed := 0, 0
	for {
		select {
		case <-next.C:
			if asked == len(w.ends) {
				continue
			}
			i := (first + asked) % len(w.ends)
			asked++
			w.bg.Go(func() {
				c, err := w.ends[i].client(w.ctx, &w.opts)
				a := answer[T]{err: err, end: i}
				if err == nil {
					a.v, a.err = f(ctx, c)
				}
				answers <- a
			})
			next.Reset(time.Until(until) / time.Duration(2*len(w.ends)))
		case a := <-answers:
			if a.err == nil {
				w.last.Store(int32(a.end))
				return a.v, nil
			}
			errs[a.end] = a.err
			if failed++; failed == len(w.ends) {
				return zero, w.failed(what, time.Since(begin), errs)
			}
			next.Reset(0)
		case <-ctx.Done():
			for i := range asked {
				if k := (first + i) % len(w.ends); errs[k] == nil {
					errs[k] = ctx.Err()
				}
			}
			return zero, w.failed(what, time.Since(begin), errs)
		}
	}
}

// failed says who was asked, what each said, and what to do.
func (w *Etcd) failed(what string, took time.Duration, errs []error) error {
	var parts []string
	ended := true
	for i, err := range errs {
		if err != nil {
			if why := w.ends[i].reason(); why != nil && errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("%w (%w)", err, why)
				errs[i] = err
			}
			ended = ended && errors.Is(err, errEnded)
			parts = append(parts, fmt.Sprintf("%s: %v", w.ends[i].addr, err))
		}
	}
	err := errors.Join(errs...)
	return &Error{What: what, Key: w.key, Took: took, Parts: parts, Do: advice(err, ended, w.opts.tls != nil), err: err}
}

// Error is a question to the etcd that failed on all endpoints.
type Error struct {
	What  string // what was asked for
	Key   string
	Took  time.Duration
	Parts []string // what each endpoint said
	Do    string   // what to do
	err   error
}

func (e *Error) Error() string {
	return fmt.Sprintf("the witness (etcd, key %s) did not %s in %v: %s: %s", e.Key, e.What, e.Took.Round(time.Millisecond),
		strings.Join(e.Parts, "; "), e.Do)
}

// Unwrap returns what the endpoints said.
func (e *Error) Unwrap() error { return e.err }

// advice is what to do about an error. ended: all who were asked ended the connection.
func advice(err error, ended, secure bool) string {
	switch {
	case errors.Is(err, rpctypes.ErrAuthFailed), errors.Is(err, rpctypes.ErrUserEmpty), errors.Is(err, rpctypes.ErrUserNotFound):
		return "give the user and the password-file that etcdctl takes"
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		return "give the user the right to read and write the keys under the prefix (etcdctl role grant-permission --prefix)"
	case errors.Is(err, rpctypes.ErrNoSpace):
		return "the etcd is full: compact and defragment it, then disarm the alarm (etcdctl alarm disarm)"
	case errors.Is(err, rpctypes.ErrRequestTooLarge):
		return "start the etcd with a larger --max-request-bytes"
	case secure && ended:
		return "see that cacert is the CA of the etcd's certificate, that it names the endpoint, and that cert and key are the client's"
	case ended:
		return "see that the etcd runs, and whether it wants TLS: then write etcds:// and cacert"
	}
	return "see that the etcd runs, has a leader, and can be reached from this host (etcdctl endpoint status)"
}

// Create implements witness.Witness.
func (w *Etcd) Create(ctx context.Context, vote []byte) error {
	if err := size(vote); err != nil {
		return err
	}
	made, err := ask(ctx, w, "make the register", func(ctx context.Context, c *clientv3.Client) (bool, error) {
		lease, err := c.Grant(ctx, int64(w.opts.TTL/time.Second))
		if err != nil {
			return false, err
		}
		r, err := c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(w.key), "=", 0)).
			Then(clientv3.OpPut(w.key, string(vote), clientv3.WithLease(lease.ID))).
			Else(clientv3.OpGet(w.key)).Commit()
		if err != nil || r.Succeeded {
			return true, err // after an error the lease ends by itself
		}
		_, _ = c.Revoke(ctx, lease.ID) // as it does here, if this fails
		// Asked twice, it is our own that is there.
		kv := r.Responses[0].GetResponseRange().GetKvs()
		return len(kv) > 0 && bytes.Equal(kv[0].Value, vote) && kv[0].Version == 1, nil
	})
	if err == nil && !made {
		return fmt.Errorf("%w (etcd, key %s)", witness.ErrExists, w.key)
	}
	return err
}

// Swap implements witness.Witness.
func (w *Etcd) Swap(ctx context.Context, old, new []byte) ([]byte, error) {
	if err := size(new); err != nil {
		return nil, err
	}
	return ask(ctx, w, "vote", func(ctx context.Context, c *clientv3.Client) ([]byte, error) {
		same := clientv3.Compare(clientv3.Value(w.key), "=", string(old)) // false for a key that is not there
		r, err := c.Txn(ctx).If(same).
			Then(clientv3.OpPut(w.key, string(new), clientv3.WithIgnoreLease())).
			Else(clientv3.OpGet(w.key)).Commit()
		switch {
		case err != nil:
			return nil, err
		case r.Succeeded:
			return bytes.Clone(new), nil
		}
		if kv := r.Responses[0].GetResponseRange().GetKvs(); len(kv) > 0 {
			return kv[0].Value, nil
		}
		return nil, nil
	})
}

// Remove implements witness.Witness.
func (w *Etcd) Remove(ctx context.Context) error {
	_, err := ask(ctx, w, "remove the register", func(ctx context.Context, c *clientv3.Client) (struct{}, error) {
		r, err := c.Get(ctx, w.key)
		if err != nil || len(r.Kvs) == 0 {
			return struct{}{}, err
		}
		if id := clientv3.LeaseID(r.Kvs[0].Lease); id != 0 {
			_, err = c.Revoke(ctx, id) // and the key with it
		} else {
			_, err = c.Delete(ctx, w.key)
		}
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			err = nil
		}
		return struct{}{}, err
	})
	return err
}

// Close implements witness.Witness.
func (w *Etcd) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.stop()
	w.bg.Wait()
	for _, e := range w.ends {
		e.close()
	}
	return nil
}

// keep refreshes the lease, and says in the log when the witness could not be asked, before it is needed. The first time,
// when the founder has not made the register perhaps, is for the connection: a vote is needed within tenths of a second.
func (w *Etcd) keep() {
	t := time.NewTicker(min(w.opts.TTL/4, time.Minute))
	defer t.Stop()
	for first := true; ; first = false {
		there, err := ask(w.ctx, w, "say what it holds", func(ctx context.Context, c *clientv3.Client) (bool, error) {
			r, err := c.Get(ctx, w.key)
			if err != nil || len(r.Kvs) == 0 {
				return false, err
			}
			if r.Kvs[0].Lease != 0 {
				_, err = c.KeepAliveOnce(ctx, clientv3.LeaseID(r.Kvs[0].Lease))
			}
			return true, err
		})
		switch {
		case w.ctx.Err() != nil:
			return
		case err != nil:
			w.log.Warn("a loss of half of the ranks would stop the rest now", "err", err)
		case !there && !first:
			w.log.Warn("a loss of half of the ranks would stop the rest: the witness has no record of this world, which was removed or has expired",
				"key", w.key)
		}
		select {
		case <-w.ctx.Done():
			return
		case <-t.C:
		}
	}
}

func size(vote []byte) error {
	if len(vote) == 0 || len(vote) > witness.MaxVote {
		return fmt.Errorf("witness: a vote of %d bytes: 1 to %d are kept", len(vote), witness.MaxVote)
	}
	return nil
}

package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/rendezvous"
)

// rejoin asks a living member to be let in, until it is.
func (w *World) rejoin(ctx context.Context, st rendezvous.Store, id identity, addrs [][]byte) error {
	w.identity = id
	answers := w.asking()
	me, err := memberOf(w.cfg.Rank, w.mesh.Addr())
	if err != nil {
		return err
	}
	var last error
	var since time.Time // everybody that we know of is gone
	invited := addrs
	for n := 0; ; n++ {
		here := 0 // may live
		if st != nil {
			addrs = slices.Clone(invited)
			for _, a := range w.storedAddrs(ctx, st, id.capacity) {
				if !slices.ContainsFunc(addrs, func(b []byte) bool { return bytes.Equal(a, b) }) {
					addrs = append(addrs, a)
				}
			}
		}
		for _, a := range addrs {
			if bytes.Equal(a, w.mesh.Addr()) {
				continue
			}
			cctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			p, err := w.mesh.Connect(cctx, a)
			cancel()
			if err != nil {
				if last = err; !isGone(err) {
					here++
				}
				continue
			}
			here++
			faultpoint.Hit(faultpoint.JoinHello)
			wel, err := w.ask(ctx, p, me, answers)
			if err != nil {
				if r, ok := err.(*refused); ok {
					return r
				}
				last = err
				continue
			}
			return w.enter(ctx, st, wel, me, answers)
		}
		switch {
		case here > 0 || len(addrs) == 0:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) > goneFor:
			return fmt.Errorf("%w: none of the %d whose addresses are known has been there for %v, so there is nobody to go on from: start all ranks again, with a new rendezvous (last: %w)",
				ErrAllGone, len(addrs), goneFor, last)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no living member lets this process in (asked %d addresses): %w", len(addrs), joinErr(last, ctx.Err()))
		case <-time.After(min(time.Duration(n+1)*5*time.Millisecond, 100*time.Millisecond)):
		}
	}
}

// goneFor is how long nobody may be there: one who has just entered has not told the rendezvous yet.
const goneFor = 3 * time.Second

// isGone says that nobody listens at an address any more: the process has ended.
func isGone(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, mesh.ErrDead) || errors.Is(err, device.ErrLost)
}

func joinErr(last, end error) error {
	if last == nil {
		return end
	}
	return fmt.Errorf("%w; last: %w", end, last)
}

// answer is what a member says to a newcomer.
type answer struct {
	from mesh.Nonce
	msg  fault.Msg
}

// answers are those that were not looked at yet.
type answers struct {
	mu sync.Mutex
	q  []answer
	ch chan struct{}
}

// asking makes the answers to this newcomer come in.
func (w *World) asking() *answers {
	a := &answers{}
	w.agent.Asking(func(from mesh.Nonce, m fault.Msg) { a.put(answer{from, m}) })
	return a
}

func (a *answers) put(x answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.q) >= 64 {
		return // it is asked again
	}
	a.q = append(a.q, x)
	if a.ch != nil {
		close(a.ch)
		a.ch = nil
	}
}

// take returns the next one, or a channel that is closed when there is one.
func (a *answers) take() (x answer, ok bool, wait <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.q) > 0 {
		x, a.q = a.q[0], a.q[1:]
		return x, true, nil
	}
	if a.ch == nil {
		a.ch = make(chan struct{})
	}
	return x, false, a.ch
}

// next waits for the next one until ctx is over or the time has come; ok false: none came.
func (w *World) next(ctx context.Context, a *answers, until time.Duration) (x answer, ok bool) {
	for {
		x, ok, wait := a.take()
		left := until - w.ground.Now()
		if ok || ctx.Err() != nil || left <= 0 {
			return x, ok
		}
		w.ground.Await(ctx, left, wait)
	}
}

// askEvery is how often a newcomer asks again.
const askEvery = 50 * time.Millisecond

type refused struct{ why string }

func (r *refused) Error() string { return "refused: " + r.why }

// ask asks one member until it answers for good or not at all. Who is in the view by now, we link to first.
func (w *World) ask(ctx context.Context, p Peer, me fault.Member, answers *answers) (*fault.Welcome, error) {
	epoch := uint64(0)
	silent := 0
	for {
		w.agent.SendTo(p.Nonce(), fault.Join{Member: me, Epoch: epoch})
		a, ok := w.next(ctx, answers, w.ground.Now()+askEvery)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if !ok {
			if silent++; silent > 1 && (p.Dead() || p.Silent()) {
				return nil, fmt.Errorf("%s does not answer", p.Name())
			}
			if silent > 200 {
				return nil, fmt.Errorf("%s has not admitted this process in 10 s: do the members call Boundary?", p.Name())
			}
			continue
		}
		switch m := a.msg.(type) {
		case fault.Welcome:
			return &m, nil
		case fault.Refused:
			return nil, &refused{m.Reason}
		case fault.Stale:
			cctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			err := w.ground.Link(cctx, m.View.Members)
			cancel()
			if err != nil {
				return nil, fmt.Errorf("linking to the members of epoch %d: %w", m.View.Epoch, err)
			}
			epoch = m.View.Epoch
		}
	}
}

// enter makes us the member that the welcome says we are.
func (w *World) enter(ctx context.Context, st rendezvous.Store, m *fault.Welcome, me fault.Member, answers *answers) error {
	faultpoint.Hit(faultpoint.JoinWelcome)
	w.slot, w.inc = m.Self.Slot, m.Self.Inc
	w.reach(ctx, m.View.Members)
	if err := w.share(ctx, m.View.Members); err != nil {
		return err
	}
	if err := w.become(ctx, m, me, answers); err != nil {
		return err
	}
	if st != nil { // we are a member: that the next newcomer does not find us there is no reason to die
		if err := st.Set(ctx, fmt.Sprintf("rank/%d", w.slot), w.mesh.Addr()); err != nil {
			w.log.Warn("the rendezvous does not take this process's address: newcomers find other members", "err", err)
		}
	}
	return nil
}

// become makes us the member, once we are linked to the others and have the words of the host.
func (w *World) become(ctx context.Context, m *fault.Welcome, me fault.Member, answers *answers) error {
	opts, user, err := decodeAttach(m.Attach)
	if err == nil {
		err = w.askOptions(ctx, m, me, opts, answers)
	}
	if err != nil {
		return err
	}
	if o, ok := opts[worldID]; ok {
		w.cfg.Options = o.opts
	}
	w.entered.Store(m.At)
	w.hold.install(m.At, m.Gained.Slots())
	w.joined = Joined{Replacement: true, Boundary: m.At, Attach: user, Epoch: m.View.Epoch}
	if err := w.begin(ctx, m.View, m.Groups, opts, *m); err != nil {
		return err
	}
	w.standing = map[uint64]uint64{}
	for _, g := range w.all() {
		w.standing[g.id] = g.comm.Done()
	}
	return nil
}

// askOptions completes opts: who let us in knows only its own groups. A group of which no living member knows any more was
// closed, or has ended with its last member; those who come in with us know as little as we.
func (w *World) askOptions(ctx context.Context, m *fault.Welcome, me fault.Member, opts map[uint64]groupOptions, answers *answers) error {
	answered := map[mesh.Nonce]bool{}
	for {
		ask := map[mesh.Nonce]bool{}
		for _, g := range m.Groups {
			if _, ok := opts[g.ID]; ok || g.ID == worldID {
				continue
			}
			for _, x := range m.View.Members {
				if p := w.find(x.Nonce); !m.Gained.Has(x.Slot) && g.Slots.Has(x.Slot) && p != nil && !p.Dead() && !p.Silent() && !answered[mesh.Nonce(x.Nonce)] {
					ask[mesh.Nonce(x.Nonce)] = true
				}
			}
		}
		if len(ask) == 0 {
			return nil
		}
		for _, x := range m.View.Members {
			if ask[x.Nonce] {
				w.agent.SendTo(x.Nonce, fault.Join{Member: me, Epoch: m.View.Epoch})
			}
		}
		for until := w.ground.Now() + askEvery; len(ask) > 0; {
			a, ok := w.next(ctx, answers, until)
			if err := ctx.Err(); err != nil {
				return err
			}
			if !ok {
				break
			}
			wel, ok := a.msg.(fault.Welcome)
			if !ok {
				continue
			}
			more, _, err := decodeAttach(wel.Attach)
			if err != nil {
				return err
			}
			for id, o := range more {
				opts[id] = o
			}
			answered[a.from] = true
			delete(ask, a.from)
		}
	}
}

// storedAddrs are the addresses of all ranks that the store has.
func (w *World) storedAddrs(ctx context.Context, st rendezvous.Store, capacity int) (as [][]byte) {
	for r := range capacity {
		cctx, cancel := context.WithTimeout(ctx, time.Second)
		b, err := st.CompareAndSet(cctx, fmt.Sprintf("rank/%d", r), []byte("-"), []byte("-"))
		cancel()
		if _, no := declined(b); err == nil && len(b) > 1 && !no {
			as = append(as, b)
		}
	}
	return as
}

package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/rendezvous"

	"golang.org/x/sync/errgroup"
)

// How a world is founded. Each rank writes its address under its key, takes the others' addresses and links to them. Who
// has linked to all writes their nonces under "founded" if nobody has before: that is the first view, of whom all founders
// then start with the same one. Until then a rank that died may come back: it takes its key over, and who cannot reach the
// old address reads the key again. Once it is founded, a rank that comes back is a replacement.

// rankKey is where the address of a rank is.
func rankKey(r int) string { return fmt.Sprintf("rank/%d", r) }

// foundedKey is where the nonces of the founders are, in the order of their ranks.
const foundedKey = "founded"

// errFounded: the others have founded the world with another process of this rank.
var errFounded = errors.New("the world was founded with another process of this rank: set SERRY_REJOIN to replace it")

// founds says whether this process is to found the world, and not to enter one that exists: also if it was started to
// replace a process that died before the founding.
func (w *World) founds(ctx context.Context, st rendezvous.Store) (bool, error) {
	if !w.cfg.Rejoin {
		return true, nil
	}
	if st == nil || len(w.cfg.Peers) > 0 || w.slot < 0 || w.slot >= w.cfg.Size {
		return false, nil
	}
	nonces, err := peek(ctx, st, foundedKey)
	return nonces == nil, err
}

// peek reads a key without waiting for it; nil if it is not there.
func peek(ctx context.Context, st rendezvous.Store, key string) ([]byte, error) {
	b, err := st.CompareAndSet(ctx, key, []byte("-"), []byte("-"))
	if err != nil || len(b) == 0 || string(b) == "-" {
		return nil, err
	}
	return b, nil
}

// claim writes this process's address under its rank's key, in the place of one that it replaces.
func (w *World) claim(ctx context.Context, st rendezvous.Store) error {
	me := w.mesh.Addr()
	var old []byte
	for {
		got, err := st.CompareAndSet(ctx, rankKey(w.slot), old, me)
		switch {
		case err != nil:
			return err
		case bytes.Equal(got, me):
			return nil
		case !w.cfg.Rejoin:
			return fmt.Errorf("rank %d is taken by another process: start each rank once, or set SERRY_REJOIN for one that comes back", w.slot)
		}
		if old = got; len(old) == 0 {
			old = nil
		}
	}
}

// meet links to all other founders, and returns them all. It ends with ctx, or when one of them cannot be the right one.
func (w *World) meet(ctx context.Context, st rendezvous.Store, addrs [][]byte) ([]fault.Member, error) {
	ms := make([]fault.Member, len(addrs))
	eg, ectx := errgroup.WithContext(ctx)
	for r, a := range addrs {
		eg.Go(func() (err error) {
			ms[r], err = w.meetOne(ectx, st, r, a)
			if err != nil {
				return fmt.Errorf("rank %d: %w", r, err)
			}
			ms[r].Inc = 1
			return nil
		})
	}
	return ms, eg.Wait()
}

// patience is how long a founder tries an address before it looks whether the rank has another by now.
const patience = time.Second

func (w *World) meetOne(ctx context.Context, st rendezvous.Store, r int, addr []byte) (fault.Member, error) {
	var last error
	late := false
	for {
		m, err := memberOf(r, addr)
		if err != nil || r == w.slot {
			return m, err
		}
		link := w.mesh.Connect // of two founders the higher slot dials
		if r > w.slot && !late {
			link = w.mesh.Await
		}
		cctx, cancel := context.WithTimeout(ctx, patience)
		_, err = link(cctx, addr)
		cancel()
		if err == nil {
			return m, nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		if ctx.Err() != nil {
			return m, last
		}
		now, err := st.Get(ctx, rankKey(r))
		if err != nil {
			return m, joinErr(last, err)
		}
		if !bytes.Equal(now, addr) {
			w.log.Info("a rank has started again before the founding", "rank", r)
			addr = now
			continue
		}
		var no *mesh.RefusedError
		if errors.As(last, &no) {
			return m, last
		}
		// Nobody comes back to found a world that is founded: then who does not come is dialled, to see whether it lives.
		nonces, err := peek(ctx, st, foundedKey)
		if err != nil {
			return m, joinErr(last, err)
		}
		if late = nonces != nil; late && errors.Is(last, syscall.ECONNREFUSED) {
			return m, joinErr(last, errors.New("the others have founded the world, and it is dead since: set SERRY_REJOIN to join it"))
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// settle makes the founders that this process has met the first view, or finds out that others did.
func (w *World) settle(ctx context.Context, st rendezvous.Store, ms []fault.Member) error {
	var mine []byte
	for _, m := range ms {
		mine = append(mine, m.Nonce[:]...)
	}
	got, err := st.CompareAndSet(ctx, foundedKey, nil, mine)
	if err != nil || bytes.Equal(got, mine) {
		return err
	}
	is := func(r int) bool {
		n := len(ms[r].Nonce)
		return len(got) == len(mine) && bytes.Equal(got[r*n:(r+1)*n], ms[r].Nonce[:])
	}
	if !is(w.slot) {
		return errFounded
	}
	for r := range ms {
		if !is(r) {
			return fmt.Errorf("the world was founded with another process of rank %d, which died: set SERRY_REJOIN to join it", r)
		}
	}
	return nil
}

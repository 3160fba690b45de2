package pg

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/fault/agent"
	"github.com/serry-project/serry/mesh"
	"github.com/serry-project/serry/rendezvous"
)

// identity is what the first founder writes for all: format (1), size (4), capacity (4), world id (16), key (16), its rank
// (4), terms (31).
type identity struct {
	size, capacity int
	world          [16]byte
	key            [16]byte
	by             int
	terms          terms
}

const (
	identityFormat = 3
	identityBytes  = 45 + termsBytes
)

func (id *identity) encode() []byte {
	le := binary.LittleEndian
	b := le.AppendUint32([]byte{identityFormat}, uint32(id.size))
	b = le.AppendUint32(b, uint32(id.capacity))
	b = append(append(b, id.world[:]...), id.key[:]...)
	return id.terms.encode(le.AppendUint32(b, uint32(id.by)))
}

func (id *identity) decode(b []byte) error {
	if len(b) != identityBytes || b[0] != identityFormat {
		return fmt.Errorf("the rendezvous holds %d bytes that are no serry world of format %d: run the same serry on all ranks", len(b), identityFormat)
	}
	le := binary.LittleEndian
	id.size, id.capacity, id.by = int(le.Uint32(b[1:])), int(le.Uint32(b[5:])), int(le.Uint32(b[41:]))
	copy(id.world[:], b[9:])
	copy(id.key[:], b[25:])
	id.terms.decode(b[45:])
	return nil
}

// Join makes this process a member of a world: as a founder, which waits for all the others, or (Config.Rejoin) as a
// replacement or an extra rank, which enters at the members' next Boundary. It ends with ctx at the latest.
func Join(ctx context.Context, cfg Config) (*World, error) {
	given := cfg
	wrong := cfg.fill()
	var st rendezvous.Store
	if cfg.Store != nil {
		st = rendezvous.Prefix(cfg.Store, "serry/"+cfg.Name)
	}
	if wrong != nil {
		decline(st, &cfg, wrong)
		return nil, wrong
	}
	w := newWorld(cfg)
	fail := func(what string, err error) (*World, error) {
		if w.mesh != nil {
			_ = w.mesh.Close()
		}
		if e := ctx.Err(); e != nil && err == nil {
			err = e
		}
		if u := (*unlike)(nil); errors.As(err, &u) {
			decline(st, &cfg, u)
		}
		return nil, &JoinError{cfg.Rank, what, err}
	}
	founds, err := w.founds(ctx, st)
	if err != nil {
		return fail("meeting the others", err)
	}
	id, addrs, err := w.identify(ctx, st, founds)
	if err != nil {
		return fail("meeting the others", err)
	}
	w.cfg.Capacity = id.capacity
	if err := w.cfg.agree(id.terms, id.by, !founds, &given); err != nil {
		return fail("meeting the others", err)
	}
	if err := w.cfg.fits(); err != nil {
		decline(st, &cfg, err)
		return nil, err
	}
	w.mesh, err = mesh.Open(ctx, mesh.Config{
		World: id.world, Key: id.key[:], Name: fmt.Sprintf("rank %d", cfg.Rank), Links: cfg.Links, Arena: cfg.ArenaBytes,
		Listen: cfg.Listen, Via: cfg.Via, SocketDir: cfg.SocketDir, HeartbeatEvery: cfg.HeartbeatEvery, HeartbeatLimit: cfg.HeartbeatLimit,
		NoChecksum: cfg.NoChecksum, Wrap: cfg.Wrap, Log: cfg.Log,
	})
	if err != nil {
		return fail("opening shared memory and listeners", err)
	}
	if w.arena, err = collectives.NewArena(w.mesh.Arena(), w.mesh.Reserve, w.cfg.shape()); err != nil {
		return fail("shared memory", err)
	}
	w.arena.Locals = w.mesh.Arenas
	w.ground = machine{w.mesh}
	w.agent = agent.New(w.mesh, worldHost{w}, cfg.Log)
	if err := w.mesh.Start(w.agent.Handler()); err != nil {
		return fail("starting", err)
	}
	done := w.nag(ctx, st, id.size, founds)
	defer done()
	if founds {
		err = w.found(ctx, st, id)
	}
	if !founds || cfg.Rejoin && errors.Is(err, errFounded) {
		err = w.rejoin(ctx, st, id, addrs)
	}
	if err == nil {
		err = w.overErr() // evicted already, say
	}
	if err != nil {
		return fail("", err)
	}
	w.log.Info("joined", "rank", w.slot, "incarnation", w.inc, "size", w.Size(), "capacity", id.capacity, "epoch", w.Epoch(), "links", w.describe())
	return w, nil
}

func newWorld(cfg Config) *World {
	return &World{
		cfg: cfg, slot: cfg.Rank, log: cfg.Log, groups: map[uint64]*Group{}, born: map[uint64]uint64{}, members: map[fault.ID]Peer{},
		left: make(chan struct{}), isOver: make(chan struct{}), events: events{ch: make(chan Event, 256)},
	}
}

// nagEvery is how often a Join that takes long says what it waits for.
const nagEvery = 5 * time.Second

// nag warns as long as the Join is not done.
func (w *World) nag(ctx context.Context, st rendezvous.Store, size int, founds bool) (done func()) {
	ctx, cancel := context.WithCancel(ctx)
	begin := time.Now()
	go func() {
		t := time.NewTicker(nagEvery)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			after := time.Since(begin).Round(time.Second)
			if !founds {
				w.log.Warn("no member has let this process in yet: do the members live, and call Boundary?", "after", after)
			} else if missing := w.absent(st, rankKey, size); len(missing) > 1 || missing[0] != w.slot {
				w.log.Warn("the world cannot be founded yet", "missing_ranks", missing, "after", after)
			} else {
				w.log.Warn("all ranks are there, but not linked to each other yet", "after", after)
			}
		}
	}()
	return cancel
}

func (w *World) describe() string {
	var s []string
	for _, p := range w.mesh.Status() {
		s = append(s, fmt.Sprintf("%s: %s (%s)", p.Name, p.Link, p.Why))
	}
	return strings.Join(s, "; ")
}

// identify finds out which world this is.
func (w *World) identify(ctx context.Context, st rendezvous.Store, founds bool) (id identity, addrs [][]byte, err error) {
	for _, p := range w.cfg.Peers {
		text, ours := strings.CutPrefix(p, inviteHead)
		if !ours {
			return id, nil, fmt.Errorf("%q is no invitation (World.Invite): they start with %q", p, inviteHead)
		}
		b, err := base64.RawURLEncoding.DecodeString(text)
		if err != nil || len(b) < identityBytes {
			return id, nil, fmt.Errorf("the invitation %q is damaged or cut off", p)
		}
		if err := id.decode(b[:identityBytes]); err != nil {
			return id, nil, err
		}
		addrs = append(addrs, b[identityBytes:])
	}
	if len(addrs) > 0 {
		return id, addrs, nil
	}
	if !founds {
		b, err := st.Get(ctx, "world")
		if err != nil {
			return id, nil, err
		}
		return id, nil, id.decode(b)
	}
	id = identity{size: w.cfg.Size, capacity: w.cfg.Capacity, by: w.cfg.Rank, terms: terms{w.cfg.Options, w.cfg.Retain}}
	_, _ = rand.Read(id.world[:])
	_, _ = rand.Read(id.key[:])
	b, err := st.CompareAndSet(ctx, "world", nil, id.encode())
	if err != nil {
		return id, nil, err
	}
	if err := id.decode(b); err != nil {
		return id, nil, err
	}
	if id.size != w.cfg.Size || id.capacity != w.cfg.Capacity && !w.cfg.Rejoin {
		return id, nil, &unlike{fmt.Sprintf("this rank was started for a world of %d (capacity %d), the others for %d (capacity %d): give all the same",
			w.cfg.Size, w.cfg.Capacity, id.size, id.capacity)}
	}
	return id, nil, nil
}

const inviteHead = "serry1:"

// Invite is what a newcomer without a Store puts in Config.Peers: the address of this member, and the world's key.
func (w *World) Invite() string {
	return inviteHead + base64.RawURLEncoding.EncodeToString(append(w.identity.encode(), w.mesh.Addr()...))
}

// found meets the other founders.
func (w *World) found(ctx context.Context, st rendezvous.Store, id identity) error {
	w.identity = id
	if err := w.claim(ctx, st); err != nil {
		return err
	}
	addrs := make([][]byte, id.size)
	for r := range addrs {
		var err error
		if addrs[r], err = st.Get(ctx, rankKey(r)); err != nil {
			return fmt.Errorf("%s of %d did not come: %w", ranks(w.absent(st, rankKey, id.size)), id.size, err)
		}
		if why, no := declined(addrs[r]); no {
			return fmt.Errorf("rank %d does not take part: %s", r, why)
		}
	}
	ms, err := w.meet(ctx, st, addrs)
	if err != nil {
		return err
	}
	view := fault.View{Epoch: 1, Size: id.size, Capacity: id.capacity, Members: ms}
	if err := w.settle(ctx, st, ms); err != nil {
		return err
	}
	if err := w.share(ctx, view.Members); err != nil {
		return err
	}
	w.inc = 1
	return w.begin(ctx, view, []fault.Group{worldGroup(view)}, nil, fault.Welcome{})
}

// declineMark begins what a founder that cannot take part writes in the place of its address; the reason follows.
const declineMark = "!"

// decline tells the other founders that this one does not come, and why, so that they do not wait for it.
func decline(st rendezvous.Store, c *Config, why error) {
	if st == nil || c.Rejoin || c.Rank < 0 || c.Rank >= fault.MaxSlots {
		return
	}
	if j := (*JoinError)(nil); errors.As(why, &j) {
		why = errors.New(j.What)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = st.CompareAndSet(ctx, rankKey(c.Rank), nil, []byte(declineMark+why.Error()))
}

func declined(b []byte) (why string, no bool) { return strings.CutPrefix(string(b), declineMark) }

func worldGroup(v fault.View) fault.Group {
	g := fault.Group{ID: worldID, Version: 1}
	for i := range v.Capacity {
		g.Slots.Add(i)
	}
	for _, m := range v.Members {
		g.Active.Add(m.Slot)
	}
	return g
}

// absent lists the ranks that have not come, for the error.
func (w *World) absent(st rendezvous.Store, key func(int) string, size int) (r []int) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for i := range size {
		if b, err := st.CompareAndSet(ctx, key(i), []byte("-"), []byte("-")); err == nil && len(b) == 0 {
			r = append(r, i)
		}
	}
	if len(r) == 0 {
		r = []int{w.slot}
	}
	return r
}

func memberOf(slot int, addr []byte) (m fault.Member, err error) {
	a, err := mesh.ParseAddr(addr)
	if err != nil {
		return m, err
	}
	h, err := mesh.HostOf(addr)
	return fault.Member{ID: fault.ID{Slot: slot}, Nonce: fault.Nonce(a.Nonce), Host: h, Addr: addr}, err
}

// reach links to those who came in with us, whom nobody could tell us of before. One that cannot be reached for good has
// ended: the others see that.
func (w *World) reach(ctx context.Context, ms []fault.Member) {
	var wg sync.WaitGroup
	for _, m := range ms {
		if m.Nonce == fault.Nonce(w.mesh.Nonce()) || w.find(m.Nonce) != nil {
			continue
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				cctx, cancel := context.WithTimeout(ctx, 2*time.Second)
				_, err := w.mesh.Connect(cctx, m.Addr)
				late := cctx.Err() != nil
				cancel()
				if err == nil {
					return
				}
				w.log.Info("one who joins too cannot be reached", "rank", m.Slot, "err", err)
				if !late {
					return
				}
			}
		})
	}
	wg.Wait()
}

// share gets the shared words of this host: those that it has, or new ones made by the lowest of those who need some.
func (w *World) share(ctx context.Context, ms []fault.Member) error {
	if w.cfg.Links == "tcp" {
		w.words = make([]byte, collectives.WordsBytes)
		return nil
	}
	// Of this host are those whose memory we share, whatever their addresses say: others would wait for words in vain.
	near := func(m fault.Member) *mesh.Peer {
		if p := w.mesh.Peer(mesh.Nonce(m.Nonce)); p != nil && p.Arena() != nil && !p.Dead() {
			return p
		}
		return nil
	}
	for start := time.Now(); ; {
		lowest, waiting := true, time.Since(start) < 2*time.Second
		for _, m := range ms {
			switch p := near(m); {
			case p == nil:
			case p.HasWords(): // It passes them on. If that fails, some of our own do: then we share no memory with it.
				lowest = lowest && !waiting
			default:
				lowest = lowest && m.Slot > w.slot
			}
		}
		// Who has words has passed them on in the handshake: if there are none now, nobody has any.
		some, cancel := context.WithTimeout(ctx, time.Millisecond)
		b, err := w.mesh.Words(some)
		cancel()
		switch {
		case err == nil:
			w.words = b
			// What the others have decides with whom we share memory, so it must not change any more.
			if slices.ContainsFunc(ms, func(m fault.Member) bool { p := near(m); return p != nil && !p.HasWords() }) {
				time.Sleep(100 * time.Microsecond)
				if ctx.Err() == nil {
					continue
				}
				return fmt.Errorf("waiting for the host's shared words to reach all: %w", ctx.Err())
			}
			return nil
		case ctx.Err() != nil:
			return err
		case lowest:
			_ = w.mesh.MakeWords() // fails if some come at the same moment
		}
	}
}

// begin makes the groups and starts the machine, on the loop. entry is how a newcomer came in.
func (w *World) begin(ctx context.Context, view fault.View, groups []fault.Group, opts map[uint64]groupOptions, entry fault.Welcome) error {
	var shapes []collectives.Shape
	for _, fg := range groups {
		if x, ok := opts[fg.ID]; ok {
			shapes = append(shapes, x.opts.shape(fg.Slots.Len()))
		} else if fg.ID == worldID {
			shapes = append(shapes, w.cfg.shape())
		}
	}
	w.arena.Prepare(shapes...) // here, not on the loop: it takes its time
	var err error
	made := make(chan struct{})
	w.mu.Lock()
	w.learn(&view)
	w.view = view
	w.mu.Unlock()
	w.agent.Start(fault.Config{
		Self: fault.ID{Slot: w.slot, Inc: w.inc}, View: view, Groups: groups, HeartbeatLimit: w.cfg.HeartbeatLimit,
		Change: entry.Change, Gained: entry.Gained,
	}, func() {
		defer close(made)
		for _, fg := range groups {
			x, ok := opts[fg.ID]
			if !ok && fg.ID != worldID { // the members have closed it
				w.agent.Post(fault.Dropped{Group: fg.ID})
				continue
			}
			if !ok {
				x.opts = w.cfg.Options
			}
			if err = w.add(fg, x, &view); err != nil {
				break
			}
		}
	})
	w.ground.Await(ctx, 0, made)
	if isClosed(made) {
		return err
	}
	return ctx.Err()
}

// add makes one of the groups that this process starts with.
func (w *World) add(fg fault.Group, x groupOptions, view *fault.View) error {
	slots := fg.Slots.Slots()
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := newGroup(w, fg.ID, slots, x.opts, fg.Version, fg.Cut, w.membersOf(slots, view))
	if err != nil {
		return err
	}
	g.size.Store(int64(view.Size))
	for _, e := range x.losses {
		for _, s := range e.Slots {
			if r := slices.Index(slots, s); r >= 0 {
				e.Lost = append(e.Lost, r)
			}
		}
	}
	g.pending = x.losses
	if fg.ID == worldID {
		w.Group = g
	}
	w.enlist(g, x.born)
	w.replay(g)
	return nil
}

// find is the peer with that nonce, nil if there is none. It counts from when its handshake is done here: the newcomer
// takes itself for linked then, and a view with it may come before our loop has got the connection.
func (w *World) find(n fault.Nonce) Peer { return w.ground.Peer(mesh.Nonce(n)) }

// Close ends this process's membership without a word to the others: to them it is lost. Leave is the polite way.
func (w *World) Close() error {
	w.end(fmt.Errorf("%w: the world", ErrClosed))
	for _, g := range w.Groups() {
		g.stop()
	}
	if w.mesh == nil {
		return nil
	}
	return w.mesh.Close()
}

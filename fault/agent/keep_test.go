//go:build linux

package agent

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/internal/wire"
	"github.com/serry-project/serry/mesh"

	"github.com/stretchr/testify/require"
)

// owner is a Host that writes down what it gets.
type owner struct {
	data []uint64 // Seq of the frames
	from []fault.ID
	over chan *Over
}

func (o *owner) Reopen(uint64, []uint64)          {}
func (o *owner) Install(fault.Install)            {}
func (o *owner) Waiting(uint64) fault.Waiting     { return fault.Waiting{} }
func (o *owner) Entered() uint64                  { return 0 }
func (o *owner) Hold(uint64)                      {}
func (o *owner) Release()                         {}
func (o *owner) Over(err error)                   { o.over <- err.(*Over) }
func (o *owner) Left()                            {}
func (o *owner) Idle(time.Duration) time.Duration { return 0 }
func (o *owner) Close(_ uint64, groups []uint64) (done []fault.GroupDone) {
	for _, g := range groups {
		done = append(done, fault.GroupDone{Group: g})
	}
	return done
}
func (o *owner) Data(from fault.ID, f *device.Frame) {
	o.data, o.from = append(o.data, f.Seq), append(o.from, from)
}

// process is an agent on a mesh of its own, with room for a MiB.
type process struct {
	*Agent
	m *mesh.Mesh
	o *owner
}

func start(t testing.TB) *process {
	m, err := mesh.Open(t.Context(), mesh.Config{World: [16]byte{1}, Key: []byte("key"), Name: t.Name(), Links: "tcp", Arena: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	p := &process{m: m, o: &owner{over: make(chan *Over, 8)}}
	p.Agent = New(m, p.o, slog.New(slog.DiscardHandler))
	p.keep = 1 << 20
	require.NoError(t, m.Start(p.Handler()))
	return p
}

func short(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// link returns b as a sees it.
func link(t testing.TB, a, b *process) *mesh.Peer {
	p, err := a.m.Connect(short(t), b.m.Addr())
	require.NoError(t, err)
	_, err = b.m.Await(short(t), a.m.Addr())
	require.NoError(t, err)
	return p
}

// on runs f on the loop of p, and waits for it.
func (p *process) on(f func()) {
	done := make(chan struct{})
	p.Do(func() { f(); close(done) })
	<-done
}

func (p *process) eventually(t testing.TB, f func() bool) {
	t.Helper()
	require.Eventually(t, func() (ok bool) { p.on(func() { ok = f() }); return ok }, 10*time.Second, time.Millisecond)
}

// got is what the host has got.
func (p *process) got() (seqs []uint64, from []fault.ID) {
	p.on(func() { seqs, from = slices.Clone(p.o.data), slices.Clone(p.o.from) })
	return seqs, from
}

// held counts what is kept of others.
func (p *process) held() (n int) {
	p.on(func() { n = len(p.kept) + len(p.early) + len(p.strange) })
	return n
}

// send sends n frames of 64 KiB, numbered from first, or fewer if the link ends.
func send(t testing.TB, to *mesh.Peer, first, n int) {
	for i := first; i < first+n; i++ {
		f := device.Frame{Payload: make([]byte, 64<<10)}
		f.Kind, f.Seq, f.Length, f.Total = wire.KindData, uint64(i), 64<<10, 64<<10
		err := to.Send(&f)
		for end := time.Now().Add(10 * time.Second); err == device.ErrFull && time.Now().Before(end); err = to.Send(&f) {
			time.Sleep(time.Millisecond)
		}
		if err != nil {
			return
		}
	}
}

func member(t testing.TB, p *process, slot int) fault.Member {
	h, err := mesh.HostOf(p.m.Addr())
	require.NoError(t, err)
	return fault.Member{ID: fault.ID{Slot: slot, Inc: 1}, Nonce: p.m.Nonce(), Host: h, Addr: p.m.Addr()}
}

// begin makes a the member 0 of a view with others.
func (p *process) begin(t testing.TB, ms ...fault.Member) {
	ms = append([]fault.Member{member(t, p, 0)}, ms...)
	world := fault.Group{ID: 1, Version: 1}
	for i := range 4 {
		world.Slots.Add(i)
	}
	for _, m := range ms {
		world.Active.Add(m.Slot)
	}
	ready := make(chan struct{})
	p.Start(fault.Config{
		Self: ms[0].ID, View: fault.View{Epoch: 1, Size: 4, Capacity: 4, Members: ms}, Groups: []fault.Group{world}, HeartbeatLimit: time.Minute,
	}, func() { close(ready) })
	<-ready
}

// TestEarlyFramesAreKept gets frames of a member before the view is there: all of them come to the host then, in order.
func TestEarlyFramesAreKept(t *testing.T) {
	a, b := start(t), start(t)
	send(t, link(t, b, a), 0, 12)
	a.eventually(t, func() bool { return len(a.early) == 12 })
	a.begin(t, member(t, b, 1))
	a.eventually(t, func() bool { return len(a.o.data) == 12 })
	seqs, from := a.got()
	for i := range seqs {
		require.Equal(t, uint64(i), seqs[i])
		require.Equal(t, 1, from[i].Slot)
	}
	require.Zero(t, a.held())
}

// TestTooManyEarlyFramesEndTheJoin gets more than is kept: the process is over, and says who sent it.
func TestTooManyEarlyFramesEndTheJoin(t *testing.T) {
	a, b := start(t), start(t)
	send(t, link(t, b, a), 0, 40)
	select {
	case o := <-a.o.over:
		require.False(t, o.NoQuorum)
		require.ErrorContains(t, o, b.m.Peers()[0].Name()+" sent more than the 1 MiB that are kept until this process has begun")
	case <-time.After(10 * time.Second):
		t.Fatal("it is not over")
	}
	a.begin(t, member(t, b, 1)) // does not hang, and nothing comes of it
	seqs, _ := a.got()
	require.Empty(t, seqs)
	require.Empty(t, a.o.over, "it is over once")
}

// TestStrangersFramesAreKept gets frames of a process before the view that admits it.
func TestStrangersFramesAreKept(t *testing.T) {
	a, b := start(t), start(t)
	a.begin(t)
	send(t, link(t, b, a), 0, 12)
	a.eventually(t, func() bool { return len(a.strange[b.m.Nonce()]) == 12 })
	x := member(t, b, 1)
	a.on(func() { a.effect(joined(x)) })
	seqs, _ := a.got()
	require.Len(t, seqs, 12)
	require.Zero(t, a.held())
}

func joined(m fault.Member) fault.Install {
	return fault.Install{View: fault.View{Epoch: 2, Size: 4, Capacity: 4, Members: []fault.Member{m}}, Joined: []fault.Member{m}}
}

// TestTooManyFramesOfAStranger gets more than is kept: nothing of it counts, its link ends, and a view that admits it hears
// that it is silent. Others are not touched.
func TestTooManyFramesOfAStranger(t *testing.T) {
	a, b, c := start(t), start(t), start(t)
	a.begin(t)
	bToA, cToA := link(t, b, a), link(t, c, a)
	send(t, cToA, 0, 3)
	send(t, bToA, 0, 40)
	n := b.m.Nonce()
	a.eventually(t, func() bool { return a.silent[n] })
	a.eventually(t, func() bool { return len(a.strange[c.m.Nonce()]) == 3 })
	known := true
	a.on(func() { known = a.peers[n] != nil || len(a.strange[n]) > 0 || a.kept[n] != 0 })
	require.False(t, known)
	require.Nil(t, a.m.Peer(n), "the link is given up")
	require.Eventually(t, func() bool { // and the other end hears of it
		return bToA.Send(&device.Frame{Header: wire.Header{Kind: wire.KindData}}) != nil
	}, 10*time.Second, time.Millisecond)
	x := member(t, b, 1)
	var evs []fault.Event
	a.on(func() {
		a.effect(joined(x))
		for _, f := range a.next {
			evs = append(evs, f())
		}
		a.next = nil
	})
	require.Equal(t, []fault.Event{fault.Silent{ID: x.ID}}, evs)
	seqs, _ := a.got()
	require.Empty(t, seqs)
}

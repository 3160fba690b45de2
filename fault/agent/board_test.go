//go:build linux

package agent

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serry-project/serry/device/host"
	"github.com/serry-project/serry/fault"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const boardSize = 64 << 10

// boards are the board of one process, and the same as another sees it, through a mapping of its own.
func boards(t testing.TB) (own, other *board) {
	s, err := host.CreateSegment("board", boardSize)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	fd, err := unix.Dup(s.FD())
	require.NoError(t, err)
	p, err := host.OpenSegment(fd, boardSize, false)
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	self, peer := fault.ID{Slot: 3, Inc: 2}, fault.ID{Slot: 4, Inc: 1}
	own = &board{own: s.Bytes(), self: self}
	other = &board{self: peer, of: func(id fault.ID) []byte { return p.Bytes() }}
	return own, other
}

func record(n uint32) fault.Record {
	r := fault.Record{Epoch: uint64(n), Promised: fault.Ballot{Num: n, Slot: uint16(n)}}
	if n%3 > 0 {
		r.Accepted = fault.Ballot{Num: n - 1, Slot: uint16(n * 7)}
		r.Value = bytes.Repeat([]byte{byte(n)}, int(n%2000))
	}
	return r
}

func TestBoard(t *testing.T) {
	own, other := boards(t)
	_, ok := other.Read(own.self)
	require.False(t, ok, "nothing was published")
	for n := uint32(1); n < 100; n++ {
		own.Publish(record(n))
		for _, b := range []*board{own, other} {
			got, ok := b.Read(own.self)
			require.True(t, ok)
			want := record(n)
			require.Equal(t, want.Epoch, got.Epoch)
			require.Equal(t, want.Promised, got.Promised)
			require.Equal(t, want.Accepted, got.Accepted)
			require.True(t, bytes.Equal(want.Value, got.Value))
		}
	}
	_, ok = other.Read(fault.ID{Slot: 3, Inc: 1})
	require.False(t, ok, "of another incarnation")
	(&board{}).Publish(record(1)) // without memory there is no vote to show
	_, ok = (&board{of: func(fault.ID) []byte { return nil }}).Read(own.self)
	require.False(t, ok)
}

// TestBoardIsNeverTorn reads while the owner publishes as fast as it can, and after it has died in the middle of it.
func TestBoardIsNeverTorn(t *testing.T) {
	own, other := boards(t)
	var stop atomic.Bool
	done := make(chan struct{})
	own.Publish(record(1))
	go func() {
		defer close(done)
		for n := uint32(2); !stop.Load(); n++ {
			own.Publish(record(n))
		}
	}()
	read, last := 0, uint64(0)
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); {
		r, ok := other.Read(own.self)
		if !ok {
			continue // overtaken
		}
		read++
		want := record(uint32(r.Epoch))
		require.Equal(t, want.Promised, r.Promised)
		require.Equal(t, want.Accepted, r.Accepted)
		require.True(t, bytes.Equal(want.Value, r.Value), "record %d", r.Epoch)
		require.GreaterOrEqual(t, r.Epoch, last)
		last = r.Epoch
	}
	stop.Store(true)
	<-done
	require.Positive(t, read)

	// Its death in the middle of a publication leaves the record before.
	before, ok := other.Read(own.self)
	require.True(t, ok)
	host.Begin(host.Word64(recAt(own.own, own.seq+1), 0), 0)
	copy(recAt(own.own, own.seq+1)[8:], bytes.Repeat([]byte{0xff}, 200))
	after, ok := other.Read(own.self)
	require.True(t, ok)
	require.Equal(t, before, after)
}

func FuzzBoard(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0}, uint16(0), []byte{1, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0, 0, 3, 0, 0, 0, 2}, uint16(boardSize/2))
	f.Add([]byte{2}, uint16(0), []byte{2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff}, uint16(128))
	f.Fuzz(func(t *testing.T, a []byte, at uint16, b []byte, bt uint16) {
		mem := make([]byte, boardSize)
		copy(mem[at:], a)
		copy(mem[bt:], b)
		x := &board{self: fault.ID{Slot: 1, Inc: 1}, of: func(fault.ID) []byte { return mem }}
		if r, ok := x.Read(fault.ID{Slot: 3, Inc: 2}); ok && len(r.Value) > boardSize/2 {
			t.Fatalf("value of %d bytes", len(r.Value))
		}
	})
}

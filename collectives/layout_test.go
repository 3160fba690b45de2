package collectives

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBehind(t *testing.T) {
	for _, bits := range []uint{15, 18, 30} {
		n := uint64(1) << bits
		r := rand.New(rand.NewPCG(uint64(bits), 1))
		for range 10_000 {
			a := r.Uint64N(n)
			d := 1 + r.Uint64N(n/2-1)
			b := (a + d) % n
			require.True(t, behind(a, b, bits), "%d is before %d (%d bits)", a, b, bits)
			require.False(t, behind(b, a, bits))
			require.False(t, behind(a, a, bits))
		}
		require.True(t, behind(n-1, 0, bits))
		require.False(t, behind(0, n-1, bits))
	}
}

func TestDecisionWord(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		v, s := r.Uint64(), r.Uint64()
		u := r.Uint64N(1 << useBits)
		d := decided(u, v, s)
		require.Equal(t, u, d.use())
		require.Equal(t, v&(1<<versionBits-1), d.version())
		require.Equal(t, s&(1<<decSeqBits-1), d.seq())
		require.Zero(t, d.closed())
		c := decision(uint64(d) | closedFor(v+1))
		require.Equal(t, d.version(), c.version())
		require.Equal(t, d.seq(), c.seq())
		require.Equal(t, closedFor(v+1), c.closed())
	}
}

// The mark of a close is never 0, and orders by epoch also where it wraps.
func TestClosedForWraps(t *testing.T) {
	for _, base := range []uint64{0, 1, 0xfff0, 0xffff, 0x10000, 5 * 0xffff, 1<<20 - 3} {
		for e := base; e < base+40; e++ {
			require.NotZero(t, closedFor(e))
			require.LessOrEqual(t, closedFor(e), uint64(0xffff))
			for d := uint64(1); d < 30; d++ {
				require.NotEqual(t, closedFor(e), closedFor(e+d))
				require.True(t, behind(closedFor(e), closedFor(e+d), 15), "%d, %d", e, e+d)
				require.False(t, behind(closedFor(e+d), closedFor(e), 15), "%d, %d", e, e+d)
			}
		}
	}
}

// A close for a view that is installed is taken back by whoever installs it, one for a later view is not.
func TestReopen(t *testing.T) {
	w := newSim(t, 1, 2, Shape{SlotBytes: 8192, Depth: 2, Lanes: 1})
	c := w.ranks[0].comm
	for _, e := range []uint64{2, 70_000, 0xffff, 0x10000} {
		c.dec.Store(uint64(decided(0, 1, 7)) | closedFor(e))
		c.Reopen(e - 1)
		require.Equal(t, closedFor(e), decision(c.dec.Load()).closed())
		c.Reopen(e)
		require.Equal(t, decided(0, 1, 7), decision(c.dec.Load()))
		c.dec.Store(uint64(decided(0, 1, 7)) | closedFor(e))
		c.Reopen(e + 3)
		require.Zero(t, decision(c.dec.Load()).closed())
	}
}

// A host-mate may have promised a later view already when we close for this one: its close stays, and so does not open the
// word for decisions that it has not vouched for when we take ours back.
func TestCloseOfALaterViewStays(t *testing.T) {
	w := newSim(t, 1, 2, Shape{SlotBytes: 8192, Depth: 2, Lanes: 1})
	c := w.ranks[0].comm
	alive := func(int) bool { return true }
	for _, e := range []uint64{2, 70_000, 0xfffe, 0xffff, 0x10000} {
		later := uint64(decided(0, 1, 7)) | closedFor(e+1)
		c.dec.Store(later)
		c.CloseWord(e, alive)
		require.Equal(t, later, c.dec.Load())
		c.Reopen(e)
		require.Equal(t, later, c.dec.Load())
		c.dec.Store(uint64(decided(0, 1, 7)) | closedFor(e))
		c.CloseWord(e+1, alive)
		require.Equal(t, later, c.dec.Load(), "a close for an earlier one goes on to ours")
	}
}

func TestRearmGoesForwardOnly(t *testing.T) {
	w := newSim(t, 1, 2, Shape{SlotBytes: 8192, Depth: 2, Lanes: 1})
	c := w.ranks[0].comm
	for _, v := range []uint64{2, 5, 100_000, 200_000, 1<<18 - 1, 1 << 18, 1<<18 + 2} {
		c.rearm(&Version{Epoch: v, From: v * 3})
		require.Equal(t, decided(0, v, v*3), decision(c.dec.Load()))
		c.rearm(&Version{Epoch: v - 1, From: 99})
		require.Equal(t, decided(0, v, v*3), decision(c.dec.Load()), "an older version")
		c.dec.Store(uint64(decided(0, v, v*3+4)))
		c.rearm(&Version{Epoch: v, From: v * 3})
		require.Equal(t, decided(0, v, v*3+4), decision(c.dec.Load()), "it is there already")
	}
}

func TestArena(t *testing.T) {
	mem := make([]byte, 1<<20)
	reserved, full := 0, errors.New("no memory")
	reserve := func(n int) error {
		if n > 768<<10 {
			return full
		}
		reserved = max(reserved, n)
		return nil
	}
	_, err := NewArena(make([]byte, dirBytes), reserve, Shape{})
	require.ErrorContains(t, err, "SERRY_SHM_BYTES")
	_, err = NewArena(mem, reserve, Shape{Size: 1, SlotBytes: 800 << 10, Depth: 1, Lanes: 1})
	require.ErrorIs(t, err, full)
	first := Shape{Size: 2, SlotBytes: 8192, Depth: 1, Lanes: 1}
	a, err := NewArena(mem, reserve, first)
	require.NoError(t, err)
	require.Equal(t, dirBytes+first.Bytes(), reserved)
	r := rand.New(rand.NewPCG(3, 4))
	type open struct {
		id   uint64
		s    Shape
		area *area
	}
	var groups []open
	refused := map[bool]int{}
	for i := range 3000 {
		if len(groups) > 0 && r.IntN(2) == 0 {
			k := r.IntN(len(groups))
			a.free(machine{}, groups[k].id)
			got, err := find(machine{}, mem, groups[k].id, groups[k].s)
			require.NoError(t, err)
			require.Nil(t, got)
			groups = append(groups[:k], groups[k+1:]...)
			continue
		}
		s := Shape{Size: 1 + r.IntN(9), SlotBytes: 8192 * (1 + r.IntN(4)), Depth: 1 + r.IntN(4), Lanes: 1 + r.IntN(2)}
		id := uint64(i + 2)
		v, err := a.alloc(machine{}, id, s, uint64(i))
		if err != nil {
			if !errors.Is(err, full) {
				require.ErrorContains(t, err, "SERRY_SHM_BYTES")
			}
			refused[errors.Is(err, full)]++
			continue
		}
		groups = append(groups, open{id, s, v})
		// Whoever looks it up sees the same memory, and nobody else's.
		p, err := find(machine{}, mem, id, s)
		require.NoError(t, err)
		require.Equal(t, uint64(i), p.done.Load())
		for k := range v.slots {
			require.Zero(t, v.slots[k].pub.Load())
			require.Len(t, v.slots[k].data, s.SlotBytes)
			for b := range v.slots[k].data {
				v.slots[k].data[b] = byte(id)
			}
			require.Equal(t, byte(id), p.slots[k].data[s.SlotBytes-1])
		}
		_, err = find(machine{}, mem, id, Shape{Size: s.Size, SlotBytes: s.SlotBytes, Depth: s.Depth + 1, Lanes: s.Lanes})
		require.ErrorContains(t, err, "use the same options on all ranks")
		for _, g := range groups {
			for k := range g.area.slots {
				d := g.area.slots[k].data
				require.Equal(t, byte(g.id), d[0])
				require.Equal(t, byte(g.id), d[len(d)-1])
			}
		}
		rest := mem[reserved:] // what does not exist is not touched
		require.Equal(t, len(rest), bytes.Count(rest, []byte{0}))
	}
	require.Positive(t, refused[true])
	require.Positive(t, refused[false])
	small, err := NewArena(make([]byte, dirBytes+3*pageBytes), func(int) error { return nil }, Shape{})
	require.NoError(t, err)
	_, err = small.alloc(machine{}, 9, Shape{Size: 2, SlotBytes: 8192, Depth: 2, Lanes: 1}, 0)
	require.ErrorContains(t, err, "no room")
}

// TestPrepare: groups of these shapes are made without another page.
func TestPrepare(t *testing.T) {
	mem := make([]byte, 1<<20)
	reserved, calls := 0, 0
	a, err := NewArena(mem, func(n int) error {
		if n > reserved {
			reserved, calls = n, calls+1
		}
		return nil
	}, Shape{})
	require.NoError(t, err)
	small, big := Shape{Size: 2, SlotBytes: 8192, Depth: 1, Lanes: 1}, Shape{Size: 3, SlotBytes: 65536, Depth: 4, Lanes: 1}
	_, err = a.alloc(machine{}, 2, small, 0)
	require.NoError(t, err)
	_, err = a.alloc(machine{}, 3, small, 0)
	require.NoError(t, err)
	a.free(machine{}, 2)
	a.Prepare(big, small)
	was := calls
	_, err = a.alloc(machine{}, 4, big, 0)
	require.NoError(t, err)
	_, err = a.alloc(machine{}, 5, small, 0)
	require.NoError(t, err)
	require.Equal(t, was, calls)
	a.Prepare(Shape{Size: 2, SlotBytes: 1 << 20, Depth: 1, Lanes: 1}) // for which there is no room
	require.Equal(t, was, calls)
}

// FuzzFind reads the directory of a peer that may write anything.
func FuzzFind(f *testing.F) {
	s := Shape{Size: 3, SlotBytes: 8192, Depth: 2, Lanes: 1}
	good := make([]byte, dirBytes+4*pageBytes+s.areaBytes())
	a, err := NewArena(good, func(int) error { return nil }, s)
	if err != nil {
		f.Fatal(err)
	}
	if _, err := a.alloc(machine{}, 7, s, 5); err != nil {
		f.Fatal(err)
	}
	f.Add(good[:64], uint32(0), uint32(len(good)))
	f.Add([]byte{7, 0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, uint32(32*(dirEntries-1)), uint32(len(good)))
	f.Add(good[:32], uint32(31), uint32(dirBytes))
	f.Fuzz(func(t *testing.T, entry []byte, at, size uint32) {
		mem := make([]byte, min(size, 1<<20)&^7)
		if at := int(at) &^ 7; at < len(mem) {
			copy(mem[at:], entry)
		}
		v, err := find(machine{}, mem, 7, s)
		if err != nil || v == nil {
			return
		}
		// Everything that it gives lies inside.
		_ = v.done.Load() + v.completing.Load()
		for i := range v.slots {
			q := &v.slots[i]
			_ = q.pub.Load() + q.ack.Load() + q.hold.Load() + binary.LittleEndian.Uint64(q.call) + uint64(q.counts[len(q.counts)-1])
			if len(q.data) != s.SlotBytes || cap(q.data) != s.SlotBytes {
				t.Fatalf("slot of %d bytes", len(q.data))
			}
			_ = q.data[len(q.data)-1]
		}
	})
}

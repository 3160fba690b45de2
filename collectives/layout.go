package collectives

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
)

// A process's arena is written by that process alone and mapped read-only by the others of its host.
//
//	0          directory: 1024 entries of 32 bytes {group id, offset of the area, slot bytes, depth<<32 | lanes<<24 | size}
//	32 KiB..   areas
//
// An area belongs to one group:
//
//	0          done: this rank has returned from every operation up to this sequence
//	128        completing: it may be about to return from operations up to this sequence
//	256        slots, depth x lanes of them
//
// A slot holds the contribution to one operation (to one half of it where lanes is 2). Words that different ranks poll
// are 128 bytes apart.
//
//	0          pub: stamp<<20 | chunks published<<1 | sealed
//	128        ack: stamp<<20 | chunks consumed<<1           (this rank's reading of the same operation)
//	256        hold: stamp<<20 | 1                           ("I hold all", groups over several hosts)
//	384        the call (callBytes), then {offset, length} for each rank of the group (16 bytes each)
//	...        data, slot bytes, 4 KiB aligned
//
// stamp is the low 14 bits of the version and the low 30 of the sequence.
const (
	dirEntries  = 1024
	entryBytes  = 32
	dirBytes    = dirEntries * entryBytes
	areaHeader  = 256
	slotPub     = 0
	slotAck     = 128
	slotHold    = 256
	slotCall    = 384
	callBytes   = 64
	slotCounts  = slotCall + callBytes
	pageBytes   = 4096
	maxChunks   = 1<<19 - 1
	stampShift  = 20
	sealedBit   = 1
	stampSeqLen = 30
)

func stampOf(version, seq uint64) uint64 {
	return (version&(1<<14-1))<<stampSeqLen | seq&(1<<stampSeqLen-1)
}

// reopen makes a word of our own 0 before what it stands for is overwritten. A swap, not a store: on arm64 the plain stores
// that follow a store may be seen before it.
func reopen(w Word) {
	for !w.CompareAndSwap(w.Load(), 0) {
	}
	w.Load()
}

// area is one rank's memory for one group, its own or a peer's.
type area struct {
	done, completing Word
	slots            []slotMem // index (seq % depth) * lanes + lane
}

type slotMem struct {
	pub, ack, hold Word
	call           []byte // callBytes
	counts         []byte // 16 bytes per rank
	data           []byte
}

// Shape is the size of a group's area, equal on all its members.
type Shape struct {
	Size      int // ranks
	SlotBytes int // data of one slot (of one half where Lanes is 2)
	Depth     int // operations that may have bytes in flight
	Lanes     int // 2: pairs of halves (dispatch and combine), else 1
}

func (s Shape) dataOffset() int {
	return (slotCounts + 16*s.Size + pageBytes - 1) &^ (pageBytes - 1)
}

func (s Shape) slotStride() int { return s.dataOffset() + (s.SlotBytes+pageBytes-1)&^(pageBytes-1) }

// Bytes is the arena that a group of this shape takes.
func (s Shape) Bytes() int { return s.areaBytes() }

func (s Shape) areaBytes() int {
	return (areaHeader+s.Depth*s.Lanes*s.slotStride()+pageBytes-1)&^(pageBytes-1) + pageBytes
}

// view makes an area of the bytes at off, which have been checked to be in bounds.
func (s Shape) view(m Memory, arena []byte, off int) *area {
	a := &area{done: m.Word64(arena, off), completing: m.Word64(arena, off+128)}
	for i := range s.Depth * s.Lanes {
		b := off + areaHeader + i*s.slotStride()
		d := b + s.dataOffset()
		a.slots = append(a.slots, slotMem{
			pub: m.Word64(arena, b+slotPub), ack: m.Word64(arena, b+slotAck), hold: m.Word64(arena, b+slotHold),
			call:   arena[b+slotCall : b+slotCall+callBytes : b+slotCall+callBytes],
			counts: arena[b+slotCounts : b+slotCounts+16*s.Size : b+slotCounts+16*s.Size],
			data:   arena[d : d+s.SlotBytes : d+s.SlotBytes],
		})
	}
	return a
}

// Arena hands out the areas of this process. It is safe for concurrent use.
type Arena struct {
	// Locals is the arenas of the other living processes of this host; nil if there are none. To be set before New.
	Locals func() [][]byte
	// Memory is what the words of all its groups are made of; nil: the machine's. To be set before New.
	Memory Memory

	mu      sync.Mutex
	mem     []byte
	reserve func(n int) error
	spans   []span // taken, ascending
}

// span is an area, or the place that is kept for one: entry is that of the directory.
type span struct {
	off, end, entry int
	group           uint64
}

// check keeps sizes within what can be computed with.
func (s Shape) check() error {
	if s.Size < 0 || s.Size > 1<<16 || s.SlotBytes < 0 || s.SlotBytes > 1<<40 || s.Depth < 0 || s.Depth > 1<<10 || s.Lanes < 0 || s.Lanes > 2 {
		return fmt.Errorf("collectives: %d x %d slots of %d bytes for %d ranks: want slots of at most 1 TiB, and at most 1024 of them", s.Depth, s.Lanes, s.SlotBytes, s.Size)
	}
	return nil
}

// NewArena takes over this process's own arena memory. reserve makes its first n bytes exist, which none need to before;
// first is the shape of a group for which there must be room at once.
func NewArena(mem []byte, reserve func(n int) error, first Shape) (*Arena, error) {
	if err := first.check(); err != nil {
		return nil, err
	}
	if need := dirBytes + first.areaBytes(); len(mem) < need {
		return nil, fmt.Errorf("collectives: arena of %d bytes, at least %d are needed: raise SERRY_SHM_BYTES or use smaller slots", len(mem), need)
	} else if err := reserve(need); err != nil {
		return nil, fmt.Errorf("collectives: %w", err)
	}
	return &Arena{mem: mem, reserve: reserve}, nil
}

// room is where an area of need bytes fits first, and the index of the span after it.
func room(spans []span, need int) (off, at int) {
	off = dirBytes
	for i, sp := range spans {
		if sp.off-off >= need {
			break
		}
		off, at = sp.end, i+1
	}
	return off, at
}

// Prepare makes the memory of groups of these shapes exist, which takes its time, so that New has it at once, on a thread
// that may not be held up. If there is no room New will say so.
func (a *Arena) Prepare(shapes ...Shape) {
	a.mu.Lock()
	spans, most := slices.Clone(a.spans), 0
	for _, s := range shapes {
		if s.check() != nil {
			continue
		}
		off, at := room(spans, s.areaBytes())
		spans = slices.Insert(spans, at, span{off: off, end: off + s.areaBytes()})
		if end := off + s.areaBytes(); end <= len(a.mem) {
			most = max(most, end)
		}
	}
	a.mu.Unlock()
	_ = a.reserve(most)
}

// alloc makes the area of a group and publishes it in the directory. done is where its sequence starts.
func (a *Arena) alloc(m Memory, group uint64, s Shape, done uint64) (*area, error) {
	sp, err := a.take(group, s)
	if err != nil {
		return nil, err
	}
	start := sp.off + (pageBytes-areaHeader%pageBytes)%pageBytes // so that slots' data is page aligned
	v := s.view(m, a.mem, start)
	v.done.Store(done)
	v.completing.Store(done)
	for i := range v.slots {
		v.slots[i].pub.Store(0)
		v.slots[i].ack.Store(0)
		v.slots[i].hold.Store(0)
	}
	e := sp.entry * entryBytes
	m.Word64(a.mem, e+8).Store(uint64(start))
	m.Word64(a.mem, e+16).Store(uint64(s.SlotBytes))
	m.Word64(a.mem, e+24).Store(uint64(s.Depth)<<32 | uint64(s.Lanes)<<24 | uint64(s.Size))
	m.Word64(a.mem, e).Store(group)
	return v, nil
}

// take finds room for an area of this shape, and makes its memory exist.
func (a *Arena) take(group uint64, s Shape) (sp span, err error) {
	if err := s.check(); err != nil {
		return sp, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	need := s.areaBytes()
	off, at := room(a.spans, need)
	if off+need > len(a.mem) {
		return sp, fmt.Errorf("collectives: no room for a group of %d ranks: its slots take %d bytes (%d x %d x %d) and %d of %d are left: raise SERRY_SHM_BYTES or use smaller slots",
			s.Size, need, s.Depth, s.Lanes, s.SlotBytes, len(a.mem)-off, len(a.mem))
	}
	if len(a.spans) >= dirEntries {
		return sp, fmt.Errorf("collectives: %d groups are open already: close some", dirEntries)
	}
	if err := a.reserve(off + need); err != nil {
		return sp, fmt.Errorf("collectives: no memory for a group of %d ranks, whose slots take %d bytes: %w", s.Size, need, err)
	}
	sp = span{off: off, end: off + need, group: group}
	for slices.ContainsFunc(a.spans, func(t span) bool { return t.entry == sp.entry }) {
		sp.entry++
	}
	a.spans = slices.Insert(a.spans, at, sp)
	return sp, nil
}

// free takes the area of a group back. Nobody may read it any more.
func (a *Arena) free(m Memory, group uint64) {
	at := func() int { return slices.IndexFunc(a.spans, func(sp span) bool { return sp.group == group }) }
	a.mu.Lock()
	i, e := at(), 0
	if i >= 0 {
		e = a.spans[i].entry
	}
	a.mu.Unlock()
	if i < 0 {
		return
	}
	m.Word64(a.mem, e*entryBytes).Store(0) // before its place may be another's
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := at(); i >= 0 {
		a.spans = slices.Delete(a.spans, i, i+1)
	}
}

// find returns a peer's area of the group, nil if it has not made it yet. What the directory says is read once and
// checked: a peer may write anything.
func find(m Memory, arena []byte, group uint64, s Shape) (*area, error) {
	if len(arena) < dirBytes {
		return nil, fmt.Errorf("arena of %d bytes", len(arena))
	}
	for i := range dirEntries {
		if m.Word64(arena, i*entryBytes).Load() != group {
			continue
		}
		off := m.Word64(arena, i*entryBytes+8).Load()
		slot, dls := m.Word64(arena, i*entryBytes+16).Load(), m.Word64(arena, i*entryBytes+24).Load()
		if slot != uint64(s.SlotBytes) || dls != uint64(s.Depth)<<32|uint64(s.Lanes)<<24|uint64(s.Size) {
			return nil, fmt.Errorf("its slots are %d x %d x %d bytes for %d ranks, ours %d x %d x %d for %d: use the same options on all ranks",
				dls>>32, dls>>24&0xff, slot, dls&0xffffff, s.Depth, s.Lanes, s.SlotBytes, s.Size)
		}
		if need := uint64(s.areaBytes() - pageBytes); off < dirBytes || off%128 != 0 || need > uint64(len(arena)) || off > uint64(len(arena))-need {
			return nil, fmt.Errorf("directory entry %d points to %d, outside of its arena", i, off)
		}
		return s.view(m, arena, int(off)), nil
	}
	return nil, nil
}

var le = binary.LittleEndian

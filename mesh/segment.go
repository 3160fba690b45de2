package mesh

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/serry-project/serry/device/host"
)

// The segment of a process: one memfd that it alone writes, mapped read-only by the others of its host. Little endian.
//
//	0        "serrySEG"
//	8        layout version (4)    12 pid, as its owner sees it (4)
//	16       nonce (16)
//	32       start time (8)        40 size of all (8)
//	48       offset (8) and number (8) of the death words
//	64       offset (8) and size (8) of the board
//	80       offset (8) and size (8) of the arena
//	128      turns of the owner's loop (8), alone on its line
//	192      id of the shared words that the owner has (8), 0 until it has some
//	4096     death words, host.RobustStride apart, one per watcher: the owner hands each its index in the handshake
//	20480    board, 64 KiB
//	86016    arena, whose pages exist as far as Mesh.Reserve was asked for
//
// The header is complete before the descriptor leaves the process and never changes, but for turns and the id of the words. A reader copies each field once,
// and checks it, before it uses it.
const (
	segMagic   = "serrySEG"
	segVersion = 1

	offTurns   = 128
	offWords   = 192
	offDeath   = 4096
	deathWords = 1024
	offBoard   = offDeath + deathWords*host.RobustStride
	boardBytes = 64 << 10
	offArena   = offBoard + boardBytes
	noWatcher  = ^uint32(0)

	// WordsBytes is the size of a host's shared words.
	WordsBytes = 1 << 20
	wordsSize  = WordsBytes + 8 // of their segment: behind them is their random id, which is never 0
)

// segment is this process's own.
type segment struct {
	*host.Segment
	size uint64

	mu   sync.Mutex
	free []uint32 // watcher indices given back
	next uint32
}

func createSegment(id host.Ident, nonce Nonce, arena int64) (*segment, error) {
	if arena < 0 || arena > 1<<46 {
		return nil, fmt.Errorf("mesh: arena of %d bytes", arena)
	}
	s, err := host.CreateSparse("serry", offArena+int(arena), offArena)
	if err != nil {
		return nil, fmt.Errorf("mesh: %w", err)
	}
	b := s.Bytes()
	dontFork(b)
	le := binary.LittleEndian
	copy(b, segMagic)
	le.PutUint32(b[8:], segVersion)
	le.PutUint32(b[12:], uint32(id.PID))
	copy(b[16:], nonce[:])
	le.PutUint64(b[32:], id.StartTime)
	le.PutUint64(b[40:], uint64(len(b)))
	le.PutUint64(b[48:], offDeath)
	le.PutUint64(b[56:], deathWords)
	le.PutUint64(b[64:], offBoard)
	le.PutUint64(b[72:], boardBytes)
	le.PutUint64(b[80:], offArena)
	le.PutUint64(b[88:], uint64(arena))
	return &segment{Segment: s, size: uint64(len(b))}, nil
}

// watcher gives out the index of a death word; noWatcher when there are none left.
func (s *segment) watcher() uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		return i
	}
	if s.next == deathWords {
		return noWatcher
	}
	s.next++
	return s.next - 1
}

// release takes an index back, once its watcher can not watch any more.
func (s *segment) release(i uint32) {
	if i != noWatcher {
		s.mu.Lock()
		s.free = append(s.free, i)
		s.mu.Unlock()
	}
}

// wordsID is the id of the shared words that this process has.
func (s *segment) wordsID() *atomic.Uint64 { return host.Word64(s.Bytes(), offWords) }

func (s *segment) deathRegion() []byte { return s.Bytes()[offDeath:offBoard] }

// foreign is the segment of a peer, mapped here.
type foreign struct {
	seg          *host.Segment
	words        *atomic.Uint64 // id of the shared words that its owner has
	board, arena []byte
	death        []byte // its death words
	watch        uint32 // which of them is ours
	pidfd        int    // -1: none
	hasWords     bool   // its owner has the host's words; guarded by Mesh.mu once there is a Peer
}

// openForeign maps a peer's segment; fds are the segment and the pidfd. It owns them.
func openForeign(a *Address, size uint64, watch uint32, segFd, pidfd int) (_ *foreign, err error) {
	f := &foreign{watch: watch, pidfd: pidfd}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if size < offArena || size > 1<<47 {
		closeFd(segFd)
		return nil, fmt.Errorf("mesh: segment of %s: %d bytes", a.Name, size)
	}
	if f.seg, err = host.OpenSegment(segFd, int(size), false); err != nil {
		return nil, fmt.Errorf("mesh: segment of %s: %w", a.Name, err)
	}
	f.seg.Keep()
	b := f.seg.Bytes()
	dontFork(b)
	f.words = host.Word64(b, offWords)
	h := append([]byte(nil), b[:offTurns]...) // read once
	le := binary.LittleEndian
	if string(h[:8]) != segMagic {
		return nil, fmt.Errorf("mesh: segment of %s starts with %q", a.Name, h[:8])
	}
	if v := le.Uint32(h[8:]); v != segVersion {
		return nil, fmt.Errorf("mesh: segment of %s has layout version %d, this is %d: run the same serry on all ranks", a.Name, v, segVersion)
	}
	if Nonce(h[16:32]) != a.Nonce || le.Uint64(h[32:]) != a.StartTime {
		return nil, fmt.Errorf("mesh: segment of %s belongs to another process", a.Name)
	}
	part := func(off, size uint64) []byte {
		if err == nil && (off > uint64(len(b)) || size > uint64(len(b))-off || off%host.RobustStride != 0) {
			err = fmt.Errorf("mesh: segment of %s: a part of %d+%d lies outside of its %d bytes", a.Name, off, size, len(b))
		}
		if err != nil {
			return nil
		}
		return b[off : off+size : off+size]
	}
	words := le.Uint64(h[56:])
	if words > host.RobustMax || (watch != noWatcher && uint64(watch) >= words) {
		return nil, fmt.Errorf("mesh: segment of %s: death word %d of %d", a.Name, watch, words)
	}
	f.death = part(le.Uint64(h[48:]), words*host.RobustStride)
	f.board = part(le.Uint64(h[64:]), le.Uint64(h[72:]))
	f.arena = part(le.Uint64(h[80:]), le.Uint64(h[88:]))
	if err == nil && len(f.board) != boardBytes {
		err = errors.New("mesh: segment of " + a.Name + ": wrong size of the board")
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// gone says whether the kernel has marked the owner's death.
func (f *foreign) gone() bool {
	if f.watch != noWatcher && host.OwnerDied(host.RobustWord(f.death, int(f.watch)).Load()) {
		return true
	}
	if f.pidfd >= 0 {
		if dead, err := host.Exited(f.pidfd); err == nil && dead {
			return true
		}
	}
	return false
}

// close unmaps: nothing may look at the memory any more.
func (f *foreign) close() {
	if f == nil {
		return
	}
	f.closePidfd()
	if f.seg != nil {
		_ = f.seg.Close()
		f.seg = nil
	}
}

func (f *foreign) closePidfd() {
	if f.pidfd >= 0 {
		closeFd(f.pidfd)
		f.pidfd = -1
	}
}

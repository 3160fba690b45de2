package collectives

import (
	"errors"
	"fmt"

	"github.com/serry-project/serry/internal/wire"
)

// The host's shared words, version 2: an index, then an entry for each of its words.
//
//	0        index: 2016 words: who has entry i
//	16 KiB   entries of 512 bytes
//
// A word of the index is
//
//	0                                  free
//	hash of a group <<32 | random | 1  claimed for that group by one who is looking whether others have been faster
//	group id <<1                       the group's
//	all ones                           being given back
//
// and an entry
//
//	0    decision: use<<48 | version<<30 | sequence decided<<16 | closed for epoch (0: open)
//	128  generation (32 bit): sleepers wait for it to change
//	256  asleep (32 bit): 1 when somebody may sleep
//	384  use: how often the entry was given back
//
// A process that was stopped, dropped from the view and continued still has the words of groups that are gone. It tells by
// the use that a decision is another group's by now: it would have to sleep through 65,536 groups in one entry of 2016, which
// are taken at random, not to.
const (
	wordEntry   = 512
	wordIndex   = 16 << 10
	wordEntries = (WordsBytes - wordIndex) / wordEntry
	// WordsBytes is the size of the host's shared words.
	WordsBytes = 1 << 20

	wordClosing = ^uint64(0)
	maxGroup    = 1<<63 - 2 // ids are 1 to this
)

type decision uint64

const (
	useBits     = 16
	versionBits = 18
	decSeqBits  = 14 // far more than operations can be outstanding
)

func decided(use, version, seq uint64) decision {
	return decision(use<<48 | version&(1<<versionBits-1)<<30 | seq&(1<<decSeqBits-1)<<16)
}

func (d decision) use() uint64     { return uint64(d) >> 48 }
func (d decision) version() uint64 { return uint64(d) >> 30 & (1<<versionBits - 1) }
func (d decision) seq() uint64     { return uint64(d) >> 16 & (1<<decSeqBits - 1) }
func (d decision) closed() uint64  { return uint64(d) & 0xffff }

// closedFor is the mark of a word that is closed until the view of this epoch is installed.
func closedFor(epoch uint64) uint64 { return epoch%0xffff + 1 }

// behind says that a is before b, both counted modulo 2^bits.
func behind(a, b uint64, bits uint) bool {
	return int64((a-b)<<(64-bits)) < 0
}

// index is the host's words as the processes that share groups use them.
type index struct {
	m     Memory
	words []byte
}

// n is the number of entries: of WordsBytes wordEntries, in a simulation fewer.
func (x index) n() int { return min((len(x.words)-wordIndex)/wordEntry, wordIndex/8) }

func (x index) at(i int) Word { return x.m.Word64(x.words, 8*i) }

// claim finds or makes the entry of a group, and says which use of it that is.
func (x index) claim(group uint64) (off int, use uint64, err error) {
	for {
		i, err := x.place(group)
		if err != nil {
			return 0, 0, err
		}
		off = wordIndex + i*wordEntry
		use = x.m.Word64(x.words, off+384).Load() & (1<<useBits - 1)
		if x.at(i).Load() == group<<1 { // else it was given back meanwhile (the group has failed), and the use may be another's
			return off, use, nil
		}
	}
}

var errNoWord = errors.New("no word of the host is free")

// place finds or makes a group's place. Several may do that at once, and die at it, and places that are given back leave
// gaps, so who has taken a free place looks at all others before he makes it the group's. Of two who do, one at least sees
// the other's, and gives way or takes it away from him: the word of a claim is his alone.
func (x index) place(group uint64) (int, error) {
	if group == 0 || group > maxGroup {
		return 0, fmt.Errorf("collectives: group id %#x: want 1 to %#x", group, uint64(maxGroup))
	}
	final, mark := group<<1, wire.Hash(0, group)<<32
	rivals := func(w uint64) bool { return w&1 != 0 && w != wordClosing && w&^(1<<32-1) == mark }
	n := x.n()
	for try := range 10_000 {
		free, rival, claimed := -1, -1, false
		for k, at := 0, int(x.m.Rand()>>1); k < n; k++ {
			i := (at + k) % n
			switch w := x.at(i).Load(); {
			case w == final:
				return i, nil
			case w == 0 && free < 0:
				free = i
			case w&1 != 0 && w != wordClosing:
				if rivals(w) {
					rival = i
				}
				if claimed = true; try > 100 && (rivals(w) || free < 0) { // he is dead or stopped, or begins again
					x.at(i).CompareAndSwap(w, 0)
				}
			}
		}
		switch {
		case rival >= 0, free < 0 && claimed && try < 200:
			x.m.Yield()
			continue
		case free < 0:
			return 0, fmt.Errorf("collectives: %d groups are open on this host already: close some: %w", n, errNoWord)
		}
		mine := mark | uint64(x.m.Rand()) | 1
		if !x.at(free).CompareAndSwap(0, mine) {
			continue
		}
		if i, ok := x.confirm(free, mine, final, rivals); ok {
			return i, nil
		}
	}
	return 0, fmt.Errorf("collectives: the host's words are contested: too many processes make group %#x at once", group)
}

// confirm makes the claim of place at the group's, unless somebody else has one.
func (x index) confirm(at int, mine, final uint64, rivals func(uint64) bool) (int, bool) {
	for i := 0; i < x.n(); i++ {
		w := x.at(i).Load()
		switch {
		case i == at:
		case w == final:
			x.at(at).CompareAndSwap(mine, 0)
			return i, true
		case rivals(w) && i < at:
			x.at(at).CompareAndSwap(mine, 0)
			return 0, false
		case rivals(w) && !x.at(i).CompareAndSwap(w, 0):
			i-- // it is another's now
		}
	}
	return at, x.at(at).CompareAndSwap(mine, final)
}

// giveBack makes the entry of a group free. Nobody of this host may use it any more.
func (x index) giveBack(off int, group uint64) {
	id := x.at((off - wordIndex) / wordEntry)
	if id.CompareAndSwap(group<<1, wordClosing) {
		w := x.m.Word64(x.words, off+384)
		use := w.Load() + 1 // nobody else gives it back
		w.Store(use)
		x.m.Word64(x.words, off).Store(uint64(decided(use&(1<<useBits-1), 0, 0)))
		x.m.Word32(x.words, off+256).Store(0)
		id.Store(0)
	}
}

// sweep gives back the entries of groups of which no living process of this host has an area: it has one before it looks
// for the entry, so the others are of processes that died before they could give them back.
func (x index) sweep(arenas [][]byte) {
	open := map[uint64]bool{}
	for _, a := range arenas {
		for i := range min(dirEntries, len(a)/entryBytes) {
			open[x.m.Word64(a, i*entryBytes).Load()] = true
		}
	}
	for i := range x.n() {
		if w := x.at(i).Load(); w != 0 && w&1 == 0 && !open[w>>1] {
			x.giveBack(wordIndex+i*wordEntry, w>>1)
		}
	}
}

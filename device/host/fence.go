package host

import "sync/atomic"

// A word in shared memory that says "what follows is whole" (a seqlock's mark) stands around a payload of plain stores and
// loads. On amd64 any atomic access keeps them apart. On arm64 an atomic Store is a release and an atomic Load an acquire,
// which leaves two gaps: a plain store after Store(0) may be seen before the 0, and a plain load before the re-checking
// Load may be done after it. Begin and Recheck close them; the closing mark (Store after the payload) and the first Load
// need nothing more.

// Begin sets the opening mark of a writer and returns what it was: no store after it is seen before it. The order is the
// one of a release and the acquire after it, which no processor turns round, whether its Swap is one instruction or a loop.
func Begin(w *atomic.Uint64, mark uint64) (was uint64) {
	was = w.Swap(mark)
	w.Load()
	return was
}

// Recheck loads the mark again after a reader's plain loads: none of them is done after it. The atomic addition to a word
// that nobody else sees is a release, which the loads before it cannot pass, and the acquire that is Load cannot pass it.
func Recheck(w interface{ Load() uint64 }) uint64 {
	var fence atomic.Uint32
	fence.Add(1)
	return w.Load()
}

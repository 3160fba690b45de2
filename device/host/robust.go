package host

import "sync/atomic"

// A death region is shared memory in which a process keeps one futex word per
// peer that watches it:
//
//	offset 0               word of watcher 0   4 bytes, then 12 unused
//	offset RobustStride    word of watcher 1
//	...
//
// While the owner lives its word is 0 (not yet registered) or its agent
// thread's id with the FUTEX_WAITERS bit. When that thread dies, and long
// before the kernel has freed the process's memory, the kernel sets
// FUTEX_OWNER_DIED in every word and wakes one waiter of each: hence one word
// per watcher. Watchers map the region read-only.
//
// The kernel finds the words over a linked list of its robust-futex interface.
// That list lies in private memory of the owner, its nodes as far apart as the
// words, so one offset leads from every node to its word and no pointer is
// ever in shared memory.

// RobustStride is the distance between two words of a death region.
const RobustStride = 16

// RobustMax is the largest number of words in a death region: the kernel walks
// no longer list.
const RobustMax = 2048

const (
	futexWaiters   = 0x80000000
	futexOwnerDied = 0x40000000
	futexTidMask   = 0x3fffffff
)

// RobustBytes is the size of a death region for n watchers.
func RobustBytes(n int) int { return n * RobustStride }

// RobustWord is the word of watcher i in a death region.
func RobustWord(region []byte, i int) *atomic.Uint32 { return Word32(region, i*RobustStride) }

// OwnerDied says whether the value of a death word says that its owner died.
func OwnerDied(v uint32) bool { return v&futexOwnerDied != 0 }

package chaos

import (
	"fmt"
	"slices"
)

// canaries are the buffers of the last calls that have returned, with what was in them then: nothing may touch them any
// more, whoever finishes late what it had begun.
type canaries struct {
	kept []canary
	next int
}

type canary struct {
	what string
	data []byte // the buffer itself
	sum  uint64
}

const canaryCount = 24

// keep takes a buffer in. After an error nothing is said of what is in it, so it is filled first.
func (c *canaries) keep(what string, failed bool, buffers ...[]byte) {
	for _, b := range buffers {
		if len(b) == 0 {
			continue
		}
		if failed {
			for i := range b {
				b[i] = 0xc3
			}
		}
		x := canary{what, b, sum(b)}
		if len(c.kept) < canaryCount {
			c.kept = append(c.kept, x)
			continue
		}
		c.kept[c.next] = x
		c.next = (c.next + 1) % canaryCount
	}
}

// check says whether all are as they were, and which is not.
func (c *canaries) check() error {
	for _, x := range c.kept {
		if s := sum(x.data); s != x.sum {
			return fmt.Errorf("a buffer of %s has changed after the call had returned (%d bytes, sum %x, was %x)", x.what, len(x.data), s, x.sum)
		}
	}
	return nil
}

// guarded is n bytes between bytes that nobody may write.
type guarded struct{ all []byte }

const guardBytes = 64

func guard(b []byte) guarded {
	g := guarded{make([]byte, guardBytes+len(b)+guardBytes)}
	for i := range g.all {
		g.all[i] = 0x96
	}
	copy(g.all[guardBytes:], b)
	return g
}

// inner is the bytes.
func (g guarded) inner() []byte {
	return g.all[guardBytes : len(g.all)-guardBytes : len(g.all)-guardBytes]
}

// whole says that nobody has written around them.
func (g guarded) whole() bool {
	bad := func(b byte) bool { return b != 0x96 }
	return !slices.ContainsFunc(g.all[:guardBytes], bad) && !slices.ContainsFunc(g.all[len(g.all)-guardBytes:], bad)
}

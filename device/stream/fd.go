package stream

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// fd is a descriptor of ours that several goroutines use: it is closed when the last of them has let go, so its number
// can not come to mean another file under anybody's hands.
type fd struct {
	n    int
	refs atomic.Int64 // uses, plus closedBit once close was called
}

const closedBit = 1 << 40

func newFd(n int) *fd { return &fd{n: n} }

// use returns the number, valid until done.
func (f *fd) use() (int, bool) {
	for {
		r := f.refs.Load()
		if r >= closedBit {
			return -1, false
		}
		if f.refs.CompareAndSwap(r, r+1) {
			return f.n, true
		}
	}
}

func (f *fd) done() {
	if f.refs.Add(-1) == closedBit {
		unix.Close(f.n)
	}
}

// close ends it for new users; who is inside a call gets end of file.
func (f *fd) close() {
	for {
		r := f.refs.Load()
		if r >= closedBit {
			return
		}
		if f.refs.CompareAndSwap(r, r+closedBit) {
			if r == 0 {
				unix.Close(f.n)
			} else {
				_ = unix.Shutdown(f.n, unix.SHUT_RDWR)
			}
			return
		}
	}
}

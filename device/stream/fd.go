package stream

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Pipe is a connection that is no socket: a simulation's. No method blocks.
type Pipe interface {
	Send(b []byte) (int, error) // unix.EAGAIN: no room now
	Recv(b []byte) (int, error) // unix.EAGAIN: nothing has come; 0, nil: the end
	CloseWrite()
	Close()
}

// fd is a descriptor of ours that several goroutines use: it is closed when the last of them has let go, so its number
// can not come to mean another file under anybody's hands.
type fd struct {
	n    int
	pipe Pipe         // in its place
	refs atomic.Int64 // uses, plus closedBit once close was called
}

const closedBit = 1 << 40

func (f *fd) send(b []byte) (int, error) {
	if f.pipe != nil {
		return f.pipe.Send(b)
	}
	return send(f.n, b)
}

func (f *fd) recv(b []byte) (int, error) {
	if f.pipe != nil {
		return f.pipe.Recv(b)
	}
	return recv(f.n, b)
}

func (f *fd) closeWrite() {
	if f.pipe != nil {
		f.pipe.CloseWrite()
		return
	}
	_ = unix.Shutdown(f.n, unix.SHUT_WR)
}

func (f *fd) free() {
	if f.pipe != nil {
		f.pipe.Close()
		return
	}
	unix.Close(f.n)
}

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
		f.free()
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
			switch {
			case r == 0:
				f.free()
			case f.pipe == nil:
				_ = unix.Shutdown(f.n, unix.SHUT_RDWR)
			}
			return
		}
	}
}

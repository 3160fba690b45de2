package host

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"
)

// Segment is anonymous memory with a descriptor that can be passed to another
// process. Its size never changes, it vanishes with its last user, and the
// pages that were reserved exist, so that no load or store in them can raise
// SIGBUS.
//
// The methods may be called from several goroutines. The memory may not be
// used after Close.
type Segment struct {
	mu  sync.Mutex
	mem []byte
	fd  int

	growing  sync.Mutex // held while pages come into being, which may take long; before mu
	reserved int        // bytes from the start whose pages exist; of what was created here
}

const (
	sizeSeals   = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	hugePage    = 2 << 20
	maxNameByte = 200 // the kernel's limit is 249
)

// CreateSegment makes a segment that only this process can write: it is sealed
// with F_SEAL_FUTURE_WRITE once it is mapped here, so whoever gets the
// descriptor can map it read-only and no more. The memory is zero.
//
// size is rounded up to whole pages. An error that wraps ErrNoMemory says how
// much was asked and what to do.
func CreateSegment(name string, size int) (*Segment, error) {
	return CreateSparse(name, size, size)
}

// CreateSparse is CreateSegment, but only the first reserve bytes exist; the
// others come with Reserve, and nobody may touch them before.
func CreateSparse(name string, size, reserve int) (*Segment, error) {
	return create(name, size, reserve, sizeSeals|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
}

// CreateShared makes a segment that every process with the descriptor may map
// writable: for the few words that change by compare-and-swap.
func CreateShared(name string, size int) (*Segment, error) {
	return create(name, size, size, sizeSeals|unix.F_SEAL_SEAL)
}

func create(name string, size, reserve, seals int) (_ *Segment, err error) {
	if size <= 0 || size > math.MaxInt-unix.Getpagesize() {
		return nil, fmt.Errorf("host: segment %q: size %d: want at least 1 byte", name, size)
	}
	if len(name) > maxNameByte {
		return nil, fmt.Errorf("host: segment %q: the name has %d bytes, at most %d are allowed", name, len(name), maxNameByte)
	}
	page := unix.Getpagesize()
	size = (size + page - 1) / page * page
	if err := mayGrow(size); err != nil {
		return nil, fmt.Errorf("host: segment %q: %w", name, err)
	}
	fd, err := memfd(name)
	if err != nil {
		return nil, fmt.Errorf("host: segment %q: memfd_create: %w", name, err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, fmt.Errorf("host: segment %q: %w", name, noRoom("ftruncate", size, err))
	}
	if err := fallocate(fd, 0, min(reserve, size)); err != nil {
		return nil, fmt.Errorf("host: segment %q: %w", name, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sizeSeals); err != nil {
		return nil, fmt.Errorf("host: segment %q: fcntl F_ADD_SEALS shrink and grow: %w", name, err)
	}
	mem, err := mapShared(fd, size, true)
	if err != nil {
		return nil, fmt.Errorf("host: segment %q: %w", name, noRoom("mmap", size, err))
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals&^sizeSeals); err != nil {
		_ = unix.Munmap(mem)
		return nil, fmt.Errorf("host: segment %q: fcntl F_ADD_SEALS %#x: %w", name, seals&^sizeSeals, err)
	}
	return &Segment{mem: mem, fd: fd, reserved: min(reserve, size)}, nil
}

// Reserve makes the first n bytes of a segment that was created here exist,
// which takes 0.4 ms a MiB; what exists already costs nothing. An error that
// wraps ErrNoMemory says how much was asked and what to do; nothing has changed
// then.
func (s *Segment) Reserve(n int) error {
	s.growing.Lock()
	defer s.growing.Unlock()
	size, fd := len(s.Bytes()), s.FD()
	switch {
	case n > size:
		return fmt.Errorf("host: reserve %d bytes of a segment of %d", n, size)
	case n <= s.reserved:
		return nil
	case fd < 0:
		return errors.New("host: reserve: the descriptor was given up")
	}
	page := unix.Getpagesize()
	n = min((n+page-1)/page*page, size)
	if err := fallocate(fd, s.reserved, n-s.reserved); err != nil {
		return fmt.Errorf("host: %w", err)
	}
	s.reserved = n
	return nil
}

// OpenSegment maps a descriptor that another process passed. It takes
// ownership of fd, which it closes on error too. size is what the owner
// announced; a segment of any other size is refused, and so is one that is not
// sealed against shrinking (ErrNotSealed). size is rounded up to whole pages,
// as the owner rounded it.
func OpenSegment(fd, size int, writable bool) (_ *Segment, err error) {
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	page := unix.Getpagesize()
	if size <= 0 || size > math.MaxInt-page {
		return nil, fmt.Errorf("host: open segment: size %d: want at least 1 byte", size)
	}
	size = (size + page - 1) / page * page
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("host: open segment: fcntl F_GET_SEALS (is it a memfd?): %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("host: open segment: seals %#x: %w", seals, ErrNotSealed)
	}
	if writable && seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return nil, fmt.Errorf("host: open segment: seals %#x: its owner lets others only read: %w", seals, unix.EPERM)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("host: open segment: fstat: %w", err)
	}
	if st.Size != int64(size) {
		return nil, fmt.Errorf("host: open segment: it has %d bytes, its owner announced %d", st.Size, size)
	}
	mem, err := mapShared(fd, size, writable)
	if err != nil {
		return nil, fmt.Errorf("host: open segment: mmap %d bytes: %w", size, err)
	}
	return &Segment{mem: mem, fd: fd}, nil
}

// Bytes is the mapped memory, nil after Close. It faults on a store if the
// segment was opened read-only.
func (s *Segment) Bytes() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mem
}

// FD is the descriptor, to be passed on; it stays the segment's. -1 after Keep or Close.
func (s *Segment) FD() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fd
}

// Keep closes the descriptor and keeps the memory: for a segment that nobody will be passed.
func (s *Segment) Keep() {
	s.growing.Lock()
	defer s.growing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
		s.fd = -1
	}
}

// Close unmaps the memory and closes the descriptor. It may be called twice.
// Nothing may use the memory any more.
func (s *Segment) Close() error {
	s.growing.Lock()
	defer s.growing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.mem != nil {
		if err := unix.Munmap(s.mem); err != nil {
			errs = append(errs, fmt.Errorf("host: close segment: munmap: %w", err))
		}
		s.mem = nil
	}
	if s.fd >= 0 {
		if err := unix.Close(s.fd); err != nil {
			errs = append(errs, fmt.Errorf("host: close segment: close: %w", err))
		}
		s.fd = -1
	}
	return errors.Join(errs...)
}

func memfd(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

// mapShared maps all of fd, keeps it out of forked children and asks for huge
// pages. The last two are requests: a kernel that refuses them changes speed,
// not meaning.
func mapShared(fd, size int, writable bool) ([]byte, error) {
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	mem, err := unix.Mmap(fd, 0, size, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	if size >= hugePage {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
	return mem, nil
}

// mayGrow refuses a size beyond the file size limit: the kernel would send
// SIGXFSZ.
func mayGrow(size int) error {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_FSIZE, &lim) == nil && uint64(size) > lim.Cur {
		return fmt.Errorf("%d bytes asked, the file size limit is %d: raise it (ulimit -f) or ask for less (SERRY_SHM_BYTES): %w",
			size, lim.Cur, ErrNoMemory)
	}
	return nil
}

// headroom is what a process needs itself to go on: the kernel kills who takes
// the last page of a cgroup.
const headroom = 16 << 20

// fallocate makes pages exist. It refuses a size that cannot fit before any
// page is touched.
func fallocate(fd, off, size int) error {
	if size == 0 {
		return nil
	}
	free, what, err := freeMemory("/")
	if err == nil && uint64(size)+headroom > free {
		return fmt.Errorf("%d bytes asked, %s has %d left, of which the process itself needs some: ask for less (SERRY_SHM_BYTES) or give it more: %w",
			size, what, free, ErrNoMemory)
	}
	if err := retry(func() error { return unix.Fallocate(fd, 0, int64(off), int64(size)) }); err != nil {
		return noRoom("fallocate", size, err)
	}
	return nil
}

func noRoom(call string, size int, err error) error {
	switch err {
	case unix.ENOMEM, unix.ENOSPC, unix.EFBIG, unix.EDQUOT:
		return fmt.Errorf("%s %d bytes: %w (%w): ask for less (SERRY_SHM_BYTES) or give the host, "+
			"the cgroup or the address space limit (ulimit -v) more", call, size, ErrNoMemory, err)
	}
	return fmt.Errorf("%s %d bytes: %w", call, size, err)
}

func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

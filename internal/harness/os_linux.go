package harness

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Mono is a clock that all processes of this system share, in nanoseconds.
func Mono() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// Touch takes n bytes of memory, in pages of the smallest size, and touches them: the kernel has to take all of them back
// before it says that the process is gone.
func Touch(n int64) error {
	if n == 0 {
		return nil
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("harness: %d bytes to touch: %w", n, err)
	}
	_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 1
	}
	return nil
}

// State is the process's, as /proc has it: "T" is stopped; "" once it is gone.
func (p *Proc) State() string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid()))
	if err != nil {
		return ""
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	return f[0]
}

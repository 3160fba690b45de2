package bench

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mono is a clock that all processes of the host share, in nanoseconds.
func mono() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// resident takes n bytes of memory, in pages of the smallest size, and touches them: the kernel has to give all of them
// back before it says that the process is gone.
func resident(n int64) error {
	if n == 0 {
		return nil
	}
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 1
	}
	return nil
}

// cpu is the processor time of a process: utime + stime of /proc/pid/stat, in clock ticks, and what its own clock says,
// exactly.
func cpu(pid int) (ticked, exact time.Duration, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	for _, s := range f[11:13] { // utime, stime
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, 0, err
		}
		ticked += time.Duration(n) * (time.Second / 100) // USER_HZ
	}
	var t unix.Timespec
	if err := unix.ClockGettime(^int32(pid)<<3|2, &t); err != nil { // the clock of the process, clock_getcpuclockid(3)
		return 0, 0, err
	}
	return ticked, time.Duration(t.Nano()), nil
}

// used reads the processor time that the host and we have used so far.
func used() (u usage) {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	for i, s := range strings.Fields(line) {
		n, _ := strconv.ParseInt(s, 10, 64)
		d := time.Duration(n) * (time.Second / 100)
		switch i { // cpu user nice system idle iowait irq softirq steal; what follows is in user and nice
		case 1, 2, 3, 6, 7, 8:
			u.busy += d
			u.all += d
		case 4, 5:
			u.all += d
		}
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if unix.Getrusage(who, &r) == nil {
			u.ours += time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
	}
	return u
}

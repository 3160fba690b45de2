package bench

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

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

package host

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cores is the number of cores that this process may use at once: its
// affinity, or the CPU quota of its cgroup (rounded up) where that is less.
// At least 1.
func Cores() int {
	return coresUnder("/", affinity())
}

func affinity() int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return runtime.NumCPU() // more CPUs than a CPUSet has bits
	}
	return max(set.Count(), 1)
}

func coresUnder(root string, cores int) int {
	for _, dir := range cgroupDirs(root, "cpu") {
		quota, period := cpuQuota(dir)
		if quota > 0 && period > 0 {
			cores = min(cores, int((quota+period-1)/period))
		}
	}
	return max(cores, 1)
}

// cpuQuota reads the quota of one cgroup directory, of either version; 0 is no
// quota.
func cpuQuota(dir string) (quota, period int64) {
	if b, err := os.ReadFile(filepath.Join(dir, "cpu.max")); err == nil {
		f := strings.Fields(string(b))
		if len(f) == 2 && f[0] != "max" {
			quota, _ = strconv.ParseInt(f[0], 10, 64)
			period, _ = strconv.ParseInt(f[1], 10, 64)
		}
		return quota, period
	}
	quota, okQ := readInt(filepath.Join(dir, "cpu.cfs_quota_us"))
	period, okP := readInt(filepath.Join(dir, "cpu.cfs_period_us"))
	if !okQ || !okP || quota < 0 {
		return 0, 0
	}
	return quota, period
}

// freeMemory is what the host or a cgroup around this process could still
// give, page cache counted as free, and the name of the tighter one.
func freeMemory(root string) (free uint64, what string, err error) {
	b, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, "", fmt.Errorf("host: free memory: %w", err)
	}
	kib, ok := field(b, "MemAvailable:")
	if !ok {
		return 0, "", fmt.Errorf("host: free memory: no MemAvailable in /proc/meminfo: %w", ErrUnsupported)
	}
	free, what = kib<<10, "the host"
	for _, dir := range cgroupDirs(root, "memory") {
		limit, usage, cache, ok := memoryOf(dir)
		if !ok {
			continue
		}
		left := uint64(0)
		if used := usage - min(cache, usage); limit > used {
			left = limit - used
		}
		if left < free {
			free, what = left, "the cgroup of this process"
		}
	}
	return free, what, nil
}

func memoryOf(dir string) (limit, usage, cache uint64, ok bool) {
	stat, _ := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if l, ok := readInt(filepath.Join(dir, "memory.max")); ok { // "max" does not parse: no limit
		u, ok := readInt(filepath.Join(dir, "memory.current"))
		c, _ := field(stat, "inactive_file")
		return uint64(l), uint64(u), c, ok
	}
	l, okL := readInt(filepath.Join(dir, "memory.limit_in_bytes"))
	u, okU := readInt(filepath.Join(dir, "memory.usage_in_bytes"))
	if !okL || !okU || l >= math.MaxInt64/2 {
		return 0, 0, 0, false
	}
	c, _ := field(stat, "total_inactive_file")
	return uint64(l), uint64(u), c, true
}

// cgroupDirs lists the directories whose limits bind this process for one
// controller, from its own up to the mount point: in the unified hierarchy, in
// the controller's own, or in both where a host has both.
func cgroupDirs(root, controller string) []string {
	own, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	mounts, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return nil
	}
	var dirs []string
	for line := range strings.Lines(string(own)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || (f[1] != "" && !has(strings.Split(f[1], ","), controller)) {
			continue
		}
		mount, mountRoot := cgroupMount(mounts, f[1] == "", controller)
		if mount == "" {
			continue
		}
		rel, err := filepath.Rel(mountRoot, f[2])
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			rel = "." // the path is told from another namespace: the mount is what binds us
		}
		top := filepath.Join(root, mount)
		for dir := filepath.Join(top, rel); ; dir = filepath.Dir(dir) {
			dirs = append(dirs, dir)
			if dir == top || len(dir) <= len(top) {
				break
			}
		}
	}
	return dirs
}

// cgroupMount finds where a hierarchy is mounted and which of its directories
// the mount shows.
func cgroupMount(mountinfo []byte, unified bool, controller string) (mount, mountRoot string) {
	for line := range strings.Lines(string(mountinfo)) {
		pre, post, ok := strings.Cut(strings.TrimSpace(line), " - ")
		f, g := strings.Fields(pre), strings.Fields(post)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		if unified && g[0] == "cgroup2" || !unified && g[0] == "cgroup" && has(strings.Split(g[2], ","), controller) {
			return f[4], f[3]
		}
	}
	return "", ""
}

func has(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

func readInt(path string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return v, err == nil
}

// field finds "name value ..." on a line of its own.
func field(b []byte, name string) (uint64, bool) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) >= 2 && f[0] == name {
			v, err := strconv.ParseUint(f[1], 10, 64)
			return v, err == nil
		}
	}
	return 0, false
}

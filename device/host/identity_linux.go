package host

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Identity reads who and where this process is.
func Identity() (Ident, error) {
	id := Ident{PID: os.Getpid()}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id, fmt.Errorf("host: identity: boot id: %w", err)
	}
	id.BootID = strings.TrimSpace(string(boot))
	if id.Hostname, err = os.Hostname(); err != nil {
		return id, fmt.Errorf("host: identity: hostname: %w", err)
	}
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return id, fmt.Errorf("host: identity: start time: %w", err)
	}
	if id.StartTime, err = startTime(stat); err != nil {
		return id, fmt.Errorf("host: identity: start time: %w", err)
	}
	for _, ns := range []struct {
		name string
		ino  *uint64
	}{{"net", &id.NetNS}, {"pid", &id.PidNS}, {"ipc", &id.IpcNS}} {
		var st unix.Stat_t
		if err := unix.Stat("/proc/self/ns/"+ns.name, &st); err != nil {
			return id, fmt.Errorf("host: identity: stat of the %s namespace: %w", ns.name, err)
		}
		*ns.ino = st.Ino
	}
	return id, nil
}

// startTime is field 22 of a /proc/PID/stat line. The second field, the name,
// may hold spaces and parentheses.
func startTime(stat []byte) (uint64, error) {
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(f) < 20 {
		return 0, fmt.Errorf("/proc/self/stat has %d fields behind the name, want 20", len(f))
	}
	return strconv.ParseUint(string(f[19]), 10, 64)
}

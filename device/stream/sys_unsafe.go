//go:build linux

package stream

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func send(fd int, b []byte) (int, error) {
	const flags = unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT
	for {
		var n uintptr
		var e unix.Errno
		if len(b) <= rawLimit {
			n, _, e = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
		} else {
			n, _, e = unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
		}
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

func recv(fd int, b []byte) (int, error) {
	for {
		var n uintptr
		var e unix.Errno
		if len(b) <= rawLimit {
			n, _, e = unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
		} else {
			n, _, e = unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
		}
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

//go:build !linux

package stream

import "golang.org/x/sys/unix"

func send(fd int, b []byte) (int, error) {
	return unix.SendmsgN(fd, b, nil, nil, unix.MSG_DONTWAIT)
}

func recv(fd int, b []byte) (int, error) {
	n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
	return n, err
}

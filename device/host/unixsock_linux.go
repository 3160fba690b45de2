package host

import (
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// MaxFds is the largest number of descriptors in one message.
const MaxFds = 16

// SendFds sends payload (at least a byte) and descriptors over a unix stream
// socket and returns the number of bytes that the socket took. The descriptors
// travel with the first of them and stay the caller's. EAGAIN: the socket
// buffer is full and nothing was sent.
func SendFds(sockfd int, payload []byte, fds ...int) (int, error) {
	if len(payload) == 0 || len(fds) > MaxFds {
		return 0, fmt.Errorf("host: send descriptors: %d bytes and %d descriptors: want at least 1 byte and at most %d descriptors",
			len(payload), len(fds), MaxFds)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		n, err := unix.SendmsgN(sockfd, payload, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("host: sendmsg of %d bytes and %d descriptors: %w", len(payload), len(fds), err)
		}
		return n, nil
	}
}

// RecvFds receives bytes and the descriptors that came with them, which are
// close-on-exec and the caller's. io.EOF: the peer has closed. EAGAIN: there is
// nothing yet. One call returns the descriptors of one SendFds at most, and
// never bytes from before and behind descriptors together.
func RecvFds(sockfd int, buf []byte) (n int, fds []int, err error) {
	if len(buf) == 0 {
		return 0, nil, errors.New("host: receive descriptors: the buffer is empty")
	}
	oob := make([]byte, unix.CmsgSpace(MaxFds*4))
	var oobn, flags int
	for {
		n, oobn, flags, _, err = unix.Recvmsg(sockfd, buf, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return 0, nil, fmt.Errorf("host: recvmsg: %w", err)
	}
	fds, err = parseRights(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("the kernel dropped descriptors: too many were sent, or this process has too many open (ulimit -n)")
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return 0, nil, fmt.Errorf("host: recvmsg: %w", err)
	}
	if n == 0 {
		return 0, nil, io.EOF
	}
	return n, fds, nil
}

func parseRights(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, fmt.Errorf("descriptors: %w", err)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// PeerCred is the process and user at the other end of a connected unix
// socket, as they were when it connected or listened. pid is 0 if that process
// is in a pid namespace that ours cannot see.
func PeerCred(sockfd int) (pid, uid int, err error) {
	c, err := unix.GetsockoptUcred(sockfd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, 0, fmt.Errorf("host: getsockopt SO_PEERCRED: %w", err)
	}
	return int(c.Pid), int(c.Uid), nil
}

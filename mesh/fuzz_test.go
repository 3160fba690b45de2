//go:build linux

package mesh

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device/host"
)

// FuzzAccept lets a stranger say anything to the acceptor, and what it says first to the dialler.
func FuzzAccept(f *testing.F) {
	m, err := Open(context.Background(), Config{World: testWorld, Name: "m"})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { m.Close() })
	h := hello{purpose: forLink, world: testWorld, nonce: Nonce{1}, want: m.nonce, name: "x"}
	f.Add(message(msgHello, h.encode()))
	f.Add(append(message(msgHello, h.encode()), message(msgProof, make([]byte, 100))...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, dial := range []bool{false, true} {
			a, b := net.Pipe()
			go func() {
				go func() { _, _ = io.Copy(io.Discard, b) }()
				_, _ = b.Write(in)
				b.Close()
			}()
			tk := m.newTalk(a, forLink, Nonce{1})
			if dial {
				err = tk.dialled(m.addr)
			} else {
				err = tk.accepted(m.addr, m.welcome)
			}
			if err == nil {
				t.Error("accepted without the key")
			}
			a.Close()
		}
	})
}

// FuzzForeign maps segments whose header says anything.
func FuzzForeign(f *testing.F) {
	s, err := createSegment(host.Ident{}, Nonce{7}, 8192)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = s.Close() })
	mem := s.Bytes()
	good := append([]byte(nil), mem[48:96]...)
	f.Add(good, uint32(0))
	bad := append([]byte(nil), good...)
	binary.LittleEndian.PutUint64(bad, 1<<63)
	f.Add(bad, uint32(1<<31))
	f.Fuzz(func(t *testing.T, in []byte, watch uint32) {
		copy(mem[48:96], in)
		fd, err := unix.FcntlInt(uintptr(s.FD()), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			t.Fatal(err)
		}
		g, err := openForeign(&Address{Nonce: Nonce{7}}, s.size, watch, fd, -1)
		if err != nil {
			return
		}
		g.gone()
		sum := byte(0)
		for _, part := range [][]byte{g.board, g.arena, g.death} {
			for _, v := range part {
				sum += v
			}
		}
		_ = sum
		g.close()
	})
}

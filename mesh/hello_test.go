package mesh

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
)

// TestRefused: who is not of the group is refused, by both sides, with the reason.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []string
	}{
		{"key", func(c *Config) { c.Key = []byte("other") }, []string{"rank 1", "another key", "rank 0"}},
		{"no key", func(c *Config) { c.Key = nil }, []string{"no key"}},
		{"world", func(c *Config) { c.World = [16]byte{0xab, 0xcd} }, []string{"abcd", "0102"}},
	} {
		for _, far := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, " far ", far), func(t *testing.T) {
				ca, cb := testConfig(t, "rank 0"), testConfig(t, "rank 1")
				if far {
					ca.testHost, cb.testHost = 1, 2
				}
				c.change(&cb)
				ra := newRec()
				a, b := open(t, ca, ra), open(t, cb, newRec())
				for _, d := range [][2]*Mesh{{a, b}, {b, a}} {
					start := time.Now()
					_, err := d[0].Connect(short(t), d[1].Addr())
					var r *RefusedError
					if !errors.As(err, &r) {
						t.Fatal("want a refusal, got", err)
					}
					for _, w := range c.want {
						if !strings.Contains(err.Error(), w) {
							t.Errorf("%q is missing in %q", w, err)
						}
					}
					if d := time.Since(start); d > 2*time.Second {
						t.Error("took", d)
					}
				}
				if len(a.Peers())+len(b.Peers()) > 0 {
					t.Error("they are peers")
				}
			})
		}
	}
}

// fakeAddr is an address at which somebody else listens.
func fakeAddr(tcp string) []byte {
	return (&Address{Major: 1, Nonce: Nonce{9}, Name: "rank 9", Host: 77, TCP: []string{tcp}}).encode()
}

func TestVersion(t *testing.T) {
	a := open(t, testConfig(t, "rank 0"), newRec())
	other := func(b []byte) []byte { b[8], b[9] = 7, 3; return b }

	// Somebody of another version dials us.
	ad, _ := ParseAddr(a.Addr())
	c, err := net.Dial("tcp", ad.TCP[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write(other(message(msgHello, make([]byte, 200))))
	got, _ := io.ReadAll(c)
	if !bytes.Contains(got, []byte("7.3")) || !bytes.Contains(got, []byte("1.0")) || !bytes.HasPrefix(got, []byte(hsMagic+"\x01\x00")) {
		t.Errorf("%q", got)
	}

	// We dial somebody of another version.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = io.ReadFull(c, make([]byte, 30))
			_, _ = c.Write(other(message(msgHello, make([]byte, 100))))
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	if _, err = a.Connect(short(t), fakeAddr(l.Addr().String())); err == nil || !strings.Contains(err.Error(), "7.3") || !strings.Contains(err.Error(), "1.0") {
		t.Error(err)
	}
	bad := (&Address{Major: 4, Minor: 2, Name: "rank 3"}).encode()
	if _, err := a.Connect(short(t), bad); err == nil || !strings.Contains(err.Error(), "4.2") {
		t.Error(err)
	}
}

func TestNoSerry(t *testing.T) {
	a := open(t, testConfig(t, "rank 0"), newRec())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	if _, err := a.Connect(short(t), fakeAddr(l.Addr().String())); err == nil || !strings.Contains(err.Error(), `"HTTP/1.1 400`) {
		t.Error(err)
	}
	// Nobody listens there any more.
	gone, _ := net.Listen("tcp", "127.0.0.1:0")
	gone.Close()
	start := time.Now()
	if _, err := a.Connect(short(t), fakeAddr(gone.Addr().String())); err == nil || time.Since(start) > time.Second {
		t.Error(err, time.Since(start))
	}
	// Another process of the group has got the port.
	b := open(t, testConfig(t, "rank 1"), newRec())
	ab, _ := ParseAddr(b.Addr())
	if _, err := a.Connect(short(t), fakeAddr(ab.TCP[0])); err == nil || !strings.Contains(err.Error(), "is not here") {
		t.Error(err)
	}
	for _, s := range []string{"", "x", string(fakeAddr("x")[:20]), string(fakeAddr("x")) + "y"} {
		if _, err := a.Connect(short(t), []byte(s)); err == nil {
			t.Errorf("%q is an address", s)
		}
		if _, err := HostOf([]byte(s)); err == nil {
			t.Errorf("%q has a host", s)
		}
	}
	if _, err := a.Connect(short(t), a.Addr()); err == nil {
		t.Error("connected to itself")
	}
}

// TestStrangers: garbage and silence on the listeners harm nobody.
func TestStrangers(t *testing.T) {
	cfg := testConfig(t, "rank 0")
	cfg.Log = nil
	a := open(t, cfg, newRec())
	ad, _ := ParseAddr(a.Addr())
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 100 {
		network, at := "tcp", ad.TCP[0]
		if i%2 == 0 {
			network, at = "unix", ad.Unix
		}
		c, err := net.Dial(network, at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		switch i % 5 {
		case 0:
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		case 1:
			b := make([]byte, 5000)
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			_, _ = c.Write(b)
		case 2: // well-formed up to somewhere
			b := message(msgHello, make([]byte, 100))
			_, _ = c.Write(b[:r.IntN(len(b))])
		case 3:
			b := message(msgHello, nil)
			b[12], b[13], b[14], b[15] = 255, 255, 255, 255
			_, _ = c.Write(b)
		default: // silent, and fewer than maxHandshakes
		}
	}
	b := open(t, testConfig(t, "rank 1"), newRec())
	p, err := b.Connect(short(t), a.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Send(frame(0, nil)); err != nil {
		t.Error(err)
	}
}

func TestBothDial(t *testing.T) {
	links(t, func(t *testing.T, change func(*Config)) {
		for range 20 {
			ca, cb := testConfig(t, "a"), testConfig(t, "b")
			ca.Log, cb.Log = nil, nil
			if change != nil {
				change(&ca)
				change(&cb)
			}
			var n [2]int
			count := func(i int) func(*Peer, *device.Frame) {
				return func(*Peer, *device.Frame) { n[i]++ }
			}
			ra, rb := newRec(), newRec()
			ra.frame, rb.frame = count(0), count(1)
			a, b := open(t, ca, ra), open(t, cb, rb)
			errs := make(chan error, 2)
			go func() { _, err := a.Connect(short(t), b.Addr()); errs <- err }()
			go func() { _, err := b.Connect(short(t), a.Addr()); errs <- err }()
			if err := errors.Join(<-errs, <-errs); err != nil {
				t.Fatal(err)
			}
			a.Close()
			b.Close()
		}
	})
}

func TestListen(t *testing.T) {
	for _, c := range []struct{ listen, via, want string }{
		{"", "", "127.0.0.1:0"},
		{"lo", "", "127.0.0.1:0"},
		{"127.0.0.1:1234", "", "127.0.0.1:1234"},
		{"[::1]", "", "[::1]:0"},
		{"::1", "", "[::1]:0"},
		{"", "127.0.0.1:80", "127.0.0.1:0"},
		{"0.0.0.0", "", ""},
		{"::", "", ""},
		{"no-such-interface", "", ""},
	} {
		got, err := listenHost(c.listen, c.via)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("listen %q via %q: %q, %v", c.listen, c.via, got, err)
		}
	}
}

func TestSocketDir(t *testing.T) {
	dir := t.TempDir()
	_, _, ab, _ := pair(t, newRec(), newRec(), func(c *Config) { c.SocketDir = dir })
	if !ab.SameHost() {
		t.Error("not on one host")
	}
}

func FuzzParseAddr(f *testing.F) {
	f.Add(fakeAddr("127.0.0.1:1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := ParseAddr(b); err == nil && !bytes.Equal(a.encode()[:7], b[:7]) {
			t.Error("not what was parsed")
		}
	})
}

// TestSocketsOfTheKilled are removed by whoever comes later; those of the living, and other files, are not.
func TestSocketsOfTheKilled(t *testing.T) {
	dir := t.TempDir()
	long := time.Now().Add(-time.Hour)
	listen := func(name string) (string, *net.UnixListener) {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/" + name, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		return dir + "/" + name, l
	}
	left, l := listen("serry-left")
	l.Close()
	fresh, l := listen("serry-fresh")
	l.Close()
	lives, _ := listen("serry-lives")
	other, l := listen("other")
	l.Close()
	file := dir + "/serry-file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{left, lives, other, file} {
		if err := os.Chtimes(f, long, long); err != nil {
			t.Fatal(err)
		}
	}
	m, err := Open(short(t), Config{World: [16]byte{1}, SocketDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for f, want := range map[string]bool{left: false, fresh: true, lives: true, other: true, file: true} {
		if _, err := os.Lstat(f); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", f, err, want)
		}
	}
}

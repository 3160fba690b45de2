package rendezvous_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/serry-project/serry/rendezvous"
)

// relay passes connections on to a server and can cut them; it can also swallow answers.
type relay struct {
	net.Listener
	to string

	mu      sync.Mutex
	conns   []net.Conn
	deaf    bool // drop what the server answers
	tasks   sync.WaitGroup
	swallow chan struct{} // gets a token for each answer dropped
}

func newRelay(t *testing.T, to string) *relay {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{Listener: l, to: to, swallow: make(chan struct{}, 1000)}
	r.tasks.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			out, err := net.Dial("tcp", r.to)
			if err != nil {
				_ = in.Close()
				r.mu.Unlock()
				continue
			}
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			r.tasks.Go(func() { _, _ = io.Copy(out, in); _ = out.Close() })
			r.tasks.Go(func() {
				b := make([]byte, 1<<16)
				for {
					n, err := out.Read(b)
					if err != nil {
						_ = in.Close()
						return
					}
					r.mu.Lock()
					deaf := r.deaf
					r.mu.Unlock()
					if deaf {
						r.swallow <- struct{}{}
					} else if _, err := in.Write(b[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		r.cut()
		r.tasks.Wait()
	})
	return r
}

// cut ends all connections, and answers are heard again.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.Close()
	}
	r.conns, r.deaf = nil, false
}

func (r *relay) setDeaf() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = true
}

func (r *relay) move(to string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to = to
}

func open(t *testing.T, url string) rendezvous.Store {
	s, err := rendezvous.Open(soon(t), url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestReconnectOncePerCall(t *testing.T) {
	for _, scheme := range []string{"tcp://", "torch://"} {
		t.Run(scheme, func(t *testing.T) {
			server := serve(t)
			r := newRelay(t, server.Addr())
			s, ctx := open(t, scheme+r.Addr().String()), soon(t)
			require.NoError(t, s.Set(ctx, "k", []byte("v")))
			r.cut()
			v, err := s.Get(ctx, "k")
			require.NoError(t, err)
			require.Equal(t, "v", string(v))

			var g errgroup.Group
			g.Go(func() error { return s.Wait(ctx, "later") })
			time.Sleep(20 * time.Millisecond)
			r.cut() // with a wait open
			require.NoError(t, server.Store().Set(ctx, "later", nil))
			require.NoError(t, g.Wait())
		})
	}
}

// An answer that is lost with its connection is asked for again, and the addition is not done twice.
func TestRepeatedAddCountsOnce(t *testing.T) {
	server := serve(t)
	r := newRelay(t, server.Addr())
	s, ctx := open(t, "tcp://"+r.Addr().String()), soon(t)
	for want := int64(1); want <= 3; want++ {
		r.setDeaf()
		var g errgroup.Group
		g.Go(func() error {
			n, err := s.Add(ctx, "n", 1)
			if err == nil && n != want {
				t.Errorf("got %d, want %d", n, want)
			}
			return err
		})
		<-r.swallow
		r.cut()
		require.NoError(t, g.Wait())
	}
	r.setDeaf()
	var g errgroup.Group
	g.Go(func() error {
		v, err := s.CompareAndSet(ctx, "founder", nil, []byte("me"))
		require.Equal(t, "me", string(v))
		return err
	})
	<-r.swallow
	r.cut()
	require.NoError(t, g.Wait())
}

// Torch's protocol cannot repeat an addition safely, and says so.
func TestTorchAddOfUnknownOutcome(t *testing.T) {
	server := serve(t)
	r := newRelay(t, server.Addr())
	s, ctx := open(t, "torch://"+r.Addr().String()), soon(t)
	r.setDeaf()
	var g errgroup.Group
	g.Go(func() error { _, err := s.Add(ctx, "n", 1); return err })
	<-r.swallow
	r.cut()
	require.ErrorIs(t, g.Wait(), rendezvous.ErrUnknownOutcome)
	v, err := s.Get(ctx, "n")
	require.NoError(t, err)
	require.Equal(t, "1", string(v))
}

func TestServerRestarted(t *testing.T) {
	r := newRelay(t, serve(t).Addr())
	s := open(t, "tcp://"+r.Addr().String())
	r.move(serve(t).Addr())
	r.cut()
	err := s.Set(soon(t), "k", nil)
	require.ErrorIs(t, err, rendezvous.ErrRestarted)
	require.Contains(t, err.Error(), "open it anew")
}

func TestServerGone(t *testing.T) {
	for _, scheme := range []string{"tcp://", "torch://"} {
		server := serve(t)
		s := open(t, scheme+server.Addr())
		require.NoError(t, server.Close())
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		err := s.Set(ctx, "k", nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Contains(t, err.Error(), "connection refused")
		require.Contains(t, err.Error(), server.Addr())
		require.Contains(t, err.Error(), `"k"`)
	}
}

func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	for _, scheme := range []string{"tcp://", "torch://"} {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err := rendezvous.Open(ctx, scheme+addr)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.Regexp(t, `^rendezvous `+scheme+addr+`: connect: no answer after \d+ms \(connection refused\); is the launcher`, err)

		canceled, cancel := context.WithCancel(context.Background())
		time.AfterFunc(20*time.Millisecond, cancel)
		_, err = rendezvous.Open(canceled, scheme+addr)
		require.ErrorIs(t, err, context.Canceled)
	}
}

// A server that comes up late is found.
func TestOpenBeforeServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	var g errgroup.Group
	for _, scheme := range []string{"tcp://", "torch://"} {
		g.Go(func() error {
			s, err := rendezvous.Open(soon(t), scheme+addr)
			if err == nil {
				err = s.Close()
			}
			return err
		})
	}
	time.Sleep(30 * time.Millisecond)
	server, err := rendezvous.Listen(soon(t), addr, nil)
	require.NoError(t, err)
	require.NoError(t, g.Wait())
	require.NoError(t, server.Close())
}

// rubbish is a server that answers each connection with the same bytes, whatever it is asked, and then closes or stays.
func rubbish(t *testing.T, answer string, stay bool) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var tasks sync.WaitGroup
	done := make(chan struct{})
	tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tasks.Go(func() {
				defer func() { _ = c.Close() }()
				_, _ = c.Read(make([]byte, 9)) // what a client of torch begins with
				_, _ = io.WriteString(c, answer)
				if stay {
					<-done
				}
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); close(done); tasks.Wait() })
	return l.Addr().String()
}

func TestRubbishPeer(t *testing.T) {
	for _, scheme := range []string{"tcp://", "torch://"} {
		addr := rubbish(t, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", true)
		begin := time.Now()
		_, err := rendezvous.Open(soon(t), scheme+addr)
		require.ErrorIs(t, err, rendezvous.ErrNotRendezvous)
		require.Contains(t, err.Error(), addr)
		require.Contains(t, err.Error(), `it is a web server: it began with "HTTP`)
		require.Contains(t, err.Error(), "another program")
		require.Less(t, time.Since(begin), 10*time.Second)

		addr = rubbish(t, "", true) // says nothing
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err = rendezvous.Open(ctx, scheme+addr)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Contains(t, err.Error(), "does not greet")

		addr = rubbish(t, "-ERR", true) // says little, and waits
		_, err = rendezvous.Open(soon(t), scheme+addr)
		require.ErrorIs(t, err, rendezvous.ErrNotRendezvous)
		require.ErrorContains(t, err, `it began with "-ERR"`)

		addr = rubbish(t, "SE", false) // breaks off
		ctx, cancel = context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err = rendezvous.Open(ctx, scheme+addr)
		require.Error(t, err)
		require.Contains(t, err.Error(), addr)
	}
	other := "SERRYRDV\x00\x09" + strings.Repeat("\x00", 18)
	_, err := rendezvous.Open(soon(t), "tcp://"+rubbish(t, other, true))
	require.ErrorIs(t, err, rendezvous.ErrNotRendezvous)
	require.Contains(t, err.Error(), "version 9")
	require.Contains(t, err.Error(), "version 1")
}

// Servers of other protocols that wait for more, or hang up: told apart in seconds, and by name.
func TestForeignServers(t *testing.T) {
	t.Parallel()
	web := httptest.NewServer(http.NotFoundHandler()) // waits for the end of a line
	defer web.Close()
	var g errgroup.Group
	for _, scheme := range []string{"tcp://", "torch://"} {
		g.Go(func() error {
			begin := time.Now()
			if scheme == "torch://" && testing.Short() {
				return nil
			}
			_, err := rendezvous.Open(soon(t), scheme+web.Listener.Addr().String())
			if !errors.Is(err, rendezvous.ErrNotRendezvous) || !strings.Contains(fmt.Sprint(err), "it is a web server") {
				return fmt.Errorf("a web server: %w", err)
			}
			if d := time.Since(begin); d > 20*time.Second {
				return fmt.Errorf("after %v: %w", d, err)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		_, err := rendezvous.Open(ctx, scheme+rubbish(t, "", false)) // as a proxy before a server that is not up
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "closes them without a greeting")
		require.ErrorContains(t, err, "a proxy")
	}
	if !testing.Short() {
		mute := rubbish(t, "", true)
		g.Go(func() error {
			begin := time.Now()
			_, err := rendezvous.Open(soon(t), "tcp://"+mute)
			if d := time.Since(begin); !errors.Is(err, rendezvous.ErrNotRendezvous) || d > 30*time.Second {
				return fmt.Errorf("a mute server: after %v: %w", d, err)
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
}

// A server that is stopped for a while when we come is found all the same.
func TestServerThatIsSlowToGreet(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // its kernel takes connections
	require.NoError(t, err)
	server := serve(t)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer func() { _ = l.Close() }()
	wake := time.Now().Add(4 * time.Second)
	tasks.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			tasks.Go(func() {
				defer func() { _ = in.Close() }()
				time.Sleep(time.Until(wake))
				out, err := net.Dial("tcp", server.Addr())
				if err != nil {
					return
				}
				tasks.Go(func() { _, _ = io.Copy(out, in); _ = out.Close() })
				_, _ = io.Copy(in, out)
			})
		}
	})
	s, err := rendezvous.Open(soon(t), "tcp://"+l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, s.Set(soon(t), "k", nil))
	require.NoError(t, s.Close())
}

// Our protocol at a store of torch, which hangs up on what it does not know.
func TestTorchByTheWrongName(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 10)
			if _, err := io.ReadFull(c, b); err == nil && b[0] == 0 {
				_, _ = c.Write(b[6:]) // validated and pinged
			}
			_ = c.Close()
		}
	})
	defer tasks.Wait()
	defer func() { _ = l.Close() }()
	_, err = rendezvous.Open(soon(t), "tcp://"+l.Addr().String())
	require.ErrorIs(t, err, rendezvous.ErrNotRendezvous)
	require.ErrorContains(t, err, "it is a TCPStore of torch; write torch://"+l.Addr().String())
}

// A peer that greets well and then talks rubbish costs the call, not the process.
func TestRubbishAnswers(t *testing.T) {
	greeting := "SERRYRDV\x00\x01" + strings.Repeat("\x00", 18)
	for _, answer := range []string{
		"\xff\xff\xff\xff",                             // a length beyond all bounds
		"\x00\x00\x00\x05\x00\x00\x00\x01\x63",         // a kind that is none
		"\x00\x00\x00\x06\x00\x00\x00\x01\x43\x00",     // a sum of one byte
		"\x00\x00\x00\x05\x00\x00\x00\x01\x45",         // a failure without a code
		"\x00\x00\x10\x05\x00\x00\x00\x01\x41xxxxxxxx", // cut off
	} {
		s, err := rendezvous.Open(soon(t), "tcp://"+rubbish(t, greeting+answer, false))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_, err = s.Add(ctx, "k", 1)
		cancel()
		require.Error(t, err, "%q", answer)
		require.NoError(t, s.Close())
	}
}

// What talks to the server and is no client of it is logged and closed, and disturbs nobody.
func TestRubbishClients(t *testing.T) {
	var mu sync.Mutex
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(lockedWriter{&mu, &out}, nil))
	server, err := rendezvous.Listen(soon(t), "127.0.0.1:0", log)
	require.NoError(t, err)
	for _, bytes := range []string{
		"GET / HTTP/1.1\r\n\r\n",
		"SERRYRDVxxxxxxxxxxxxxxxxxxxx",
		"SERRY",
		"\x00\x01\x02\x03\x04",  // torch's first query with another magic
		"\x00\xce\xf7\x85<\x63", // a query of torch that is none
		"\x00\xce\xf7\x85<\x01\xff\xff\xff\xff\xff\xff\xff\xff", // a key of 2^64-1 bytes
		"\x00\xce\xf7\x85<\x06\xff\xff\xff\xff\x00\x00\x00\x00", // a wait for 2^32-1 keys
		"\x00\xce\xf7\x85<\x03\x08\x00\x00\x00\x00\x00\x00\x00abc",
	} {
		c, err := net.Dial("tcp", server.Addr())
		require.NoError(t, err)
		_, err = io.WriteString(c, bytes)
		require.NoError(t, err)
		require.NoError(t, c.(*net.TCPConn).CloseWrite())
		_, err = io.Copy(io.Discard, c)
		if err != nil {
			require.ErrorIs(t, err, syscall.ECONNRESET, "%q", bytes)
		}
		require.NoError(t, c.Close())
	}
	require.NoError(t, server.Store().Set(soon(t), "k", nil))
	require.NoError(t, server.Close())
	require.Contains(t, out.String(), "GET / HTTP/1.1")
	require.Contains(t, out.String(), "version 30840")
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func TestPortInUse(t *testing.T) {
	server := serve(t)
	_, err := rendezvous.Listen(soon(t), server.Addr(), nil)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	_, port, _ := net.SplitHostPort(server.Addr())
	require.Contains(t, err.Error(), "port "+port+" of 127.0.0.1 is in use")
	for _, bad := range []string{"no port", "127.0.0.1:70000", "127.0.0.1:http"} {
		_, err = rendezvous.Listen(soon(t), bad, nil)
		require.ErrorIs(t, err, rendezvous.ErrBadURL)
	}
}

func TestBadURLs(t *testing.T) {
	for _, url := range []string{"", "host:1", "http://host:1", "file://host/path", "file://", "tcp://host", "torch://", "tcp://a:b:c", "tcp://a:0", "torch://a:http", "tcp://a:70000"} {
		_, err := rendezvous.Open(soon(t), url)
		require.ErrorIs(t, err, rendezvous.ErrBadURL, url)
		var e *rendezvous.Error
		require.True(t, errors.As(err, &e))
		require.NotEmpty(t, e.Hint)
	}
}

// Many connections wait, some give up, and one set wakes the rest.
func TestManyClients(t *testing.T) {
	const clients = 200
	server, ctx := serve(t), soon(t)
	var g errgroup.Group
	var waiting sync.WaitGroup
	waiting.Add(clients)
	for i := range clients {
		scheme := "tcp://"
		if i%2 == 0 {
			scheme = "torch://"
		}
		g.Go(func() error {
			s, err := rendezvous.Open(ctx, scheme+server.Addr())
			waiting.Done()
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			if i%10 == 0 {
				hurry, cancel := context.WithTimeout(ctx, time.Millisecond)
				defer cancel()
				if err := s.Wait(hurry, "never"); !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("a wait for nothing: %v", err)
				}
			}
			_, err = s.Get(ctx, "go")
			return err
		})
	}
	waiting.Wait()
	require.NoError(t, server.Store().Set(ctx, "go", nil))
	require.NoError(t, g.Wait())
}

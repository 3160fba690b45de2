package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// endpoint is one member of the etcd, and a client that speaks to it alone. The client is made at the first use: with a
// user, making it asks the member.
type endpoint struct {
	addr string
	mu   sync.Mutex
	c    *clientv3.Client

	said sync.Mutex
	why  error // why there was no connection last; the client tries again and again, and says only that time is over
}

// client returns it; life ends it, and its making.
func (e *endpoint) client(life context.Context, o *Options) (*clientv3.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.c != nil {
		return e.c, nil
	}
	creds := insecure.NewCredentials()
	if o.tls != nil {
		creds = credentials.NewTLS(o.tls.Clone())
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{o.scheme() + e.addr}, Username: o.User, Password: o.Password, TLS: o.tls,
		Context: life, DialTimeout: o.DialTimeout, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 5 * time.Second,
		Logger: zap.NewNop(), MaxUnaryRetries: 1,
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(e.dial), grpc.WithTransportCredentials(handshake{creds, e})},
	})
	if err == nil {
		e.c = c
	}
	return c, err
}

// close ends the client, and what is asked of it.
func (e *endpoint) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.c != nil {
		_ = e.c.Close() // what it says is that a context is over
	}
}

func (e *endpoint) note(err error) {
	e.said.Lock()
	e.why = err
	e.said.Unlock()
}

func (e *endpoint) reason() error {
	e.said.Lock()
	defer e.said.Unlock()
	return e.why
}

func (e *endpoint) dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil { // a connection alone is no answer
		e.note(err)
	}
	return c, err
}

// handshake notes what goes wrong with TLS.
type handshake struct {
	credentials.TransportCredentials
	e *endpoint
}

func (h handshake) ClientHandshake(ctx context.Context, name string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := h.TransportCredentials.ClientHandshake(ctx, name, raw)
	if err != nil {
		h.e.note(fmt.Errorf("%w: %w", errEnded, err))
		return c, info, err
	}
	return &refused{Conn: c, e: h.e}, info, nil
}

func (h handshake) Clone() credentials.TransportCredentials {
	return handshake{h.TransportCredentials.Clone(), h.e}
}

// errEnded: a server that does not like who comes, or how, ends the connection; not always does it say why.
var errEnded = errors.New("it ends the connection")

// refused notes that a server ended the connection before it said a word, which may be read or found in a write.
type refused struct {
	net.Conn
	e     *endpoint
	heard atomic.Int64
}

func (c *refused) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.heard.Add(int64(n)) >= aFrame && n > 0 {
		c.e.note(nil)
	}
	return n, c.ended(err)
}

// aFrame is the least that an HTTP/2 server says; what ends less is an alert of TLS.
const aFrame = 9

func (c *refused) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.ended(err)
}

func (c *refused) ended(err error) error {
	switch {
	case err == nil || errors.Is(err, net.ErrClosed):
	case c.heard.Load() < aFrame:
		c.e.note(fmt.Errorf("%w: %w", errEnded, err))
	default:
		c.e.note(err)
	}
	return err
}

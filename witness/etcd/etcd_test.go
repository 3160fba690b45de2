package etcd

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/serry-project/serry/witness"
	"github.com/serry-project/serry/witness/etcdtest"
	"github.com/serry-project/serry/witness/witnesstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs an etcd of n members, or skips the test.
func start(t *testing.T, n int, args ...string) []*etcdtest.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	members, err := etcdtest.Start(ctx, t.TempDir(), n, args...)
	if errors.Is(err, etcdtest.ErrMissing) {
		t.Skip(err)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, s := range members {
			s.Kill()
		}
	})
	return members
}

func open(t *testing.T, url, world string) *Etcd {
	t.Helper()
	o, err := Parse(url)
	require.NoError(t, err)
	w, err := Open(o, world, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Close()) })
	return w
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestEtcd(t *testing.T) {
	url := etcdtest.URL(start(t, 1))
	witnesstest.Run(t, func(t *testing.T, world string) witness.Witness { return open(t, url, world) })
}

func TestThreeMembers(t *testing.T) {
	members := start(t, 3)
	url := etcdtest.URL(members)
	witnesstest.Run(t, func(t *testing.T, world string) witness.Witness { return open(t, url, world) })

	// One member hangs, the one that is asked first: the answer comes from another one, in less than the deadline.
	w := open(t, url, "stopped")
	require.NoError(t, w.Create(t.Context(), []byte("0")))
	first := members[w.last.Load()]
	require.NoError(t, first.Process().Signal(syscall.SIGSTOP))
	held, err := w.Swap(within(t, 20*time.Second), []byte("0"), []byte("1")) // it may be the leader: a new one takes its time
	require.NoError(t, err)
	require.Equal(t, "1", string(held))
	require.NotEqual(t, first.Addr, w.ends[w.last.Load()].addr)
	require.NoError(t, first.Process().Signal(syscall.SIGCONT))

	// Two of three are gone: no answer, and a sentence that names all three.
	for _, s := range members[:2] {
		s.Kill()
	}
	_, err = w.Swap(within(t, 500*time.Millisecond), []byte("1"), []byte("2"))
	require.Error(t, err)
	require.ErrorContains(t, err, "the witness (etcd, key /serry/witness/stopped) did not vote in ")
	require.ErrorContains(t, err, "see that the etcd runs, has a leader, and can be reached from this host")
	for _, s := range members {
		require.ErrorContains(t, err, s.Addr)
	}
}

func TestKeyAndLease(t *testing.T) {
	members := start(t, 1)
	url := etcdtest.URL(members) + "/jobs/blue?ttl=5s"
	w := open(t, url, "w1")
	require.NoError(t, w.Create(t.Context(), []byte("0")))
	_, err := w.Swap(t.Context(), []byte("0"), []byte("1"))
	require.NoError(t, err)

	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + members[0].Addr}})
	require.NoError(t, err)
	defer c.Close()
	all := func() *clientv3.GetResponse {
		r, err := c.Get(t.Context(), "", clientv3.WithPrefix())
		require.NoError(t, err)
		return r
	}
	r := all()
	require.Len(t, r.Kvs, 1)
	require.Equal(t, "/jobs/blue/witness/w1", string(r.Kvs[0].Key))
	require.NotZero(t, r.Kvs[0].Lease, "a swap keeps the lease")
	left, err := c.Leases(t.Context())
	require.NoError(t, err)
	require.Len(t, left.Leases, 1)

	// As long as a member lives, whoever it is, the register stays; with the last one it expires, and no vote makes it again.
	require.NoError(t, w.Close())
	other := open(t, url, "w1")
	watch := c.Watch(within(t, time.Minute), "/jobs/", clientv3.WithPrefix(), clientv3.WithRev(r.Header.Revision+1))
	alive := within(t, 8*time.Second)
	select {
	case <-alive.Done():
	case e := <-watch:
		t.Fatalf("a member lives, and the register changes: %+v", e)
	}
	require.NoError(t, other.Close())
	e := <-watch
	require.Len(t, e.Events, 1)
	require.Equal(t, clientv3.EventTypeDelete, e.Events[0].Type)
	held, err := open(t, url, "w1").Swap(t.Context(), []byte("1"), []byte("2"))
	require.NoError(t, err)
	require.Empty(t, held)
	require.Empty(t, all().Kvs)

	// A world that ends in order leaves nothing, not even a lease.
	w = open(t, url, "w2")
	require.NoError(t, w.Create(t.Context(), []byte("0")))
	require.ErrorIs(t, w.Create(t.Context(), []byte("1")), witness.ErrExists)
	require.NoError(t, w.Create(t.Context(), []byte("0")), "the answer to our own may be lost")
	require.NoError(t, w.Remove(t.Context()))
	require.Empty(t, all().Kvs)
	left, err = c.Leases(t.Context())
	require.NoError(t, err)
	require.Empty(t, left.Leases)
}

func TestRestart(t *testing.T) { // of the etcd: what it has answered is still there
	ctx, dir := within(t, time.Minute), t.TempDir()
	members, err := etcdtest.Start(ctx, dir, 1)
	if errors.Is(err, etcdtest.ErrMissing) {
		t.Skip(err)
	}
	require.NoError(t, err)
	w := open(t, etcdtest.URL(members), "w")
	require.NoError(t, w.Create(ctx, []byte("0")))
	_, err = w.Swap(ctx, []byte("0"), []byte("1"))
	require.NoError(t, err)
	members[0].Kill()
	_, err = w.Swap(within(t, 300*time.Millisecond), []byte("1"), []byte("2"))
	require.ErrorContains(t, err, members[0].Addr)

	members, err = etcdtest.Start(ctx, dir, 1)
	require.NoError(t, err)
	defer members[0].Kill()
	held, err := open(t, etcdtest.URL(members), "w").Swap(ctx, []byte("0"), []byte("3"))
	require.NoError(t, err)
	require.Equal(t, "1", string(held))
}

func TestUser(t *testing.T) {
	members := start(t, 1)
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + members[0].Addr}})
	require.NoError(t, err)
	defer c.Close()
	ctx := t.Context()
	must := func(_ any, err error) { require.NoError(t, err) }
	must(c.UserAdd(ctx, "root", "r"))
	must(c.UserGrantRole(ctx, "root", "root"))
	must(c.RoleAdd(ctx, "serry"))
	must(c.RoleGrantPermission(ctx, "serry", "/serry/", "/serry0", clientv3.PermissionType(clientv3.PermReadWrite)))
	for _, u := range []string{"anna", "otto"} {
		must(c.UserAdd(ctx, u, "secret of "+u))
	}
	must(c.UserGrantRole(ctx, "anna", "serry"))
	must(c.AuthEnable(ctx))

	pass := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(pass, []byte("secret of anna\n"), 0o600))
	url := "etcd://" + members[0].Addr + "?user=anna&password-file=" + pass
	w := open(t, url, "w")
	require.NoError(t, w.Create(ctx, []byte("0")))
	held, err := w.Swap(ctx, []byte("0"), []byte("1"))
	require.NoError(t, err)
	require.Equal(t, "1", string(held))

	for who, want := range map[string]string{
		"otto:secret%20of%20otto@": "give the user the right to read and write the keys",
		"anna:wrong@":              "give the user and the password-file",
		"":                         "give the user and the password-file",
	} {
		_, err := open(t, "etcd://"+who+members[0].Addr, "w").Swap(ctx, []byte("1"), []byte("2"))
		require.ErrorContains(t, err, want, who)
		require.NotContains(t, err.Error(), "wrong")
	}
}

// certificates writes a CA, and a certificate by it for loopback, which serves both sides.
func certificates(t *testing.T) (ca, cert, key string) {
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	template := func(n int64) *x509.Certificate {
		return &x509.Certificate{SerialNumber: big.NewInt(n), Subject: pkix.Name{CommonName: "witness test"},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	top := template(1)
	top.IsCA, top.KeyUsage = true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, top, top, &caKey.PublicKey, caKey)
	require.NoError(t, err)
	ca = write("ca.pem", "CERTIFICATE", der)
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	leaf := template(2)
	leaf.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	leaf.KeyUsage = x509.KeyUsageDigitalSignature
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err = x509.CreateCertificate(rand.Reader, leaf, top, &k.PublicKey, caKey)
	require.NoError(t, err)
	cert = write("cert.pem", "CERTIFICATE", der)
	der, err = x509.MarshalECPrivateKey(k)
	require.NoError(t, err)
	return ca, cert, write("key.pem", "EC PRIVATE KEY", der)
}

func TestTLS(t *testing.T) {
	ca, cert, key := certificates(t)
	members := start(t, 1, "--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca)
	url := "etcds://" + members[0].Addr + "?cacert=" + ca
	w := open(t, url+"&cert="+cert+"&key="+key, "w")
	require.NoError(t, w.Create(within(t, 20*time.Second), []byte("0")))
	held, err := w.Swap(t.Context(), []byte("0"), []byte("1"))
	require.NoError(t, err)
	require.Equal(t, "1", string(held))

	for url, want := range map[string]string{
		url: "see that cacert is the CA", // no certificate of the client
		"etcds://" + members[0].Addr + "?cert=" + cert + "&key=" + key: "see that cacert is the CA", // another CA
		"etcd://" + members[0].Addr:                                    "write etcds:// and cacert",
	} {
		_, err := open(t, url, "w").Swap(within(t, 3*time.Second), []byte("1"), []byte("2"))
		require.ErrorContains(t, err, want)
	}
}

func TestNobodyThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // listens, and never says a word
	require.NoError(t, err)
	defer l.Close()
	w := open(t, "etcd://127.0.0.1:1,"+l.Addr().String(), "w")
	_, err = w.Swap(within(t, 300*time.Millisecond), []byte("0"), []byte("1"))
	require.ErrorContains(t, err, "127.0.0.1:1: ")
	require.ErrorContains(t, err, "connection refused")
	require.ErrorContains(t, err, l.Addr().String()+": ")
	var e *Error
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Error(t, w.Create(within(t, 300*time.Millisecond), []byte("0")))
}

// buffer is a log that two goroutines use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func TestClose(t *testing.T) { // ends what is under way, and what comes later
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	w := open(t, "etcd://anna:x@"+l.Addr().String(), "w")
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() {
		c, err := l.Accept()
		close(begun)
		if err == nil {
			defer c.Close()
			_, _ = c.Read(make([]byte, 1<<16))
		}
	}()
	go func() {
		_, err := w.Swap(within(t, time.Hour), []byte("0"), []byte("1"))
		done <- err
	}()
	<-begun
	require.NoError(t, w.Close())
	require.Error(t, <-done)
	_, err = w.Swap(t.Context(), []byte("0"), []byte("1"))
	require.ErrorIs(t, err, errClosed)
	require.NoError(t, w.Close())
}

func TestKeepSaysWhatIsWrong(t *testing.T) { // before the witness is needed
	members := start(t, 1)
	o, err := Parse(etcdtest.URL(members) + "?ttl=4s")
	require.NoError(t, err)
	log := &buffer{}
	w, err := Open(o, "w", slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	defer w.Close()
	has := func(part string) func() bool { return func() bool { return strings.Contains(log.String(), part) } }
	require.Eventually(t, has("the witness has no record of this world"), 30*time.Second, 20*time.Millisecond)
	members[0].Kill()
	require.Eventually(t, has("a loss of half of the ranks would stop the rest now"), 30*time.Second, 20*time.Millisecond)
}

func TestParse(t *testing.T) {
	dir := t.TempDir()
	pass := filepath.Join(dir, "p")
	require.NoError(t, os.WriteFile(pass, []byte("x y\n"), 0o600))
	for url, want := range map[string]Options{
		"etcd://a":                                {Endpoints: []string{"a:2379"}},
		"etcd://a:1,b,[::1]:3,[fe80::1]/p/q/":     {Endpoints: []string{"a:1", "b:2379", "[::1]:3", "[fe80::1]:2379"}, Prefix: "p/q"},
		"etcd://u:p%40w@a:1?ttl=1h":               {Endpoints: []string{"a:1"}, User: "u", Password: "p@w", TTL: time.Hour},
		"etcds://a/?user=u&password-file=" + pass: {Endpoints: []string{"a:2379"}, User: "u", Password: "x y", Secure: true},
	} {
		got, err := Parse(url)
		require.NoError(t, err, url)
		require.Equal(t, want, got, url)
	}
	for url, want := range map[string]string{
		"http://a":                          "the scheme is etcd or etcds",
		"etcd://":                           "no endpoint",
		"etcd://a?colour=red":               `there is no option "colour"`,
		"etcd://a?ttl=long":                 "is no time such as 24h",
		"etcd://a?ttl=1s":                   "at least 4s",
		"etcds://a?cert=x":                  "come together",
		"etcds://a?cacert=" + dir + "/none": "cacert",
		"etcds://a?cacert=" + pass:          "has no certificate in PEM",
		"etcds://a?cert=x&key=y":            "cert and key",
		"etcd://a?password-file=/none":      "the password",
		"etcd://:p@a":                       "a password without a user",
		"etcd://u:secret@a?what=1":          "etcd://u:...@a",
	} {
		_, err := Parse(url)
		require.ErrorContains(t, err, want, url)
		require.NotContains(t, err.Error(), "secret")
	}
}

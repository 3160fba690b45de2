package mesh

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/device"
)

// TestTwoSetsOfWords: processes of one host with different words share no memory, but data still goes.
func TestTwoSetsOfWords(t *testing.T) {
	got := make(chan string, 1)
	rb := newRec()
	rb.frame = func(_ *Peer, f *device.Frame) { got <- string(f.Payload) }
	a, b := open(t, testConfig(t, "a"), newRec()), open(t, testConfig(t, "b"), rb)
	if err := errors.Join(a.MakeWords(), b.MakeWords()); err != nil {
		t.Fatal(err)
	}
	ab, err := a.Connect(short(t), b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	ba, err := b.Await(short(t), a.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if !ab.SameHost() || !ba.SameHost() || !ab.HasWords() || !ba.HasWords() {
		t.Error("the host is the same, and both have words")
	}
	if ab.Arena() != nil || ba.Arena() != nil {
		t.Error("memory is shared without common words")
	}
	if err := ab.Send(frame(1, []byte("data"))); err != nil || <-got != "data" {
		t.Error(err)
	}
}

func TestHasWords(t *testing.T) {
	a, b, ab, ba := pair(t, newRec(), newRec(), nil)
	if ab.HasWords() || ab.Arena() == nil {
		t.Error("nobody has words yet")
	}
	if err := a.MakeWords(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Words(short(t)); err != nil || !ab.HasWords() || !ba.HasWords() || ab.Arena() == nil || ba.Arena() == nil {
		t.Error(err)
	}
}

// TestAloneOnItsHost: who cannot listen where the others of its host do is a host of its own.
func TestAloneOnItsHost(t *testing.T) {
	dir := t.TempDir() + "/" + strings.Repeat("d", 120)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	a, b, ab, ba := pair(t, newRec(), newRec(), func(c *Config) { c.SocketDir = dir })
	if a.Host() == b.Host() || a.Host() == 0 || ab.SameHost() || ba.SameHost() {
		t.Errorf("hosts %x and %x", a.Host(), b.Host())
	}
	if h, _ := HostOf(a.Addr()); h != a.Host() {
		t.Errorf("address says host %x", h)
	}
}

// TestForgottenGivesItsWordBack: a dropped process that lives on keeps its death word until it has closed its mesh.
func TestForgottenGivesItsWordBack(t *testing.T) {
	a, b, ab, _ := pair(t, newRec(), newRec(), nil)
	free := func() int {
		a.seg.mu.Lock()
		defer a.seg.mu.Unlock()
		return len(a.seg.free)
	}
	was := free()
	ab.Forget()
	time.Sleep(50 * time.Millisecond)
	if free() != was {
		t.Error("the word is given back while somebody may wait for it")
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); free() == was; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the word is not given back")
		}
	}
}

// refuser is told of refusals.
type refuser struct {
	*rec
	why chan error
}

func (r refuser) Refused(_ *Peer, why error) { r.why <- why }

// TestForgottenIsProved: a member's word that it has forgotten us comes with its proof; without one it is a refusal like
// any other.
func TestForgottenIsProved(t *testing.T) {
	for _, change := range []func(*Config){nil, far()} {
		ca, cb := testConfig(t, "a"), testConfig(t, "b")
		if change != nil {
			change(&ca)
			change(&cb)
		}
		ra := refuser{newRec(), make(chan error, 1)}
		a, err := Open(t.Context(), ca)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if err := a.Start(ra); err != nil {
			t.Fatal(err)
		}
		b := open(t, cb, newRec())
		if _, err := a.Connect(short(t), b.Addr()); err != nil {
			t.Fatal(err)
		}
		ba, err := b.Await(short(t), a.Addr())
		if err != nil {
			t.Fatal(err)
		}
		ba.Forget()
		select {
		case why := <-ra.why:
			if !isForgotten(why) {
				t.Error(why)
			}
		case <-time.After(15 * time.Second):
			t.Fatal("it has not learned that it was forgotten")
		}
	}

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			_, _ = io.ReadFull(c, make([]byte, headBytes+92)) // the hello of "rank 0"
			_, _ = c.Write(message(msgRefuse, []byte(forgotText+"gone")))
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	a := open(t, testConfig(t, "rank 0"), newRec())
	_, err = a.Connect(short(t), fakeAddr(l.Addr().String()))
	var no *RefusedError
	if !errors.As(err, &no) || isForgotten(err) {
		t.Error(err)
	}
}

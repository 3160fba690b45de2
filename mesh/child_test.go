package mesh

import (
	"bufio"
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// A child is this test binary as another process of the world. It prints "addr HEX", and obeys lines on its input:
// connect HEX, await HEX, say NAME TEXT, close, exit. It prints what its handler sees, and echoes every frame.
var (
	childName  = flag.String("child", "", "be a child of a test with this name")
	childLinks = flag.String("child.links", "auto", "Config.Links")
	childVia   = flag.String("child.listen", "", "Config.Listen")
	childTouch = flag.Int64("child.arena", 1<<20, "arena, of which every page is touched")
	childKey   = flag.String("child.key", "key", "Config.Key")
)

type childRec struct{ *rec }

func (r childRec) Frame(p *Peer, f *device.Frame) {
	if f.Kind == wire.KindP2P {
		_ = p.Send(f)
		return
	}
	fmt.Println("frame", p.Name(), string(f.Payload))
}
func (r childRec) Died(p *Peer)   { fmt.Println("died", p.Name()); r.rec.Died(p) }
func (r childRec) Silent(p *Peer) { fmt.Println("silent", p.Name()); r.rec.Silent(p) }
func (r childRec) Heard(p *Peer)  { fmt.Println("heard", p.Name()); r.rec.Heard(p) }
func (r childRec) Linked(p *Peer) { fmt.Println("linked", p.Name()); r.rec.Linked(p) }

func child() (code int, is bool) {
	flag.Parse()
	if *childName == "" {
		return 0, false
	}
	in := bufio.NewScanner(os.Stdin)
	if *childVia != "" {
		in.Scan() // its network is being built
	}
	m, err := Open(context.Background(), Config{
		World: testWorld, Key: []byte(*childKey), Name: *childName, Links: *childLinks, Listen: *childVia, Arena: *childTouch,
	})
	if err != nil {
		fmt.Println("error", err)
		return 1, true
	}
	r := newRec()
	if err := m.Start(childRec{r}); err != nil {
		fmt.Println("error", err)
		return 1, true
	}
	for a := m.Arena(); len(a) > 0; a = a[min(4096, len(a)):] {
		a[0] = 1
	}
	fmt.Println("addr", hex.EncodeToString(m.Addr()))
	peers := map[string]*Peer{}
	for in.Scan() {
		f := strings.Fields(in.Text())
		switch f[0] {
		case "connect", "await":
			b, _ := hex.DecodeString(f[1])
			call := m.Connect
			if f[0] == "await" {
				call = m.Await
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			p, err := call(ctx, b)
			cancel()
			if err != nil {
				fmt.Println("error", err)
				break
			}
			peers[p.Name()] = p
			fmt.Println("ok", p.Name(), p.SameHost(), p.Arena() != nil)
		case "say":
			if err := peers[f[1]].Send(frame(1, []byte(f[2]))); err != nil {
				fmt.Println("error", err)
			}
		case "cpu":
			fmt.Println("cpu", int64(cpuTime()))
		case "close":
			fmt.Println("closed", m.Close())
		case "exit":
			return 0, true
		}
	}
	return 0, true
}

func cpuTime() time.Duration {
	var ru unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &ru)
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// kid is the test's side of a child.
type kid struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.Writer
	out  chan string
	addr []byte
}

func spawn(t testing.TB, name string, args ...string) *kid {
	t.Helper()
	k := &kid{t: t, out: make(chan string, 100)}
	k.cmd = exec.Command(os.Args[0], append([]string{"-child=" + name}, args...)...)
	k.start()
	k.addr, _ = hex.DecodeString(k.expect("addr"))
	return k
}

func (k *kid) start() {
	k.t.Helper()
	if err := k.tryStart(); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kid) tryStart() error {
	t := k.t
	t.Helper()
	var err error
	k.in, err = k.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := k.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	k.cmd.Stderr = os.Stderr
	if err := k.cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case k.out <- s.Text():
			case <-time.After(10 * time.Second):
			}
		}
	}()
	t.Cleanup(func() {
		_ = k.cmd.Process.Kill()
		<-done
		_ = k.cmd.Wait()
	})
	return nil
}

// expect skips lines up to one that starts with the word and returns the rest of it.
func (k *kid) expect(word string) string {
	k.t.Helper()
	var seen []string
	deadline := time.After(15 * time.Second)
	for {
		select {
		case s := <-k.out:
			if rest, ok := strings.CutPrefix(s, word); ok {
				return strings.TrimSpace(rest)
			}
			seen = append(seen, s)
		case <-deadline:
			k.t.Fatalf("child says no %q in 15 s, but %q", word, seen)
		}
	}
}

func (k *kid) tell(format string, a ...any) { fmt.Fprintf(k.in, format+"\n", a...) }

//go:build linux

package mesh

import (
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// link joins a child to m, the child dialling or not.
func (k *kid) link(m *Mesh) *Peer {
	k.t.Helper()
	k.tell("connect %x", m.Addr())
	p, err := m.Await(short(k.t), k.addr)
	if err != nil {
		k.t.Fatal(err)
	}
	k.expect("ok")
	return p
}

// TestP6Killed measures from kill -9 to Handler.Died.
func TestP6Killed(t *testing.T) {
	for _, c := range []struct {
		name  string
		args  []string
		rings int
		limit time.Duration
	}{
		{"empty", nil, 5, 20 * time.Millisecond},
		{"256 MiB", []string{"-child.arena=268435456"}, 3, 50 * time.Millisecond},
		{"tcp", []string{"-child.links=tcp"}, 3, 20 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRec()
			m := open(t, testConfig(t, "parent"), r)
			best := time.Hour
			var all []time.Duration
			for i := range c.rings {
				name := fmt.Sprint("kid ", i)
				k := spawn(t, name, c.args...)
				p := k.link(m)
				if !p.SameHost() {
					t.Fatal("not on this host")
				}
				time.Sleep(20 * time.Millisecond)
				start := time.Now()
				if err := k.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				d := r.wait(t, "died "+name).Sub(start)
				all = append(all, d)
				best = min(best, d)
				time.Sleep(30 * time.Millisecond)
				if n := r.count("died " + name); n != 1 {
					t.Errorf("died %d times", n)
				}
				p.Forget()
			}
			t.Logf("from kill -9 to Died: %v", all)
			if best > c.limit {
				t.Errorf("the best is %v, want at most %v", best, c.limit)
			}
		})
	}
}

// TestP6StoppedIsNotDead: a process that is stopped is late, not dead, and its frames come when it goes on.
func TestP6StoppedIsNotDead(t *testing.T) {
	r := newRec()
	cfg := testConfig(t, "parent")
	cfg.HeartbeatEvery, cfg.HeartbeatLimit = 20*time.Millisecond, 100*time.Millisecond
	m := open(t, cfg, r)
	k := spawn(t, "kid")
	p := k.link(m)
	_ = unix.Kill(k.cmd.Process.Pid, unix.SIGSTOP)
	if err := p.Send(frame(1, []byte("still"))); err != nil {
		t.Fatal(err)
	}
	time.Sleep(400 * time.Millisecond)
	if r.count("died kid")+r.count("silent kid") > 0 {
		t.Error("a stopped process of this host counts as dead or silent")
	}
	_ = unix.Kill(k.cmd.Process.Pid, unix.SIGCONT)
	if got := k.expect("frame"); got != "parent still" {
		t.Error(got)
	}
}

// TestOtherPidNamespace: there a pid says nothing, the passed pidfd and the death words do.
func TestOtherPidNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("pid namespaces need root")
	}
	r := newRec()
	m := open(t, testConfig(t, "parent"), r)
	k := &kid{t: t, out: make(chan string, 100)}
	k.cmd = exec.Command(os.Args[0], "-child=kid")
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if err := k.tryStart(); err != nil {
		t.Skip("this machine makes no pid namespaces: ", err)
	}
	k.addr, _ = hex.DecodeString(k.expect("addr"))
	p := k.link(m)
	pidfd := make(chan int)
	m.lp.do(func() { pidfd <- p.mem.pidfd })
	if fd := <-pidfd; !p.SameHost() || fd < 0 || p.mem.watch == noWatcher {
		t.Errorf("same host %v, pidfd %d", p.SameHost(), fd)
	}
	_ = k.cmd.Process.Kill()
	r.wait(t, "died kid")
}

// TestEachEvidence: each kind alone is enough.
func TestEachEvidence(t *testing.T) {
	for _, only := range []string{"mark", "pidfd", "nothing but end of file"} {
		t.Run(only, func(t *testing.T) {
			r := newRec()
			m := open(t, testConfig(t, "parent"), r)
			k := spawn(t, "kid")
			p := k.link(m)
			blind := make(chan struct{})
			m.lp.do(func() {
				if only != "mark" {
					m.lp.watch.Remove(p.id)
				}
				if only != "pidfd" {
					_ = m.lp.ep.Del(p.mem.pidfd)
				}
				if only == "pidfd" || only == "mark" {
					p.failed = true // its socket is not looked at
					p.base.WithFd(func(fd int) { _ = m.lp.ep.Del(fd) })
				}
				close(blind)
			})
			<-blind
			start := time.Now()
			_ = k.cmd.Process.Kill()
			t.Logf("Died after %v", r.wait(t, "died kid").Sub(start))
		})
	}
}

// TestDeathOfMany: all but one of a full mesh die at once, and it hears of each.
func TestDeathOfMany(t *testing.T) {
	const n = 6
	r := newRec()
	m := open(t, testConfig(t, "parent"), r)
	var kids []*kid
	for i := range n {
		kids = append(kids, spawn(t, fmt.Sprint("kid", i)))
	}
	for i, k := range kids {
		k.link(m)
		for _, o := range kids[:i] {
			k.tell("connect %x", o.addr)
			if s := k.expect("ok"); !strings.Contains(s, "true true") {
				t.Error(s)
			}
		}
	}
	start := time.Now()
	for _, k := range kids[1:] {
		_ = k.cmd.Process.Kill()
	}
	var last time.Time
	for i := range kids[1:] {
		if at := r.wait(t, fmt.Sprint("died kid", i+1)); at.After(last) {
			last = at
		}
	}
	t.Logf("%d deaths heard after %v", n-1, last.Sub(start))
	for range n - 1 {
		kids[0].expect("died kid")
	}
	kids[0].tell("exit")
	r.wait(t, "died kid0")
}

// TestClosedIsDead: who closes its mesh is dead for its peers, though its process lives.
func TestClosedIsDead(t *testing.T) {
	for _, args := range []string{"auto", "tcp"} {
		r := newRec()
		m := open(t, testConfig(t, "parent"), r)
		k := spawn(t, "kid", "-child.links="+args)
		k.link(m)
		k.tell("say parent last-words")
		k.tell("close")
		if s := k.expect("closed"); s != "<nil>" {
			t.Error(s)
		}
		r.wait(t, "died kid")
	}
}

// TestIdleCPU: who has only peers of its own host and nothing to do uses no CPU.
func TestIdleCPU(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 3 s")
	}
	var kids []*kid
	for i := range 4 {
		k := spawn(t, fmt.Sprint("kid", i))
		for _, o := range kids {
			k.tell("connect %x", o.addr)
			k.expect("ok")
		}
		kids = append(kids, k)
	}
	time.Sleep(200 * time.Millisecond)
	cpu := func() (sum time.Duration) {
		for _, k := range kids {
			var n int64
			k.tell("cpu")
			if _, err := fmt.Sscan(k.expect("cpu"), &n); err != nil {
				t.Fatal(err)
			}
			sum += time.Duration(n)
		}
		return sum
	}
	before := cpu()
	const secs = 3
	time.Sleep(secs * time.Second)
	used := cpu() - before
	t.Logf("4 idle processes used %v of CPU in %d s", used, secs)
	if used > 10*secs*time.Millisecond {
		t.Error("that is too much")
	}
}

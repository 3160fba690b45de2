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

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// TestTwoHosts puts two processes into network namespaces with a cable between them, pulls it and plugs it in again.
func TestTwoHosts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	var kids [2]*kid
	for i := range kids {
		name := fmt.Sprint("host", i)
		k := &kid{t: t, out: make(chan string, 100)}
		k.cmd = exec.Command(os.Args[0], "-child="+name, fmt.Sprintf("-child.listen=10.77.0.%d", i+1))
		k.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if err := k.tryStart(); err != nil {
			t.Skip("this machine makes no network namespaces: ", err)
		}
		kids[i] = k
	}
	cable := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "srytest0"}, PeerName: "srytest1"}
	if err := netlink.LinkAdd(cable); err != nil {
		t.Skip("this machine makes no veth pair: ", err)
	}
	var ends [2]netlink.Link
	var in [2]*netlink.Handle
	for i, k := range kids {
		name := fmt.Sprint("srytest", i)
		end, err := netlink.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetNsPid(end, k.cmd.Process.Pid); err != nil {
			_ = netlink.LinkDel(cable)
			t.Fatal(err)
		}
		ns, err := netns.GetFromPid(k.cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		if in[i], err = netlink.NewHandleAt(ns); err != nil {
			t.Fatal(err)
		}
		defer in[i].Close()
		if ends[i], err = in[i].LinkByName(name); err != nil {
			t.Fatal(err)
		}
		a, _ := netlink.ParseAddr(fmt.Sprintf("10.77.0.%d/24", i+1))
		if err := in[i].AddrAdd(ends[i], a); err != nil {
			t.Fatal(err)
		}
		if err := in[i].LinkSetUp(ends[i]); err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range kids {
		k.tell("go")
		k.addr, _ = hex.DecodeString(k.expect("addr"))
	}
	kids[0].tell("connect %x", kids[1].addr)
	if s := kids[0].expect("ok"); s != "host1 false false" {
		t.Fatal(s)
	}
	kids[1].tell("await %x", kids[0].addr)
	kids[1].expect("ok")
	kids[0].tell("say host1 hello")
	if s := kids[1].expect("frame"); s != "host0 hello" {
		t.Error(s)
	}
	for round := range 2 {
		start := time.Now()
		if err := in[round].LinkSetDown(ends[round]); err != nil {
			t.Fatal(err)
		}
		kids[0].expect("silent host1")
		kids[1].expect("silent host0")
		d := time.Since(start)
		for i := range 20 {
			kids[0].tell("say host1 %d", i)
			kids[1].tell("say host0 %d", i)
		}
		if d > 3*time.Second || d < 900*time.Millisecond {
			t.Error("silent after", d)
		}
		time.Sleep(500 * time.Millisecond)
		start = time.Now()
		if err := in[round].LinkSetUp(ends[round]); err != nil {
			t.Fatal(err)
		}
		var seen []string
		for i, k := range kids {
			for n := 0; n < 20; {
				switch s := <-k.out; {
				case strings.HasPrefix(s, "heard"):
					seen = append(seen, s)
				case s == fmt.Sprintf("frame host%d %d", 1-i, n):
					n++
				default:
					t.Fatalf("child %d says %q, want frame %d", i, s, n)
				}
			}
		}
		if len(seen) != 2 {
			t.Errorf("%q", seen)
		}
		t.Logf("silent after %v; heard, and all delivered, %v after the way was open", d, time.Since(start))
	}
}

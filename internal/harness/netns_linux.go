package harness

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Host is a network namespace: processes in different ones share neither abstract sockets nor, so, memory. It ends with
// the last process in it, and with the test.
type Host struct {
	IP string
	ns netns.NsHandle
}

// Hosts makes n network namespaces, each joined with the first by a pair of virtual interfaces. Host i reaches host 0
// only, unless n is 2. Without the rights the test is skipped.
func Hosts(t testing.TB, n int) []*Host {
	t.Helper()
	hosts := make([]*Host, n)
	for i := range hosts {
		ns, err := newNetns()
		if err != nil {
			t.Skipf("no network namespace can be made: %v", err)
		}
		t.Cleanup(func() { _ = ns.Close() })
		hosts[i] = &Host{ns: ns}
		h, err := netlink.NewHandleAt(ns)
		if err != nil {
			t.Skipf("netlink: %v", err)
		}
		lo, err := h.LinkByName("lo")
		if err == nil {
			err = h.LinkSetUp(lo)
		}
		h.Close()
		if err != nil {
			t.Skipf("loopback of a network namespace: %v", err)
		}
	}
	for i := 1; i < n; i++ {
		if err := join(hosts[0], hosts[i], i); err != nil {
			t.Skipf("joining two network namespaces: %v", err)
		}
	}
	return hosts
}

// newNetns makes a namespace on a thread that ends afterwards.
func newNetns() (ns netns.NsHandle, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			ns, err = netns.Get()
		}
	}()
	<-done
	return ns, err
}

func join(a, b *Host, i int) error {
	ha, err := netlink.NewHandleAt(a.ns)
	if err != nil {
		return err
	}
	defer ha.Close()
	hb, err := netlink.NewHandleAt(b.ns)
	if err != nil {
		return err
	}
	defer hb.Close()
	names := [2]string{fmt.Sprintf("serry%da", i), fmt.Sprintf("serry%db", i)}
	if err := ha.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: names[0]}, PeerName: names[1]}); err != nil {
		return err
	}
	peer, err := ha.LinkByName(names[1])
	if err == nil {
		err = ha.LinkSetNsFd(peer, int(b.ns))
	}
	if err != nil {
		return err
	}
	for k, h := range []*netlink.Handle{ha, hb} {
		l, err := h.LinkByName(names[k])
		if err != nil {
			return err
		}
		ip := net.IPv4(10, 99, byte(i), byte(k+1))
		if err := h.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(24, 32)}}); err != nil {
			return err
		}
		if err := h.LinkSetUp(l); err != nil {
			return err
		}
		if host := []*Host{a, b}[k]; host.IP == "" {
			host.IP = ip.String()
		}
	}
	return nil
}

// In makes a process run on this host.
func (h *Host) In() Option {
	return func(c *exec.Cmd) {
		c.Env = append(c.Env, fmt.Sprintf("%s=/proc/%d/fd/%d", netnsEnv, os.Getpid(), int(h.ns)))
	}
}

// Cut takes the way between this host and the others down or up.
func (h *Host) Cut(down bool) error {
	n, err := netlink.NewHandleAt(h.ns)
	if err != nil {
		return err
	}
	defer n.Close()
	links, err := n.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Type() != "veth" {
			continue
		}
		if down {
			err = n.LinkSetDown(l)
		} else {
			err = n.LinkSetUp(l)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// enterNetns starts this process again in the namespace that it was told to run in.
func enterNetns() {
	path := os.Getenv(netnsEnv)
	if path == "" {
		return
	}
	runtime.LockOSThread() // the namespace is the thread's, and exec keeps that of the thread which calls it
	ns, err := netns.GetFromPath(path)
	if err == nil {
		err = netns.Set(ns)
	}
	if err == nil {
		var env []string
		for _, e := range os.Environ() {
			if len(e) <= len(netnsEnv) || e[:len(netnsEnv)+1] != netnsEnv+"=" {
				env = append(env, e)
			}
		}
		err = syscall.Exec("/proc/self/exe", os.Args, env)
	}
	fmt.Fprintf(os.Stderr, "harness: entering %s: %v\n", path, err)
	os.Exit(2)
}

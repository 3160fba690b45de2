package harness

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Network is hosts that are joined by a switch. It takes the rights of root.
type Network struct {
	Hosts  []*Host
	sw     netns.NsHandle
	in     *netlink.Handle // of the switch
	bridge *netlink.Bridge
}

// Host is a network namespace: processes in different ones share neither abstract sockets nor, so, memory. It ends with
// the last process in it, once the Network is closed.
type Host struct {
	IP   string
	ns   netns.NsHandle
	mac  net.HardwareAddr
	name string // of its end of the cable, in its namespace

	once sync.Once
}

// NewNetwork makes n hosts, each with a cable to a switch in a namespace of its own, so that each reaches each.
func NewNetwork(n int) (_ *Network, err error) {
	if n < 1 || n > 250 {
		return nil, fmt.Errorf("harness: a network of %d hosts: from 1 to 250 can be", n)
	}
	w := &Network{sw: netns.None()}
	defer func() {
		if err != nil {
			w.Close()
			err = fmt.Errorf("harness: no network of namespaces can be made here (it takes root): %w", err)
		}
	}()
	if w.sw, err = newNetns(); err != nil {
		return nil, err
	}
	if w.in, err = netlink.NewHandleAt(w.sw); err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "switch"
	w.bridge = &netlink.Bridge{LinkAttrs: attrs}
	if err := w.in.LinkAdd(w.bridge); err != nil {
		return nil, fmt.Errorf("a bridge: %w", err)
	}
	if err := w.in.LinkSetUp(w.bridge); err != nil {
		return nil, err
	}
	w.Hosts = make([]*Host, n)
	for i := range n {
		if err := w.make(i); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// make makes host i.
func (w *Network) make(i int) (err error) {
	h := &Host{ns: netns.None(), IP: net.IPv4(10, 99, 0, byte(i+1)).String(), name: "serry0",
		mac: net.HardwareAddr{0x02, 0x5e, 0x44, 0, 1, byte(i + 1)}} // the next one in its place has it too, as others know it
	w.Hosts[i] = h
	if h.ns, err = newNetns(); err == nil {
		err = h.join(w.in, w.bridge, i)
	}
	if err != nil {
		return fmt.Errorf("host %d: %w", i, err)
	}
	return nil
}

// Renew takes a host away, as if it had burnt, and makes another with its address. Its processes must have ended.
func (w *Network) Renew(i int) error {
	w.Hosts[i].Close()
	if l, err := w.in.LinkByName(portName(i)); err == nil { // else it ended with the namespace
		if err := w.in.LinkDel(l); err != nil {
			return fmt.Errorf("harness: the cable of host %d: %w", i, err)
		}
	}
	return w.make(i)
}

func portName(i int) string { return fmt.Sprintf("port%d", i) }

// Close gives up the namespaces. Those in which processes run end with them.
func (w *Network) Close() {
	for _, h := range w.Hosts {
		if h != nil {
			h.Close()
		}
	}
	if w.in != nil {
		w.in.Close()
	}
	if w.sw.IsOpen() {
		_ = w.sw.Close()
	}
}

// Close gives up the namespace of one host, which ends with the last process in it.
func (h *Host) Close() {
	h.once.Do(func() {
		if h.ns.IsOpen() {
			_ = h.ns.Close()
		}
	})
}

// newNetns makes a namespace on a thread that ends afterwards.
func newNetns() (ns netns.NsHandle, err error) {
	ns = netns.None()
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

// join lays the cable.
func (h *Host) join(in *netlink.Handle, bridge netlink.Link, i int) error {
	mine, err := netlink.NewHandleAt(h.ns)
	if err != nil {
		return err
	}
	defer mine.Close()
	lo, err := mine.LinkByName("lo")
	if err == nil {
		err = mine.LinkSetUp(lo)
	}
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = portName(i)
	attrs.MasterIndex = bridge.Attrs().Index
	port := &netlink.Veth{LinkAttrs: attrs, PeerName: h.name, PeerHardwareAddr: h.mac, PeerNamespace: netlink.NsFd(h.ns)}
	if err := in.LinkAdd(port); err != nil {
		return fmt.Errorf("a pair of virtual interfaces: %w", err)
	}
	l, err := mine.LinkByName(h.name)
	if err != nil {
		return err
	}
	ip, mask := net.ParseIP(h.IP), net.CIDRMask(24, 32)
	if err := mine.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: mask}}); err != nil {
		return err
	}
	return errors.Join(mine.LinkSetUp(l), in.LinkSetUp(port))
}

// In makes a process run on this host.
func (h *Host) In() Option { return func(c *exec.Cmd) { places.Store(c, h) } }

// start starts the command from a thread in the namespace, which its process inherits.
func (h *Host) start(cmd *exec.Cmd) (err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err = netns.Set(h.ns); err == nil {
			err = cmd.Start()
		}
	}()
	<-done
	return err
}

// with runs f on the host's end of its cable.
func (h *Host) with(f func(n *netlink.Handle, l netlink.Link) error) error {
	n, err := netlink.NewHandleAt(h.ns)
	if err != nil {
		return err
	}
	defer n.Close()
	l, err := n.LinkByName(h.name)
	if err != nil {
		return err
	}
	return f(n, l)
}

// Cut takes the way between this host and the others down or up.
func (h *Host) Cut(down bool) error {
	return h.with(func(n *netlink.Handle, l netlink.Link) error {
		if down {
			return n.LinkSetDown(l)
		}
		return n.LinkSetUp(l)
	})
}

// nobody is a hardware address that no host has.
var nobody = net.HardwareAddr{0x02, 0x5e, 0x44, 0, 0, 1}

// CutTo makes what this host sends to another vanish, or not any more. What that one sends still arrives here.
func (h *Host) CutTo(other *Host, down bool) error {
	return h.with(func(n *netlink.Handle, l netlink.Link) error {
		to := &netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP(other.IP), State: netlink.NUD_PERMANENT, HardwareAddr: nobody}
		if !down {
			to.HardwareAddr = other.mac
		}
		return n.NeighSet(to)
	})
}

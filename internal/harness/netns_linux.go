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
	Hosts []*Host
	sw    netns.NsHandle
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
	in, err := netlink.NewHandleAt(w.sw)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "switch"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := in.LinkAdd(bridge); err != nil {
		return nil, fmt.Errorf("a bridge: %w", err)
	}
	if err := in.LinkSetUp(bridge); err != nil {
		return nil, err
	}
	for i := range n {
		h := &Host{ns: netns.None(), IP: net.IPv4(10, 99, 0, byte(i+1)).String(), name: "serry0"}
		w.Hosts = append(w.Hosts, h)
		if h.ns, err = newNetns(); err != nil {
			return nil, err
		}
		if err := h.join(in, bridge, i); err != nil {
			return nil, fmt.Errorf("host %d: %w", i, err)
		}
	}
	return w, nil
}

// Close gives up the namespaces. Those in which processes run end with them.
func (w *Network) Close() {
	for _, h := range w.Hosts {
		h.Close()
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
	attrs.Name = fmt.Sprintf("port%d", i)
	attrs.MasterIndex = bridge.Attrs().Index
	port := &netlink.Veth{LinkAttrs: attrs, PeerName: h.name, PeerNamespace: netlink.NsFd(h.ns)}
	if err := in.LinkAdd(port); err != nil {
		return fmt.Errorf("a pair of virtual interfaces: %w", err)
	}
	l, err := mine.LinkByName(h.name)
	if err != nil {
		return err
	}
	h.mac = l.Attrs().HardwareAddr
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

package mesh

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// listenHost is where to listen: listen, a host or the name of an interface, either with a port if need be; else the
// own address on the way to via; else loopback.
func listenHost(listen, via string) (string, error) {
	port := "0"
	if h, p, err := net.SplitHostPort(listen); err == nil {
		listen, port = h, p
	}
	listen = strings.Trim(listen, "[]")
	switch {
	case listen != "":
		ifi, err := matchInterface(listen)
		if err != nil {
			return "", err
		}
		if ifi != nil {
			a, err := interfaceAddr(ifi)
			if err != nil {
				return "", err
			}
			return net.JoinHostPort(a, port), nil
		}
		if a, err := netip.ParseAddr(listen); err == nil && a.IsUnspecified() {
			return "", fmt.Errorf("mesh: listen on %s: peers have to be told one address: name it, or the interface", listen)
		}
		if _, err := netip.ParseAddr(listen); err != nil {
			if ips, err := net.LookupHost(listen); err != nil || len(ips) == 0 {
				return "", fmt.Errorf("mesh: listen on %q: no interface has that name, and no host: %w", listen, err)
			}
		}
		return net.JoinHostPort(listen, port), nil
	case via != "":
		c, err := net.Dial("udp", via) // sends nothing, but asks for the route
		if err != nil {
			return "", fmt.Errorf("mesh: the way to the rendezvous %s: %w", via, err)
		}
		defer c.Close()
		return net.JoinHostPort(hostPart(c.LocalAddr()), port), nil
	}
	return net.JoinHostPort("127.0.0.1", port), nil
}

// matchInterface is the interface that a name, or a list in NCCL's syntax, chooses: prefixes separated by commas, of which
// the first that matches counts; with = in front whole names; with ^ any other than those. nil: it may be a host.
func matchInterface(spec string) (*net.Interface, error) {
	if ifi, err := net.InterfaceByName(spec); err == nil {
		return ifi, nil
	}
	names, not := strings.CutPrefix(spec, "^")
	names, whole := strings.CutPrefix(names, "=")
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("mesh: listing the interfaces: %w", err)
	}
	match := func(ifi *net.Interface, name string) bool {
		if whole {
			return ifi.Name == name
		}
		return name != "" && strings.HasPrefix(ifi.Name, name)
	}
	usable := func(ifi *net.Interface) bool {
		_, err := interfaceAddr(ifi)
		return err == nil && ifi.Flags&net.FlagUp != 0
	}
	list := strings.Split(names, ",")
	if not {
		for i := range all {
			out := all[i].Flags&net.FlagLoopback != 0
			for _, n := range list {
				out = out || match(&all[i], n)
			}
			if !out && usable(&all[i]) {
				return &all[i], nil
			}
		}
		return nil, fmt.Errorf("mesh: no interface that is up and has an address is left by %q", spec)
	}
	for _, n := range list {
		for i := range all {
			if match(&all[i], n) && usable(&all[i]) {
				return &all[i], nil
			}
		}
	}
	if whole || len(list) > 1 {
		return nil, fmt.Errorf("mesh: no interface that is up and has an address matches %q", spec)
	}
	return nil, nil
}

func hostPart(a net.Addr) string {
	u := a.(*net.UDPAddr)
	if u.Zone != "" {
		return u.IP.String() + "%" + u.Zone
	}
	return u.IP.String()
}

// interfaceAddr prefers what others can reach.
func interfaceAddr(ifi *net.Interface) (string, error) {
	addrs, err := ifi.Addrs()
	if err != nil {
		return "", fmt.Errorf("mesh: addresses of %s: %w", ifi.Name, err)
	}
	best, rank := "", 0
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		s, r := n.IP.String(), 2
		switch {
		case n.IP.IsLinkLocalUnicast() && n.IP.To4() == nil:
			s, r = s+"%"+ifi.Name, 1
		case n.IP.To4() != nil:
			r = 3
		}
		if r > rank {
			best, rank = s, r
		}
	}
	if best == "" {
		return "", fmt.Errorf("mesh: interface %s has no address", ifi.Name)
	}
	return best, nil
}

// hostOfDir is the Mesh.Host of processes that meet in a directory.
func hostOfDir(boot, dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("mesh: socket directory %s: %w", dir, err)
	}
	return hostHash(boot, "dir", uint64(st.Dev), st.Ino), nil
}

// sweep removes the sockets that killed processes have left in dir: those that are older than a start takes and to which
// nobody listens any more.
func sweep(dir string) {
	names, _ := filepath.Glob(dir + "/serry-*")
	for _, name := range names {
		if st, err := os.Lstat(name); err != nil || st.Mode().Type() != os.ModeSocket || time.Since(st.ModTime()) < time.Minute {
			continue
		}
		c, err := net.DialTimeout("unix", name, time.Second)
		if err == nil {
			c.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(name)
		}
	}
}

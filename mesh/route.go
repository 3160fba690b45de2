package mesh

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

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
		if ifi, err := net.InterfaceByName(listen); err == nil {
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

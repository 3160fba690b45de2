package mesh

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/serry-project/serry/internal/wire"
)

// Address is what an encoded address (Mesh.Addr) says.
type Address struct {
	Major, Minor uint8 // wire version
	Nonce        Nonce
	Name         string
	Host         uint64 // see Mesh.Host
	BootID       string
	Hostname     string
	PID          int
	StartTime    uint64
	NetNS, PidNS uint64
	Unix         string   // "@" and an abstract name, or a path; empty: no shared memory
	TCP          []string // endpoints, best first
	OnlyTCP      bool     // Config.Links is "tcp"
	NoChecksum   bool     // Config.NoChecksum: one side's is enough
}

const (
	addrMagic   = "serryAD"
	addrVersion = 1
	maxAddr     = 4096
)

func (a *Address) encode() []byte {
	var e enc
	e = append(e, addrMagic...)
	e.u8(addrVersion)
	e.u8(a.Major)
	e.u8(a.Minor)
	e.id(a.Nonce)
	e.str(a.Name)
	e.u64(a.Host)
	e.str(a.BootID)
	e.str(a.Hostname)
	e.u64(uint64(a.PID))
	e.u64(a.StartTime)
	e.u64(a.NetNS)
	e.u64(a.PidNS)
	e.str(a.Unix)
	e.u8(uint8(len(a.TCP)))
	for _, t := range a.TCP {
		e.str(t)
	}
	e.bool(a.OnlyTCP)
	e.bool(a.NoChecksum)
	return e
}

// ParseAddr decodes the address of a process.
func ParseAddr(b []byte) (*Address, error) {
	d := dec{b: b}
	if m := d.take(len(addrMagic)); string(m) != addrMagic || len(b) > maxAddr {
		return nil, fmt.Errorf("mesh: address: %d bytes that start with %q are no address of serry", len(b), b[:min(len(b), 8)])
	}
	if v := d.u8(); v != addrVersion {
		return nil, fmt.Errorf("mesh: address: it has version %d, this is %d: run the same serry on all ranks", v, addrVersion)
	}
	a := &Address{
		Major: d.u8(), Minor: d.u8(), Nonce: d.id(), Name: d.str(), Host: d.u64(), BootID: d.str(), Hostname: d.str(),
		PID: int(d.u64()), StartTime: d.u64(), NetNS: d.u64(), PidNS: d.u64(), Unix: d.str(),
	}
	for n := d.u8(); n > 0 && !d.bad; n-- {
		a.TCP = append(a.TCP, d.str())
	}
	a.OnlyTCP, a.NoChecksum = d.u8() != 0, d.u8() != 0
	if d.bad || len(d.b) > 0 {
		return nil, errors.New("mesh: address: it is cut or has bytes too many")
	}
	if a.Major != wire.Major || a.Minor != wire.Minor {
		return nil, fmt.Errorf("mesh: %s speaks version %d.%d, this is %d.%d: run the same serry on all ranks", a.Name, a.Major, a.Minor, wire.Major, wire.Minor)
	}
	return a, nil
}

// HostOf is Mesh.Host of the process with this address.
func HostOf(addr []byte) (uint64, error) {
	a, err := ParseAddr(addr)
	if err != nil {
		return 0, err
	}
	return a.Host, nil
}

// hostHash makes a host's number from what its processes have in common.
func hostHash(boot, what string, x ...uint64) uint64 {
	var e enc
	e.str(boot)
	e.str(what)
	for _, v := range x {
		e.u64(v)
	}
	s := sha256.Sum256(e)
	return binary.LittleEndian.Uint64(s[:]) | 1
}

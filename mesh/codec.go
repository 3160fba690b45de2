package mesh

import "encoding/binary"

// enc appends little-endian fields; dec reads them back, and remembers when there were too few bytes.
type enc []byte

func (e *enc) u8(v uint8)   { *e = append(*e, v) }
func (e *enc) u32(v uint32) { *e = binary.LittleEndian.AppendUint32(*e, v) }
func (e *enc) u64(v uint64) { *e = binary.LittleEndian.AppendUint64(*e, v) }
func (e *enc) bool(v bool) {
	if v {
		e.u8(1)
	} else {
		e.u8(0)
	}
}
func (e *enc) id(v [16]byte) {
	*e = append(*e, v[:]...)
}
func (e *enc) bytes(v []byte) {
	e.u32(uint32(len(v)))
	*e = append(*e, v...)
}
func (e *enc) str(v string) { e.bytes([]byte(v)) }

type dec struct {
	b   []byte
	bad bool
}

func (d *dec) take(n int) []byte {
	if d.bad || n < 0 || n > len(d.b) {
		d.bad = true
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *dec) u8() uint8 {
	if v := d.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (d *dec) u32() uint32 {
	if v := d.take(4); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

func (d *dec) u64() uint64 {
	if v := d.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (d *dec) id() (v [16]byte) {
	copy(v[:], d.take(16))
	return v
}

func (d *dec) bytes() []byte { return d.take(int(d.u32())) }
func (d *dec) str() string   { return string(d.bytes()) }

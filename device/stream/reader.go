package stream

import (
	"errors"
	"fmt"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// bufSize is that of a receive buffer unless asked for otherwise: one whole frame of the largest size always fits behind the rest of another.
const bufSize = 2 * (wire.MaxPayload + wire.Size)

// reader cuts a stream of bytes into frames.
type reader struct {
	buf  []byte
	r, w int  // unread bytes are buf[r:w]
	sum  bool // a frame without a checksum is refused
	size int  // of buf
}

func (d *reader) reset() { d.r, d.w = 0, 0 }

// room returns where the next bytes belong; never empty after next has said that a frame is incomplete.
func (d *reader) room() []byte {
	if d.buf == nil {
		d.buf = make([]byte, d.size)
	}
	switch {
	case d.r == d.w:
		d.r, d.w = 0, 0
	case len(d.buf)-d.w < d.size/2:
		copy(d.buf, d.buf[d.r:d.w])
		d.r, d.w = 0, d.w-d.r
	}
	return d.buf[d.w:]
}

// fed says that n bytes were put into room.
func (d *reader) fed(n int) { d.w += n }

var errNoSum = errors.New("wire: frame without a checksum on a link that has checksums")

// next fills f with the next frame, if all of it is there. The payload lies in the buffer and is valid until room. An
// error is final for this stream.
func (d *reader) next(f *device.Frame) (bool, error) {
	b := d.buf[d.r:d.w]
	if len(b) < wire.Size {
		return false, nil
	}
	if err := f.Header.Parse(b); err != nil {
		return false, err
	}
	end := wire.Size + int(f.Length)
	if len(b) < end {
		return false, nil
	}
	f.Payload = b[wire.Size:end:end]
	if d.sum {
		if b[4]|b[5]|b[6]|b[7] == 0 {
			return false, errNoSum
		}
		if err := wire.Check(b, f.Payload); err != nil {
			return false, fmt.Errorf("%w (kind %d, %d bytes)", err, f.Kind, f.Length)
		}
	}
	d.r += end
	return true, nil
}

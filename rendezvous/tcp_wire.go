package rendezvous

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Our protocol. All integers are big-endian. A connection starts with one hello each way, the client's first:
//
//	 8 B      u16       u16      16 B
//	"SERRYRDV" version | 0      | id        client: random, kept over reconnections
//	                                        server: random, one per run of the server
//
// and then carries frames both ways:
//
//	u32       u32   u8     length - 5 bytes
//	length  | id  | kind | body
//
// A request's id is chosen by the client and comes back in its one answer. Answers come in any order, so that a wait
// holds up nothing. Bodies (str is a u32 length and bytes):
//
//	get     str key                                 value   bytes
//	set     str key, value                          done
//	wait    u32 n, n x str key                      done
//	add     u64 turn, str key, i64 delta            sum     i64
//	cas     u64 turn, str key, str expected, desired
//	                                                value   bytes, or absent
//	cancel  (id of the get or wait to end)          no answer
//	                                                failed  u8 code, text
//
// A client has one add or cas on its way at a time and numbers them by turn. The server keeps the last turn's answer of
// each client, so that one which is repeated over a new connection is not done twice.
const (
	wireMagic   = "SERRYRDV"
	wireVersion = 1
	helloLen    = len(wireMagic) + 2 + 2 + 16

	frameHead = 4
	frameMin  = 5                        // id and kind
	frameMax  = 2*MaxValue + MaxKey + 64 // cas with two values
)

type kind uint8

const (
	kindGet kind = iota + 1
	kindSet
	kindWait
	kindAdd
	kindCAS
	kindCancel
	kindValue kind = iota + 64
	kindDone
	kindSum
	kindAbsent
	kindFailed
)

// Codes of a failed answer: the causes that a client can tell apart.
var failures = map[uint8]error{1: ErrNotNumber, 2: ErrFull, 3: ErrTooLarge, 4: ErrBadKey, 5: errBadFrame, 6: ErrClosed}

var errBadFrame = errors.New("not a message of our protocol")

type identity [16]byte

type hello struct {
	version uint16
	id      identity
}

func (h hello) append(b []byte) []byte {
	b = append(b, wireMagic...)
	b = binary.BigEndian.AppendUint16(b, h.version)
	b = append(b, 0, 0)
	return append(b, h.id[:]...)
}

func parseHello(b []byte) (hello, error) {
	var h hello
	if len(b) < helloLen || string(b[:len(wireMagic)]) != wireMagic {
		return h, foreign(b)
	}
	h.version = binary.BigEndian.Uint16(b[len(wireMagic):])
	copy(h.id[:], b[helloLen-16:])
	return h, nil
}

type frame struct {
	id   uint32
	kind kind
	body []byte
}

func (f frame) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(frameMin+len(f.body)))
	b = binary.BigEndian.AppendUint32(b, f.id)
	b = append(b, byte(f.kind))
	return append(b, f.body...)
}

// readFrame reads one frame. The body is allocated as its bytes arrive, so that a length alone costs nothing.
func readFrame(r io.Reader) (frame, error) {
	var head [frameHead + frameMin]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < frameMin || n > frameMax {
		return frame{}, fmt.Errorf("%w: length %d", errBadFrame, n)
	}
	f := frame{id: binary.BigEndian.Uint32(head[4:]), kind: kind(head[8])}
	var err error
	f.body, err = readBytes(r, uint64(n-frameMin))
	return f, err
}

// readBytes reads n bytes. It allocates no more than twice what has arrived, since n is only a claim.
func readBytes(r io.Reader, n uint64) ([]byte, error) {
	const trusted = 256 << 10
	b := make([]byte, min(n, trusted))
	for read := 0; ; {
		m, err := io.ReadFull(r, b[read:])
		if err != nil {
			return nil, unexpected(err)
		}
		if read += m; uint64(read) == n {
			return b, nil
		}
		b = append(b, make([]byte, min(n-uint64(read), uint64(read)))...)
	}
}

// unexpected turns an end of file inside a message into one that is an error.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// request is the decoded body of a request.
type request struct {
	turn     uint64 // add, cas
	delta    int64  // add
	keys     []string
	value    []byte // set, cas: desired
	expected []byte // cas
}

func (q request) append(b []byte, k kind) []byte {
	switch k {
	case kindAdd, kindCAS:
		b = binary.BigEndian.AppendUint64(b, q.turn)
	case kindWait:
		b = binary.BigEndian.AppendUint32(b, uint32(len(q.keys)))
	}
	for _, key := range q.keys {
		b = appendStr(b, []byte(key))
	}
	switch k {
	case kindAdd:
		return binary.BigEndian.AppendUint64(b, uint64(q.delta))
	case kindCAS:
		b = appendStr(b, q.expected)
	}
	return append(b, q.value...)
}

func appendStr(b, s []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
	return append(b, s...)
}

// parseRequest decodes body. The result refers to body.
func parseRequest(k kind, body []byte) (request, error) {
	var q request
	p := parser{b: body}
	switch k {
	case kindGet:
		q.keys = []string{p.key()}
	case kindSet:
		q.keys = []string{p.key()}
		q.value = p.rest()
	case kindWait:
		n := p.u32()
		if uint64(n)*4 > uint64(len(p.b)) {
			return q, fmt.Errorf("%w: %d keys in %d bytes", errBadFrame, n, len(p.b))
		}
		q.keys = make([]string, 0, n)
		for range n {
			q.keys = append(q.keys, p.key())
		}
	case kindAdd:
		q.turn = p.u64()
		q.keys = []string{p.key()}
		q.delta = int64(p.u64())
	case kindCAS:
		q.turn = p.u64()
		q.keys = []string{p.key()}
		q.expected = p.str()
		q.value = p.rest()
	case kindCancel:
	default:
		return q, fmt.Errorf("%w: kind %d", errBadFrame, k)
	}
	if p.short || len(p.b) > 0 {
		return q, fmt.Errorf("%w: kind %d with %d bytes", errBadFrame, k, len(body))
	}
	return q, nil
}

// parser takes fields off the front of b; after the first that is not there, short is set and all are zero.
type parser struct {
	b     []byte
	short bool
}

func (p *parser) take(n int) []byte {
	if p.short || n > len(p.b) {
		p.short = true
		return nil
	}
	v := p.b[:n:n]
	p.b = p.b[n:]
	return v
}

func (p *parser) u32() uint32 {
	if v := p.take(4); v != nil {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

func (p *parser) u64() uint64 {
	if v := p.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func (p *parser) str() []byte {
	n := p.u32()
	if uint64(n) > uint64(len(p.b)) {
		p.short = true
		return nil
	}
	return p.take(int(n))
}

func (p *parser) key() string  { return string(p.str()) }
func (p *parser) rest() []byte { return p.take(len(p.b)) }

// failedBody encodes err as the body of a failed answer.
func failedBody(err error) []byte {
	var code uint8
	for c, known := range failures {
		if errors.Is(err, known) {
			code = c
		}
	}
	return append([]byte{code}, err.Error()...)
}

// remoteError is a failure that the server reported.
type remoteError struct {
	text string
	kind error // one of failures, or nil
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.kind }

func parseFailed(body []byte) error {
	if len(body) == 0 {
		return errBadFrame
	}
	return &remoteError{text: string(body[1:]), kind: failures[body[0]]}
}

func sumFrame(n int64, err error) frame {
	if err != nil {
		return frame{kind: kindFailed, body: failedBody(err)}
	}
	return frame{kind: kindSum, body: binary.BigEndian.AppendUint64(nil, uint64(n))}
}

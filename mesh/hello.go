package mesh

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/wire"
)

// The handshake of a connection; D dialled, A accepted. Every message has a head of 16 bytes:
//
//	0 "serry\r\n\n"   8 major   9 minor   10 type   11 0   12 length of the body (4)
//
//	hello  D->A   purpose, world, own nonce, nonce that is wanted, whether there is a key, name, challenge
//	hello  A->D   the same from the other side
//	proof  D->A   HMAC-SHA256(key, "dialler" + SHA-256(both hellos) + address), own address
//	proof  A->D   the same for "acceptor"
//	memory D->A, A->D   on a unix socket, for purposes link and memory: see memory.go
//	ready  D->A, A->D   last link sequence that was received
//
// Behind the last ready come frames. A refusal, a text, may stand in place of any message.
const (
	headBytes = 16
	hsMagic   = "serry\r\n\n" // the line ends make a server that speaks lines answer
	maxBody   = 16 << 10

	msgHello  = 1
	msgProof  = 2
	msgMemory = 3
	msgReady  = 4
	msgRefuse = 5
)

// What a connection is for.
type purpose uint8

const (
	forLink   purpose = 1 // a link, and on a unix socket the memory before it
	forMemory purpose = 2 // memory only: the link is another connection
	forAgain  purpose = 3 // the next connection of a link that exists
	forWords  purpose = 4 // the host's shared words, which the dialler has
	forData   purpose = 5 // a link by TCP, after forMemory
)

// handshakeTime is how long one may take, from the first byte to the last.
const handshakeTime = 5 * time.Second

// firstWord is how long a stranger may hold a descriptor of ours without a word.
const firstWord = 2 * time.Second

// RefusedError says that the two sides will not talk, now or later: another world, key, or version.
type RefusedError struct {
	Text string

	// forgot: it was said by the very process that was wanted, with the world's key, that it knows this one no longer.
	// Anybody else who got its address after it may refuse too, which proves nothing.
	forgot bool
}

func (e *RefusedError) Error() string { return e.Text }

func refused(format string, a ...any) error {
	return &RefusedError{Text: "mesh: " + fmt.Sprintf(format, a...)}
}

func forgotten(format string, a ...any) error {
	return &RefusedError{Text: "mesh: " + fmt.Sprintf(format, a...), forgot: true}
}

func isForgotten(err error) bool {
	var r *RefusedError
	return errors.As(err, &r) && r.forgot
}

// errBusy: both sides dialled at once, and the other one's connection is the one that stays.
var errBusy = errors.New("mesh: the peer is dialling us")

// noMemoryError: the two processes are on one host, but can not share memory.
type noMemoryError struct{ text string }

func (e *noMemoryError) Error() string { return e.text }

func noMemory(format string, a ...any) error {
	return &noMemoryError{"mesh: " + fmt.Sprintf(format, a...)}
}

// What a refusal says when it is none for good, and one that counts for more: forgotText comes after both proofs only.
const (
	busyText     = "busy: take my connection"
	noMemoryText = "no memory: "
	forgotText   = "forgotten: "
)

// hello is the first message of each side.
type hello struct {
	purpose     purpose
	world       [16]byte
	nonce, want Nonce
	keyed       bool
	name        string
	challenge   [32]byte
}

func (h *hello) encode() []byte {
	var e enc
	e.u8(uint8(h.purpose))
	e.id(h.world)
	e.id(h.nonce)
	e.id(h.want)
	e.bool(h.keyed)
	e.str(h.name)
	return append(e, h.challenge[:]...)
}

func (h *hello) decode(b []byte) error {
	d := dec{b: b}
	h.purpose, h.world, h.nonce, h.want, h.keyed, h.name = purpose(d.u8()), d.id(), d.id(), d.id(), d.u8() != 0, d.str()
	copy(h.challenge[:], d.take(32))
	if d.bad || len(d.b) > 0 || h.purpose < forLink || h.purpose > forData {
		return errors.New("mesh: malformed hello")
	}
	return nil
}

// talk is one handshake in progress.
type talk struct {
	ctx   context.Context // of the mesh
	c     net.Conn
	key   []byte
	both  hash.Hash // over both hellos
	mine  hello
	other hello
	addr  *Address // of the other side, proved
	sure  bool     // both proofs were right, and it is the process that was wanted
	raw   []byte
	fds   []int // that came with the last message
}

func (m *Mesh) newTalk(c net.Conn, p purpose, want Nonce) *talk {
	t := &talk{ctx: m.ctx, c: c, key: m.cfg.Key, both: sha256.New()}
	t.mine = hello{purpose: p, world: m.cfg.World, nonce: m.nonce, want: want, keyed: len(m.cfg.Key) > 0, name: m.cfg.Name}
	_, _ = rand.Read(t.mine.challenge[:])
	t.within(handshakeTime)
	return t
}

// within gives the handshake so much time from now, or none if the mesh is closed.
func (t *talk) within(d time.Duration) {
	_ = t.c.SetDeadline(time.Now().Add(d))
	if t.ctx.Err() != nil {
		_ = t.c.SetDeadline(time.Unix(1, 0))
	}
}

func message(kind uint8, body []byte) []byte {
	b := make([]byte, headBytes, headBytes+len(body))
	copy(b, hsMagic)
	b[8], b[9], b[10] = wire.Major, wire.Minor, kind
	binary.LittleEndian.PutUint32(b[12:], uint32(len(body)))
	return append(b, body...)
}

func (t *talk) send(kind uint8, body []byte) error {
	b := message(kind, body)
	if kind == msgHello {
		t.both.Write(b)
	}
	_, err := t.c.Write(b)
	return t.sent(err)
}

// sent turns the error of a write into the refusal that the other side left before it closed, if there is one.
func (t *talk) sent(err error) error {
	if err == nil {
		return nil
	}
	if _, rerr := t.receive(msgRefuse); rerr != nil && (final(rerr) || rerr == errBusy) {
		return rerr
	}
	return err
}

// receive reads one message of the wanted kind, byte by byte no further.
func (t *talk) receive(want uint8) ([]byte, error) {
	var h [headBytes]byte
	n, err := t.readHead(h[:], want == msgMemory)
	if n > 0 && !bytes.Equal(h[:min(n, 8)], []byte(hsMagic)[:min(n, 8)]) {
		return nil, refused("%s is no serry process: it starts with %q", t.c.RemoteAddr(), h[:n])
	}
	if err != nil {
		if n == 0 && errors.Is(err, io.EOF) {
			err = errors.New("closed without a word")
		}
		return nil, err
	}
	size := binary.LittleEndian.Uint32(h[12:])
	if h[8] != wire.Major || h[9] != wire.Minor {
		_, _ = io.CopyN(io.Discard, t.c, int64(min(size, maxBody))) // what is unread would reset the answer
		return nil, refused("%s speaks version %d.%d, this is %d.%d: run the same serry on all ranks", t.who(), h[8], h[9], wire.Major, wire.Minor)
	}
	if size > maxBody {
		return nil, fmt.Errorf("mesh: handshake message of %d bytes", size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(t.c, body); err != nil {
		return nil, err
	}
	switch h[10] {
	case msgRefuse:
		if string(body) == busyText {
			return nil, errBusy
		}
		if s, ok := strings.CutPrefix(string(body), noMemoryText); ok {
			return nil, noMemory("%s can not share memory: %s", t.who(), s)
		}
		if s, ok := strings.CutPrefix(string(body), forgotText); ok && t.sure {
			return nil, forgotten("%s refuses: %s", t.who(), s)
		}
		return nil, refused("%s refuses: %s", t.who(), strings.TrimPrefix(string(body), "mesh: "))
	case want:
	default:
		return nil, fmt.Errorf("mesh: handshake message %d from %s, want %d", h[10], t.who(), want)
	}
	if want == msgHello {
		t.both.Write(h[:])
		t.both.Write(body)
	}
	return body, nil
}

func (t *talk) who() string {
	if t.other.name != "" {
		return fmt.Sprintf("%s (%s)", t.other.name, t.c.RemoteAddr())
	}
	return t.c.RemoteAddr().String()
}

// refuse tells the other side why not, as far as that works, and returns err.
func (t *talk) refuse(err error) error {
	text := strings.TrimPrefix(err.Error(), "mesh: ")
	var nm *noMemoryError
	if err == errBusy {
		text = busyText
	} else if errors.As(err, &nm) {
		text = noMemoryText + text
	} else if isForgotten(err) {
		text = forgotText + text
	}
	_, _ = t.c.Write(message(msgRefuse, []byte(text[:min(len(text), 512)])))
	return err
}

// turnAway refuses a dialler after the proofs. What it says next is read first, or it would reset the answer.
func (t *talk) turnAway(err error) error {
	if isForgotten(err) {
		t.within(time.Second)
		_, _ = t.receive(msgReady)
	}
	return t.refuse(err)
}

func (t *talk) mac(role string, addr []byte) []byte {
	h := hmac.New(sha256.New, t.key)
	h.Write([]byte(role))
	h.Write(t.both.Sum(nil))
	h.Write(addr)
	return h.Sum(nil)
}

func (t *talk) prove(role string, addr []byte) error {
	return t.send(msgProof, append(t.mac(role, addr), addr...))
}

func (t *talk) proved(role string) error {
	b, err := t.receive(msgProof)
	if err != nil {
		return err
	}
	if len(b) < sha256.Size || !hmac.Equal(b[:sha256.Size], t.mac(role, b[sha256.Size:])) {
		with, without := t.mine.name, t.other.name
		if t.other.keyed {
			with, without = without, with
		}
		if t.mine.keyed != t.other.keyed {
			return t.refuse(refused("%s has no key, %s has one: it must come from the rendezvous of the group", without, with))
		}
		return t.refuse(refused("%s has another key than %s: it is not of this group", t.other.name, t.mine.name))
	}
	t.raw = b[sha256.Size:]
	if t.addr, err = ParseAddr(t.raw); err != nil {
		return t.refuse(err)
	}
	if t.addr.Nonce != t.other.nonce {
		return t.refuse(fmt.Errorf("mesh: the address of %s belongs to another process", t.other.name))
	}
	t.sure = true
	return nil
}

// dialled runs the dialler's side up to both proofs.
func (t *talk) dialled(addr []byte) error {
	if err := t.send(msgHello, t.mine.encode()); err != nil {
		return err
	}
	b, err := t.receive(msgHello)
	if err != nil {
		return err
	}
	if err := t.other.decode(b); err != nil {
		return err
	}
	if t.other.world != t.mine.world {
		return refused("%s is of world %x, this process is of %x", t.who(), t.other.world, t.mine.world)
	}
	if t.other.nonce != t.mine.want {
		return refused("%s is process %x, not %x, which was there before", t.who(), t.other.nonce, t.mine.want)
	}
	if err := t.prove("dialler", addr); err != nil {
		return err
	}
	return t.proved("acceptor")
}

// accepted runs the acceptor's side up to both proofs. may decides, after the world is known to be right, whether the
// dialler is welcome. Whom we have forgotten learns it after the proofs, so that it can believe it.
func (t *talk) accepted(addr []byte, may func(*hello) error) error {
	t.within(firstWord)
	b, err := t.receive(msgHello)
	if err != nil {
		var r *RefusedError
		if errors.As(err, &r) {
			return t.refuse(err) // its head names our version
		}
		return err
	}
	t.within(handshakeTime)
	if err := t.other.decode(b); err != nil {
		return t.refuse(err)
	}
	t.mine.purpose = t.other.purpose
	if t.other.world != t.mine.world {
		return t.refuse(refused("%s is of world %x, %s is of %x", t.who(), t.other.world, t.mine.name, t.mine.world))
	}
	if t.other.want != t.mine.nonce {
		return t.refuse(refused("process %x is not here, this is %s, %x", t.other.want, t.mine.name, t.mine.nonce))
	}
	t.mine.want = t.other.nonce
	no := may(&t.other)
	if no != nil && !isForgotten(no) {
		return t.refuse(no)
	}
	if err := t.send(msgHello, t.mine.encode()); err != nil {
		return err
	}
	if err := t.proved("dialler"); err != nil {
		return err
	}
	if err := t.prove("acceptor", addr); err != nil || no == nil {
		return err
	}
	return t.turnAway(no)
}

// ready exchanges what has been received. The dialler speaks first; gen belongs to recv (stream.Link.Reset).
func (t *talk) ready(first bool, reset func() (recv, gen uint64)) (peerHas, gen uint64, err error) {
	var recv uint64
	say := func() error {
		recv, gen = reset()
		return t.send(msgReady, binary.LittleEndian.AppendUint64(nil, recv))
	}
	if first {
		if err := say(); err != nil {
			return 0, 0, err
		}
	}
	b, err := t.receive(msgReady)
	if err != nil {
		return 0, 0, err
	}
	if len(b) != 8 {
		return 0, 0, fmt.Errorf("mesh: ready message of %d bytes", len(b))
	}
	if !first {
		if err := say(); err != nil {
			return 0, 0, err
		}
	}
	return binary.LittleEndian.Uint64(b), gen, nil
}

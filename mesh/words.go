package mesh

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/serry-project/serry/device/host"
)

// MakeWords makes the shared words of this host: WordsBytes of zeroed memory that every process of the world on this
// host maps writable. One process calls it, the lowest founder; the others get the words in the handshake, or as soon as
// they exist, from whoever has them.
//
// If the one who makes them dies while it passes them on, the next one may make some more before the first reach it. Then
// two sets live on one host. Nobody who has words ever changes them, for they may be in use; each tells the id of its own
// in its segment, and between processes with different ones no memory is shared (Peer.Arena is nil, data goes in frames).
// That is the relation of two hosts, so it needs no agreement: both sides compare the same two numbers.
func (m *Mesh) MakeWords() error {
	if m.words.Load() != nil {
		return errors.New("mesh: this host has its words already")
	}
	s, err := host.CreateShared("serry-words", wordsSize)
	if err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	var id [8]byte
	_, _ = rand.Read(id[:])
	host.Word64(s.Bytes(), WordsBytes).Store(binary.LittleEndian.Uint64(id[:]) | 1)
	if !m.setWords(s) {
		s.Close()
		return errors.New("mesh: this host has its words already")
	}
	return nil
}

// Words waits until this process has made or received the words. They stay mapped as long as the Mesh is reachable.
func (m *Mesh) Words(ctx context.Context) ([]byte, error) {
	select {
	case <-m.haveWords:
		return m.words.Load().Bytes()[:WordsBytes:WordsBytes], nil
	case <-ctx.Done():
		return nil, fmt.Errorf("mesh: waiting for the host's shared words: %w", context.Cause(ctx))
	case <-m.ctx.Done():
		return nil, errClosed
	}
}

func (m *Mesh) setWords(s *host.Segment) bool {
	id := wordsIDOf(s)
	m.mu.Lock()
	if m.closed || m.words.Load() != nil || id == 0 {
		m.mu.Unlock()
		return false
	}
	m.seg.wordsID().Store(id) // before anybody can hold them for ours
	m.words.Store(s)
	close(m.haveWords)
	dontFork(s.Bytes())
	runtime.AddCleanup(m, func(s *host.Segment) { _ = s.Close() }, s)
	var tell []*Peer
	for _, p := range m.peers {
		if p.mem != nil && !p.mem.hasWords && !p.over.Load() {
			p.mem.hasWords = true
			tell = append(tell, p)
		}
	}
	m.mu.Unlock()
	for _, p := range tell {
		m.passWords(p)
	}
	return true
}

func wordsIDOf(s *host.Segment) uint64 { return host.Word64(s.Bytes(), WordsBytes).Load() }

// passWords sends the words to a peer that was linked before they existed.
func (m *Mesh) passWords(p *Peer) {
	m.spawn(func() { m.passWordsNow(p) })
}

func (m *Mesh) passWordsNow(p *Peer) {
	if err := m.sendWords(p); err != nil && !p.over.Load() && m.ctx.Err() == nil {
		m.log.Warn("mesh: could not pass the host's shared words on", "to", p.name, "error", err)
	}
}

// takeWords maps words that a peer passed, unless this process has some already. It owns fd.
func (m *Mesh) takeWords(fd int, from string) {
	s, err := host.OpenSegment(fd, wordsSize, true)
	if err != nil {
		m.log.Warn("mesh: the host's shared words are of no use", "from", from, "error", err)
		return
	}
	if !m.setWords(s) {
		if own, id := m.seg.wordsID().Load(), wordsIDOf(s); own != 0 && id != own {
			m.log.Warn("mesh: two sets of shared words on one host: data between them goes in frames", "from", from)
		}
		s.Close()
	}
}

func (m *Mesh) sendWords(p *Peer) error {
	ctx, cancel := context.WithTimeout(m.ctx, handshakeTime)
	defer cancel()
	c, err := m.dialUnix(ctx, p.a)
	if err != nil {
		return err
	}
	defer c.Close()
	defer m.guard(c)()
	t := m.newTalk(c, forWords, p.nonce)
	if err := t.dialled(m.addr); err != nil {
		return err
	}
	if err := t.sendFds(msgMemory, nil, m.words.Load().FD()); err != nil {
		return err
	}
	_, _, err = t.ready(false, noLink)
	return err
}

// acceptWords is the other side of it.
func (m *Mesh) acceptWords(t *talk) error {
	_, err := t.receive(msgMemory)
	fds := t.fds
	t.fds = nil
	if err != nil || len(fds) != 1 {
		closeFds(fds)
		return errors.Join(err, fmt.Errorf("mesh: words message with %d descriptors", len(fds)))
	}
	m.mu.Lock()
	if p := m.peers[t.addr.Nonce]; p != nil && p.mem != nil {
		p.mem.hasWords = true
	}
	m.mu.Unlock()
	m.takeWords(fds[0], t.addr.Name)
	_, _, err = t.ready(true, noLink)
	return err
}

func noLink() (recv, gen uint64) { return 0, 0 }

func (m *Mesh) dialUnix(ctx context.Context, a *Address) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", a.Unix)
	if err != nil {
		return nil, err
	}
	if _, err := sameUser(c); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

var errClosed = fmt.Errorf("mesh: it is closed: %w", os.ErrClosed)

package rendezvous

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var requests = []struct {
	kind    kind
	request request
}{
	{kindGet, request{keys: []string{"key"}}},
	{kindSet, request{keys: []string{"key"}, value: []byte("value")}},
	{kindSet, request{keys: []string{"key"}, value: []byte{}}},
	{kindWait, request{keys: []string{}}},
	{kindWait, request{keys: []string{"a", "", "c"}}},
	{kindAdd, request{turn: 7, keys: []string{"n"}, delta: -3}},
	{kindCAS, request{turn: 1 << 40, keys: []string{"k"}, expected: []byte("old"), value: []byte("new")}},
	{kindCancel, request{}},
}

func TestWireRoundTrip(t *testing.T) {
	for _, want := range requests {
		b := frame{id: 9, kind: want.kind, body: want.request.append(nil, want.kind)}.append(nil)
		f, err := readFrame(bytes.NewReader(b))
		require.NoError(t, err)
		require.EqualValues(t, 9, f.id)
		got, err := parseRequest(f.kind, f.body)
		require.NoError(t, err)
		require.Equal(t, want.request.keys, got.keys)
		require.True(t, bytes.Equal(want.request.value, got.value) && bytes.Equal(want.request.expected, got.expected))
		require.Equal(t, want.request.turn, got.turn)
		require.Equal(t, want.request.delta, got.delta)
		for n := range b { // no prefix of a frame is one
			_, err := readFrame(bytes.NewReader(b[:n]))
			require.Error(t, err)
		}
	}
	h := hello{version: 3, id: identity{1, 2, 3}}
	got, err := parseHello(h.append(nil))
	require.NoError(t, err)
	require.Equal(t, h, got)
}

// A length costs nothing before its bytes are there.
func TestFrameLengthIsNotTrusted(t *testing.T) {
	head := []byte{0, 0xff, 0xff, 0xff, 0, 0, 0, 1, byte(kindSet)}
	allocated := testing.AllocsPerRun(10, func() {
		_, err := readFrame(bytes.NewReader(head))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	})
	require.Less(t, allocated, 40.0)
	_, err := readFrame(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1}))
	require.ErrorIs(t, err, errBadFrame)
}

func FuzzFrame(f *testing.F) {
	for _, r := range requests {
		f.Add(frame{id: 1, kind: r.kind, body: r.request.append(nil, r.kind)}.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, err := readFrame(bytes.NewReader(b))
		if err != nil {
			return
		}
		_ = parseFailed(fr.body)
		q, err := parseRequest(fr.kind, fr.body)
		if err == nil && !bytes.Equal(q.append(nil, fr.kind), fr.body) {
			t.Fatalf("%v does not encode to what it was decoded from", q)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(hello{version: 1}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = parseHello(b) })
}

func FuzzFile(f *testing.F) {
	f.Add(encodeFile("key", []byte("value")), "key")
	f.Fuzz(func(t *testing.T, b []byte, key string) {
		v, err := decodeFile(b, key)
		if err == nil && !bytes.Equal(encodeFile(key, v), b) {
			t.Fatal("does not encode to what it was decoded from")
		}
	})
}

// FuzzServer feeds a server whatever comes, in both protocols.
func FuzzServer(f *testing.F) {
	var ours []byte
	for _, r := range requests {
		ours = frame{id: 1, kind: r.kind, body: r.request.append(nil, r.kind)}.append(ours)
	}
	f.Add(append(hello{version: wireVersion}.append(nil), ours...))
	torch := []byte{torchValidate, 0xce, 0xf7, 0x85, 0x3c}
	for q := byte(torchSet); q <= torchBarrier; q++ {
		torch = append(torch, q)
		switch q {
		case torchGet, torchDelete, torchQueuePop, torchQueueLen:
			torch = torchBytes(torch, []byte("/k"))
		case torchCheck, torchWait, torchMultiGet:
			torch = torchKeys(torch, []string{"/k", "/l"})
		case torchSet, torchAppend, torchQueuePush:
			torch = torchBytes(torchBytes(torch, []byte("/k")), []byte("1"))
		case torchMultiSet:
			torch = torchBytes(torchBytes(torchInt(torch, 1), []byte("/k")), []byte("1"))
		case torchCompareSet:
			torch = torchBytes(torchBytes(torchBytes(torch, []byte("/k")), nil), []byte("1"))
		case torchAdd, torchBarrier:
			torch = torchInt(torchBytes(torch, []byte("/n")), 1)
		case torchPing:
			torch = append(torch, 1, 2, 3, 4)
		}
	}
	f.Add(torch)
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &Server{table: newTable(), conns: map[net.Conn]struct{}{}, turns: map[identity]*turn{}}
		near, far := net.Pipe()
		c := &serverConn{server: s, conn: far, in: bufio.NewReader(far), pending: map[uint32]func(){}, gone: make(chan struct{})}
		done := make(chan struct{})
		go func() {
			_ = c.serve()
			close(c.gone)
			_ = far.Close()
			c.tasks.Wait()
			close(done)
		}()
		go func() { _, _ = io.Copy(io.Discard, near) }()
		_ = near.SetWriteDeadline(time.Now().Add(10 * time.Second))
		_, _ = near.Write(b)
		_ = near.Close()
		<-done
		require.Empty(t, s.table.waiters)
		require.Empty(t, s.table.arrived)
		require.GreaterOrEqual(t, s.table.size, int64(0))
	})
}

func TestTableBounds(t *testing.T) {
	tab := newTable()
	tab.limit = 1000
	require.NoError(t, tab.set("a", make([]byte, 500)))
	require.ErrorIs(t, tab.set("b", make([]byte, 500)), ErrFull)
	require.NoError(t, tab.set("a", make([]byte, 700)))
	require.NoError(t, tab.set("a", nil))
	require.NoError(t, tab.push("q", make([]byte, 500)))
	require.ErrorIs(t, tab.push("q", make([]byte, 500)), ErrFull)
	_, n := tab.pop("q")
	require.Equal(t, 1, n)
	require.True(t, tab.remove("a"))
	require.Zero(t, tab.size)
}

// A client that comes and goes leaves little behind.
func TestTurnsAreForgotten(t *testing.T) {
	s := &Server{turns: map[identity]*turn{}}
	stays := s.enter(identity{0xff})
	for i := range 3 * turnsKept {
		id := identity{byte(i), byte(i >> 8)}
		s.leave(id, s.enter(id))
	}
	require.LessOrEqual(t, len(s.turns), turnsKept+1)
	require.Same(t, stays, s.turns[identity{0xff}])
}

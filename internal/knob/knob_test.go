package knob

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bare unsets every knob for the test.
func bare(t *testing.T) {
	t.Helper()
	for _, s := range List() {
		for _, name := range append([]string{s.Name}, s.Aliases...) {
			t.Setenv(name, "") // restores it afterwards
		}
	}
}

func TestTable(t *testing.T) {
	bare(t)
	seen := map[string]bool{}
	for _, s := range List() {
		require.False(t, seen[s.Name], s.Name)
		seen[s.Name] = true
		require.NotEmpty(t, s.Doc, s.Name)
		require.NotEmpty(t, s.Allowed, s.Name)
		require.NotEmpty(t, s.Type, s.Name)
		require.NoError(t, s.Err, "the default of %s can be used", s.Name)
		require.Equal(t, s.Default, s.Value)
		require.Empty(t, s.From)
	}
	for _, name := range []string{
		"SERRY_LOG", "SERRY_RENDEZVOUS", "SERRY_PEERS", "SERRY_REJOIN", "SERRY_SOCKET_IFNAME", "SERRY_SOCKET_DIR",
		"SERRY_SHM_BYTES", "SERRY_LINKS", "SERRY_HEARTBEAT", "SERRY_HEARTBEAT_LIMIT", "SERRY_RETAIN_BYTES", "SERRY_DEPTH",
		"SERRY_CRC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
	} {
		require.True(t, seen[name], name)
	}
}

func TestDefaults(t *testing.T) {
	bare(t)
	equal(t, "warn", Log)
	equal(t, 64<<20, ShmBytes)
	equal(t, 64<<10, RetainBytes)
	equal(t, 100*time.Millisecond, Heartbeat)
	equal(t, time.Second, HeartbeatLimit)
	equal(t, 4, Depth)
	equal(t, true, CRC)
	equal(t, 0, Rejoin)
	equal(t, "auto", Links)
	equal(t, nil, Peers)
	_, set, err := Rank.Lookup()
	require.NoError(t, err)
	require.False(t, set)
}

func equal[T any](t *testing.T, want T, k *Knob[T]) {
	t.Helper()
	got, err := k.Get()
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestValues(t *testing.T) {
	bare(t)
	t.Setenv("SERRY_SHM_BYTES", "3 MiB")
	equal(t, 3<<20, ShmBytes)
	t.Setenv("SERRY_RETAIN_BYTES", "0")
	equal(t, 0, RetainBytes)
	t.Setenv("SERRY_LOG", "INFO")
	equal(t, "info", Log)
	t.Setenv("SERRY_CRC", "0")
	equal(t, false, CRC)
	t.Setenv("SERRY_HEARTBEAT", "1.5s")
	equal(t, 1500*time.Millisecond, Heartbeat)
	t.Setenv("SERRY_PEERS", "a:1, b:2,,")
	equal(t, []string{"a:1", "b:2"}, Peers)
	t.Setenv("RANK", "0")
	v, set, err := Rank.Lookup()
	require.NoError(t, err)
	require.True(t, set)
	require.Zero(t, v)
	require.Equal(t, "0", Getenv("RANK"))
	require.Panics(t, func() { Getenv("HOME") })
}

func TestAliases(t *testing.T) {
	bare(t)
	t.Setenv("GLOO_SOCKET_IFNAME", "eth2")
	equal(t, "eth2", SocketIfname)
	t.Setenv("NCCL_SOCKET_IFNAME", "eth1")
	equal(t, "eth1", SocketIfname)
	t.Setenv("SERRY_SOCKET_IFNAME", "eth0")
	equal(t, "eth0", SocketIfname)
	require.Equal(t, "eth2", Getenv("GLOO_SOCKET_IFNAME"))
	i := slices.IndexFunc(List(), func(s Setting) bool { return s.Name == "SERRY_SOCKET_IFNAME" })
	require.Equal(t, "SERRY_SOCKET_IFNAME", List()[i].From)
}

func TestBadValuesNameAllThree(t *testing.T) {
	for kv, want := range map[string]string{
		"SERRY_LOG=loud":                       `knob: SERRY_LOG="loud": want debug, info, warn, error or off`,
		"SERRY_LINKS=rdma":                     `knob: SERRY_LINKS="rdma": want auto, shm or tcp`,
		"SERRY_CRC=maybe":                      `knob: SERRY_CRC="maybe": want on or off (1, 0, true, false, yes, no)`,
		"SERRY_DEPTH=0":                        `knob: SERRY_DEPTH="0": want a number from 1 to 64`,
		"RANK=-1":                              `knob: RANK="-1": want a number from 0 to 1048576`,
		"MASTER_PORT=70000":                    `knob: MASTER_PORT="70000": want a number from 1 to 65535`,
		"SERRY_HEARTBEAT=100":                  `knob: SERRY_HEARTBEAT="100": want a time with its unit, such as 100ms or 1.5s, from 1ms to 1m0s`,
		"SERRY_SHM_BYTES=64M":                  `knob: SERRY_SHM_BYTES="64M": want a number of bytes, KiB, MiB or GiB, such as 65536 or 64KiB, from 1MiB to 1024GiB`,
		"SERRY_SHM_BYTES=1KiB":                 `from 1MiB to 1024GiB`,
		"SERRY_SHM_BYTES=-5":                   `from 1MiB to 1024GiB`,
		"SERRY_RETAIN_BYTES=99GiB":             `from 0 to 1GiB`,
		"SERRY_RETAIN_BYTES=99999999999999GiB": `from 0 to 1GiB`,
	} {
		t.Run(kv, func(t *testing.T) {
			bare(t)
			name, value, _ := strings.Cut(kv, "=")
			t.Setenv(name, value)
			i := slices.IndexFunc(List(), func(s Setting) bool { return s.Name == name })
			require.ErrorContains(t, List()[i].Err, want)
			require.Contains(t, Check(), List()[i].Err)
			var e *Error
			require.True(t, errors.As(List()[i].Err, &e))
			require.Equal(t, name, e.Name)
		})
	}
}

// Values that can be used alone, but not with each other.
func TestValuesTogether(t *testing.T) {
	bare(t)
	require.Empty(t, together())
	t.Setenv("SERRY_HEARTBEAT", "600ms")
	require.EqualError(t, together()[0], `knob: SERRY_HEARTBEAT="600ms": want at most half of SERRY_HEARTBEAT_LIMIT, which is 1s`)
	t.Setenv("SERRY_HEARTBEAT_LIMIT", "1.1s")
	require.EqualError(t, together()[0], `knob: SERRY_HEARTBEAT_LIMIT="1.1s": want at least twice SERRY_HEARTBEAT, which is 600ms`)
	require.Equal(t, together(), Check())
	t.Setenv("SERRY_HEARTBEAT_LIMIT", "1.2s")
	require.Empty(t, together())
	t.Setenv("SERRY_HEARTBEAT_LIMIT", "soon")
	require.Len(t, Check(), 1, "said once")
}

func TestMisspeltNames(t *testing.T) {
	errs := unknown([]string{
		"SERRY_LOG=info", "SERRY_LOOG=info", "PATH=x", "SERRY_A=1", "SERRY_TEST_PYTHON=x", "SERRY_HARNESS_ARGS=x",
	})
	require.Len(t, errs, 2)
	require.EqualError(t, errs[1], "knob: SERRY_LOOG is set and means nothing: see serry env for the names")
	require.NotPanics(t, func() { Check() })
	_ = os.Environ()
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 1000: "1000", 1024: "1KiB", 1536: "1536", 64 << 20: "64MiB", 5 << 30: "5GiB"} {
		require.Equal(t, want, Bytes(n))
		back, ok := parseBytes(want)
		require.True(t, ok)
		require.Equal(t, n, back)
	}
	_, ok := parseBytes("xB")
	require.False(t, ok)
}

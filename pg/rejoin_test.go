package pg

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serry-project/serry/internal/harness"

	"github.com/stretchr/testify/require"
)

// TestReplaceTheLiving starts a replacement of a rank that lives: it is never refused, and the old one is out.
func TestReplaceTheLiving(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		for _, rank := range []int{0, 1} {
			t.Run(fmt.Sprint(l, rank), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				ps := loops(t, 3, loopArgs{Dir: dir, Links: l})
				p := loopArgs{Rank: rank, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
				_, err := p.Line("epoch ", 20*time.Second)
				require.NoError(t, err)
				line, err := ps[rank].Line("error ", 10*time.Second)
				require.NoError(t, err)
				require.Contains(t, line, "evicted (slot")
				require.Contains(t, line, "is replaced by a new process")
				other := ps[2]
				line, err = other.Line("epoch 3 ", 10*time.Second)
				require.NoError(t, err)
				require.Contains(t, line, "[0 1 2]")
			})
		}
	}
}

// TestExtraRanks grows a world of 2 up to its capacity, through the rendezvous and through an invitation.
func TestExtraRanks(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ps := loops(t, 2, loopArgs{Dir: dir, Links: l, Capacity: 4})
			invite, err := ps[1].Line("invite ", time.Second)
			require.NoError(t, err)
			ps = append(ps, loopArgs{Rank: -1, Size: 2, Capacity: 4, Dir: dir, Links: l, Rejoin: true}.start(t))
			line, err := ps[2].Line("joined ", 20*time.Second)
			require.NoError(t, err)
			require.Contains(t, line, "as 2")
			ps = append(ps, loopArgs{Rank: -1, Dir: dir, Links: l, Rejoin: true, Invite: invite}.start(t))
			line, err = ps[3].Line("joined ", 20*time.Second)
			require.NoError(t, err)
			require.Contains(t, line, "as 3")
			for _, p := range ps {
				activeAs(t, p, 10*time.Second, 0, 1, 2, 3)
			}
			for _, rank := range []int{-1, 4} {
				full := loopArgs{Rank: rank, Dir: dir, Links: l, Rejoin: true}.start(t)
				code, err := full.Wait(20 * time.Second)
				require.Error(t, err)
				require.Equal(t, 1, code)
				require.Contains(t, err.Error(), fmt.Sprintf("rank %d cannot join", rank))
				require.Contains(t, err.Error(), "capacity")
				require.Contains(t, err.Error(), "refused")
			}
			// One dies, and its place is free.
			ps[3].Signal(syscall.SIGKILL)
			activeAs(t, ps[0], 10*time.Second, 0, 1, 2)
			p := loopArgs{Rank: -1, Dir: dir, Links: l, Rejoin: true}.start(t)
			line, err = p.Line("joined ", 20*time.Second)
			require.NoError(t, err)
			require.Contains(t, line, "as 3")
		})
	}
}

// TestTwoComeAtOnce kills two of four and starts both again at once, several times.
func TestTwoComeAtOnce(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ps := loops(t, 4, loopArgs{Dir: dir, Links: l})
			all := append([]*harness.Proc{}, ps...)
			said(t, &all)
			for range 3 {
				for _, r := range []int{1, 2} {
					ps[r].Signal(syscall.SIGKILL)
				}
				for _, r := range []int{1, 2} {
					_, _ = ps[r].Wait(5 * time.Second)
				}
				for _, r := range []int{1, 2} {
					ps[r] = loopArgs{Rank: r, Size: 4, Dir: dir, Links: l, Rejoin: true}.start(t)
					all = append(all, ps[r])
				}
				for _, r := range []int{1, 2} {
					activeAs(t, ps[r], 20*time.Second, 0, 1, 2, 3)
				}
			}
		})
	}
}

// TestJoinersDie kills joiners at any moment: the members go on, and the one that lives gets in.
func TestJoinersDie(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	for _, l := range []string{"auto", "tcp"} {
		var waits []time.Duration
		for range 10 {
			waits = append(waits, time.Duration(rnd.IntN(120))*time.Millisecond)
		}
		t.Run(l, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ps := loops(t, 3, loopArgs{Dir: dir, Links: l})
			all := append([]*harness.Proc{}, ps...)
			said(t, &all)
			ps[2].Signal(syscall.SIGKILL)
			for _, d := range waits {
				p := loopArgs{Rank: 2, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
				all = append(all, p)
				time.Sleep(d)
				p.Signal(syscall.SIGKILL)
			}
			p := loopArgs{Rank: 2, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
			all = append(all, p)
			_, err := p.Line("epoch ", 20*time.Second)
			require.NoError(t, err, "joiners died after %v", waits)
			for _, q := range ps[:2] {
				n := len(q.Lines())
				_, err := q.Wait(20 * time.Millisecond)
				require.ErrorContains(t, err, "still runs", n)
			}
		})
	}
}

// TestJoinOverTwoHosts: a rank of the other host is replaced, and one more comes there.
func TestJoinOverTwoHosts(t *testing.T) {
	hosts := harness.Hosts(t, 2)
	dir := t.TempDir()
	start := func(rank int, host int, rejoin bool) *harness.Proc {
		return loopArgs{Rank: rank, Size: 2, Capacity: 4, Dir: dir, Rejoin: rejoin, Listen: hosts[host].IP}.start(t, hosts[host].In())
	}
	ps := []*harness.Proc{start(0, 0, false), start(1, 1, false)}
	for _, p := range ps {
		_, err := p.Line("epoch 1 ", 20*time.Second)
		require.NoError(t, err)
	}
	// Two come to a host of which no member is, or was.
	ps = append(ps, start(2, 1, true), start(3, 1, true))
	for _, p := range ps {
		activeAs(t, p, 20*time.Second, 0, 1, 2, 3)
	}
	ps[1].Signal(syscall.SIGKILL)
	activeAs(t, ps[0], 10*time.Second, 0, 2, 3)
	p := start(1, 0, true) // comes back on another host
	_, err := p.Line("epoch ", 20*time.Second)
	require.NoError(t, err)
	for _, p := range ps {
		require.False(t, strings.Contains(p.Stderr(), "BUG"))
	}
}

// TestAllGone: when all members are dead a replacement says so, and does not wait for ever.
func TestAllGone(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"auto", "tcp"} {
		t.Run(l, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for _, p := range loops(t, 3, loopArgs{Dir: dir, Links: l}) {
				p.Signal(syscall.SIGKILL)
			}
			p := loopArgs{Rank: 1, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
			q := loopArgs{Rank: 2, Size: 3, Dir: dir, Links: l, Rejoin: true}.start(t)
			for _, p := range []*harness.Proc{p, q} {
				code, err := p.Wait(20 * time.Second)
				require.Equal(t, 1, code)
				require.ErrorContains(t, err, "all members are gone: none of the 3 whose addresses are known")
			}
		})
	}
}

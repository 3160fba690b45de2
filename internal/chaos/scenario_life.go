package chaos

import (
	"encoding/json"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

// onePeer kills ranks in all_to_all, when they have sent to one peer and not to the next.
func onePeer(r *runner, n int) error {
	r.edit = func(a *RankArgs) { a.Tap = true }
	err := r.within(n, r.cfg.PerWorld, func(int) error {
		v := r.victim()
		m, marks := r.w.Live[v], r.marks()
		if err := m.Tell("onepeer"); err != nil {
			return r.broken("", "%v", err)
		}
		died, err := r.dies(m, marks[v], "all_to_all, to one peer")
		if err != nil || !died {
			return err
		}
		m.counted = r.res.fault("all_to_all to one peer", v)
		if err := r.survive(marks, "all_to_all to one peer", v); err != nil {
			return err
		}
		return r.replace(v)
	}, nil)
	r.res.atLeast("kills", float64(n), float64(r.res.Faults), "")
	return err
}

// environment founds worlds by torch's variables, with the store in rank 0, kills rank 0, and lets its replacement in by
// SERRY_PEERS alone.
func environment(r *runner, n int) error {
	r.edit = func(a *RankArgs) { a.FromEnv = true }
	joined := 0
	err := r.within(n, 1, func(int) error {
		m, marks := r.w.Live[0], r.marks()
		m.counted = r.res.fault("rank 0 with the store", 0)
		r.w.Kill(m)
		if err := r.survive(marks, "rank 0 with the store", 0); err != nil {
			return err
		}
		invite, err := r.ask(r.w.Live[1], "invite")
		if err != nil {
			return err
		}
		r.env = func(rank int) []string {
			return []string{fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", r.cfg.Ranks), "SERRY_REJOIN=1", "SERRY_PEERS=" + invite}
		}
		if err := r.replace(0); err != nil {
			return err
		}
		joined++
		return nil
	}, nil)
	r.res.atLeast("replacements let in by SERRY_PEERS", float64(n), float64(joined), "")
	return err
}

// torchEnv is the environment of founders as torch has it: rank 0 serves the store.
func (r *runner) torchEnv() (func(rank int) []string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return nil, err
	}
	return func(rank int) []string {
		return []string{fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("WORLD_SIZE=%d", r.cfg.Ranks), "MASTER_ADDR=127.0.0.1", fmt.Sprintf("MASTER_PORT=%d", port)}
	}, nil
}

// ask gives an order that is answered with a line that begins with it.
func (r *runner) ask(m *Member, order string) (answer string, err error) {
	from := m.Count()
	if err := m.Tell("%s", order); err != nil {
		return "", r.broken("", "%v", err)
	}
	err = r.find(m, from, patience, func(line string) (ok bool) {
		answer, ok = strings.CutPrefix(line, order+" ")
		return ok
	})
	if err != nil {
		return "", r.broken("P5", "%s does not answer %s: %s", m.Name, order, firstLine(err))
	}
	return answer, nil
}

// cycles kills ranks and has them leave, in turn, and looks at what rank 0, which stays, holds.
func cycles(r *runner, n int) error {
	warm := min(20, n/2)
	var first, last Holding
	stats := func() (h Holding, err error) {
		s, err := r.ask(r.w.Live[0], "stats")
		if err != nil {
			return h, err
		}
		return h, json.Unmarshal([]byte(s), &h)
	}
	err := r.within(n, n, func(i int) (err error) {
		v := 1 + i%(r.cfg.Ranks-1)
		m, marks := r.w.Live[v], r.marks()
		if i%2 == 0 {
			m.counted = r.res.fault("kill", v)
			r.w.Kill(m)
		} else {
			r.res.fault("leave", v)
			r.w.Deed(m, history.Leave, true)
			if err := m.Tell("leave"); err != nil {
				return r.broken("", "%v", err)
			}
			if !r.wait(m, hang) {
				return r.broken("P5", "%s does not leave", m.Name)
			}
		}
		if err := r.survive(marks, "cycle", v); err != nil {
			return err
		}
		if err := r.replace(v); err != nil {
			return err
		}
		if i == warm-1 {
			first, err = stats()
		} else if i == n-1 {
			// What is there for a moment only, a dial say, has time to end.
			for try := 0; err == nil && (try == 0 || try < 40 && (last.Goroutines > first.Goroutines || last.Descriptors > first.Descriptors)); try++ {
				if try > 0 {
					time.Sleep(50 * time.Millisecond)
				}
				last, err = stats()
			}
		}
		return err
	}, nil)
	r.res.atLeast("cycles", float64(n), float64(r.res.Faults), "")
	r.res.atMost("goroutines more", 0, float64(last.Goroutines-first.Goroutines), "")
	r.res.atMost("descriptors more", 0, float64(last.Descriptors-first.Descriptors), "")
	r.res.atMost("memfds more", 0, float64(last.Memfds-first.Memfds), "")
	r.res.atMost("mappings more", 0, float64(last.Mappings-first.Mappings), "")
	r.res.atMost("resident memory more", 8, float64(last.Resident-first.Resident)/(1<<20), "MiB")
	r.res.note("rank 0 after %d cycles: %+v", warm, first)
	r.res.note("rank 0 after %d cycles: %+v", n, last)
	r.res.note("each rank that leaves, also at the end, looks for goroutines that are left (goleak)")
	return err
}

const (
	collectFor = 10 * time.Second
	beatEvery  = 10 * time.Millisecond
)

// collecting has the callers of a rank wait while it collects garbage without a pause, and looks when its agent sends
// heartbeats to another host.
func collecting(r *runner, n int) error {
	r.edit = func(a *RankArgs) { a.Tap, a.Limit, a.Wait, a.Late = true, 10*beatEvery, collectFor, time.Minute }
	var late, calm []int64 // while garbage is collected, and before
	err := r.within(n, 1, func(int) error {
		r.res.fault("gc")
		for _, m := range r.w.Live {
			if !r.wait(m, patience) {
				return r.broken("P5", "%s does not end", m.Name)
			}
		}
		for _, line := range r.w.Live[0].Lines() {
			if rest, ok := strings.CutPrefix(line, "beats "); ok {
				var beats []int64
				if err := json.Unmarshal([]byte(rest), &beats); err != nil {
					return err
				}
				for i := 2; i < len(beats); i++ { // the first is when it began
					d := max(0, beats[i]-beats[i-1]-int64(beatEvery))
					if beats[i-1] > beats[0] {
						late = append(late, d)
					} else {
						calm = append(calm, d)
					}
				}
			}
		}
		return nil
	}, nil)
	m := millis(late)
	r.res.atLeast("heartbeats looked at", 100, float64(m.Count), "")
	r.res.atMost("the agent's heartbeats late, the longest", 5, m.Max, "ms")
	c := millis(calm)
	r.res.note("heartbeats late: p50 %.2f ms, p99 %.2f ms, longest %.2f ms; before, without a collection: %.2f, %.2f, %.2f ms (every %v, for %v each)",
		m.P50, m.P99, m.Max, c.P50, c.P99, c.Max, beatEvery, collectFor/2)
	return err
}

// collect is the rank of that: rank 0's goroutines wait, in an operation and for messages that do not come, and in the
// second half of the time one collects garbage; the others come to the operation at the end.
func (r *rank) collect() error {
	r.say("begins 0")
	if r.Rank != 0 {
		time.Sleep(r.Wait)
	}
	var wait sync.WaitGroup
	var began int64
	end := time.Now().Add(r.Wait)
	if r.Rank == 0 {
		for tag := range uint32(8) {
			wait.Go(func() { _ = r.w.Recv(r.ctx, pg.U8(make([]byte, 8)), r.Ranks-1, tag) })
		}
		wait.Go(func() {
			time.Sleep(r.Wait / 2)
			began = harness.Mono()
			for time.Now().Before(end) {
				runtime.GC()
			}
		})
	}
	if _, err := r.w.Barrier(r.ctx); err != nil {
		return err
	}
	if r.Rank == r.Ranks-1 {
		for tag := range uint32(8) {
			if err := r.w.Send(r.ctx, pg.U8(make([]byte, 8)), 0, tag); err != nil {
				return err
			}
		}
	}
	wait.Wait()
	if _, err := r.w.Barrier(r.ctx); err != nil {
		return err
	}
	if r.Rank == 0 {
		r.faults.mu.Lock()
		defer r.faults.mu.Unlock()
		b, err := json.Marshal(append([]int64{began}, r.faults.beats...))
		if err != nil {
			return err
		}
		r.say("beats %s", b)
	}
	return nil
}

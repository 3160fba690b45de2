package etcd

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/witness/etcdtest"
)

// half runs the machine of one of two ranks, on hosts of their own, that have lost each other, until it has a view without
// the other or is over. It is what fault/agent does, for one event.
func half(ctx context.Context, w *Etcd, slot int, limit time.Duration) (on bool, why string) {
	view := fault.View{Epoch: 1, Size: 2, Capacity: 2}
	for s := range 2 {
		view.Members = append(view.Members, fault.Member{ID: fault.ID{Slot: s, Inc: 1}, Nonce: fault.Nonce{byte(s + 1)}, Host: uint64(s + 1)})
	}
	begin := time.Now()
	now := func() fault.Time { return time.Since(begin) + 1 }
	m, effs := fault.New(fault.Config{Self: view.Members[slot].ID, View: view, Witness: true, WitnessLimit: limit}, now())
	effs = append(effs, m.Step(now(), fault.Silent{ID: view.Members[1-slot].ID})...)
	events := make(chan fault.Event, 16)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tick := time.NewTimer(time.Hour)
	defer tick.Stop()
	for {
		for len(effs) > 0 {
			e := effs[0]
			effs = effs[1:]
			switch e := e.(type) {
			case fault.Close:
				var gs []fault.GroupDone
				for _, g := range e.Groups {
					gs = append(gs, fault.GroupDone{Group: g, Done: []fault.Done{{Slot: slot, Seq: 7}}, Issued: 8})
				}
				effs = append(effs, m.Step(now(), fault.Closed{Ballot: e.Ballot, Groups: gs})...)
			case fault.AskWitness:
				wg.Go(func() {
					var ev fault.Witnessed
					held, err := w.Swap(ctx, e.Old, e.New)
					if ev.Held = held; err != nil {
						ev.Err = err.Error()
					}
					select {
					case events <- ev:
					case <-ctx.Done():
					}
				})
			case fault.Timer:
				tick.Reset(max(e.At-now(), 0))
				if e.At == 0 {
					tick.Stop()
				}
			case fault.Install:
				return len(e.View.Members) == 1, e.Why
			case fault.Evicted:
				return false, e.Why
			case fault.NoQuorum:
				return false, e.Why
			}
		}
		select {
		case ev := <-events:
			effs = m.Step(now(), ev)
		case <-tick.C:
			effs = m.Step(now(), fault.Tick{})
		case <-ctx.Done():
			return false, ctx.Err().Error()
		}
	}
}

// TestHalves lets both halves of many worlds ask at once: one of them goes on, and one only.
func TestHalves(t *testing.T) {
	url := etcdtest.URL(start(t, 1))
	ctx := within(t, 5*time.Minute)
	won := map[int]int{}
	for i := range 20 {
		name := fmt.Sprintf("world-%d", i)
		a, b := open(t, url, name), open(t, url, name)
		require.NoError(t, a.Create(ctx, fault.FirstVote()))
		var on [2]bool
		var why [2]string
		var wg sync.WaitGroup
		for s, w := range []*Etcd{a, b} {
			wg.Go(func() { on[s], why[s] = half(ctx, w, s, time.Minute) })
		}
		wg.Wait()
		require.NotEqual(t, on[0], on[1], "both: %q, %q", why[0], why[1])
		lost := 0
		if on[0] {
			lost = 1
		}
		won[1-lost]++
		require.Contains(t, why[lost], fmt.Sprintf("the witness gave its vote for epoch 2 to ranks [%d]", 1-lost))
	}
	t.Logf("rank 0 went on %d times, rank 1 %d times", won[0], won[1])

	w := open(t, url, "nobody-made-it")
	for s := range 2 {
		on, why := half(ctx, w, s, time.Second)
		require.False(t, on)
		require.True(t, strings.Contains(why, "it has no record of this world"), why)
	}
}

package main

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/serry-project/serry/examples/moe/serve"

	"github.com/stretchr/testify/require"
)

// acting is a watcher that has seen a run: two requests on four ranks, rank 2 killed and replaced.
type acting struct {
	*watcher
	kills   []*kill
	rejoins []rejoin
	begin   time.Time
}

func (a *acting) at(ms int) time.Time { return a.begin.Add(time.Duration(ms) * time.Millisecond) }

func (a *acting) tell(ms int, e serve.Event) {
	e.Time = a.at(ms).UnixNano()
	a.event(e)
}

func acted(t *testing.T) *acting {
	t.Helper()
	want := []serve.Answer{{Text: []byte("abc"), Hashes: []uint64{1, 2, 3}}, {Text: []byte("d"), Hashes: []uint64{4, 5}}}
	var out bytes.Buffer
	a := &acting{watcher: newWatcher(newScreen(&out, true), []string{"p", "q"}, want, 4, 5), begin: time.Unix(1000, 0)}
	for r := range 4 {
		a.tell(r, serve.Event{Kind: "step", Rank: r, Epoch: 1, Active: []int{0, 1, 2, 3}})
	}
	a.tell(5, serve.Event{Kind: "token", Rank: 2, Request: 0, Pos: 0, Token: 'a', Hash: 1})
	a.tell(6, serve.Event{Kind: "token", Rank: 1, Request: 1, Pos: 0, Token: 'd', Hash: 4})
	for _, r := range []int{0, 1, 3} {
		a.tell(20+r, serve.Event{Kind: "view", Rank: r, Epoch: 2, Active: []int{0, 1, 3}})
		a.tell(30+r, serve.Event{Kind: "step", Rank: r, Epoch: 2, Active: []int{0, 1, 3}})
		a.tell(40+r, serve.Event{Kind: "taken", Rank: r, Step: 9, Epoch: 2, From: 2, Requests: []int{0}})
	}
	a.tell(41, serve.Event{Kind: "token", Rank: 3, Request: 0, Pos: 0, Token: 'a', Hash: 1}) // again
	a.tell(42, serve.Event{Kind: "token", Rank: 3, Request: 0, Pos: 1, Token: 'b', Hash: 2})
	a.tell(50, serve.Event{Kind: "joining", Rank: 2})
	for r := range 4 {
		a.tell(60+r, serve.Event{Kind: "step", Rank: r, Epoch: 3, Active: []int{0, 1, 2, 3}})
	}
	a.tell(70, serve.Event{Kind: "token", Rank: 3, Request: 0, Pos: 2, Token: 'c', Hash: 3})
	a.tell(70, serve.Event{Kind: "token", Rank: 2, Request: 1, Pos: 1, Hash: 5})
	for r := range 4 {
		for i := range want {
			answer := want[i]
			a.tell(80, serve.Event{Kind: "answer", Rank: r, Request: i, Answer: &answer})
		}
		a.tell(81, serve.Event{Kind: "done", Rank: r, Stats: &serve.Stats{ExpertBytes: 10, AllExperts: 20, Rows: 4, RemoteRows: int64(r)}})
	}
	k := &kill{Rank: 2, Signal: "SIGKILL", Planned: true, Served: true, at: a.at(18), after: 1}
	require.True(t, k.finish(a.watcher))
	a.kills = []*kill{k}
	a.rejoins = []rejoin{{Rank: 2, JoinMs: 12, at: a.at(62)}}
	return a
}

func TestReport(t *testing.T) {
	a := acted(t)
	r := a.report(options{ranks: 4}, a.kills, a.rejoins)
	require.True(t, r.Identical, r.Differs)
	require.Equal(t, 5, r.Tokens)
	require.Equal(t, uint64(2), r.Kills[0].Epoch)
	require.InDelta(t, 2, r.Kills[0].DetectMs, 1e-9)  // rank 0 had the view at 20
	require.InDelta(t, 15, r.Kills[0].ResumeMs, 1e-9) // rank 3 had made its step at 33
	require.Equal(t, 1, r.Kills[0].Taken)
	require.InDelta(t, 0.065, r.Seconds, 1e-9)
	require.InDelta(t, 1/0.044, r.During, 1e-9)
	require.InDelta(t, 2/0.008, r.After, 1e-9)
	require.InDelta(t, 6.0/16, r.RemoteShare, 1e-9)
	require.InDelta(t, 0.75, r.Ranks[3].RemoteShare, 1e-9)
}

// Whatever is not as it should be makes the answers not identical.
func TestVerdict(t *testing.T) {
	wrong := serve.Answer{Text: []byte("abX"), Hashes: []uint64{1, 2, 3}}
	bits := serve.Answer{Text: []byte("abc"), Hashes: []uint64{1, 2, 9}}
	for want, e := range map[string]serve.Event{
		"request 0, byte 2, rank 1: the logits' bits":                    {Kind: "token", Rank: 1, Pos: 2, Token: 'c', Hash: 7},
		"two ranks gave different logits":                                {Kind: "token", Rank: 1, Pos: 2, Token: 'c', Hash: 8},
		"request 0, byte 2, rank 1: the byte":                            {Kind: "token", Rank: 1, Pos: 2, Token: 'x', Hash: 3},
		"byte 3, rank 1: the reference has only 3":                       {Kind: "token", Rank: 1, Pos: 3, Token: 'x', Hash: 3},
		"request 0: nobody said byte 3":                                  {Kind: "token", Rank: 1, Pos: 4, Token: 'x', Hash: 3},
		"rank 1: a byte for request 7":                                   {Kind: "token", Rank: 1, Request: 7},
		"rank 1: an answer to request -1":                                {Kind: "answer", Rank: 1, Request: -1},
		"rank 3: 3 bytes, the reference has 3; they differ from byte 2 ": {Kind: "answer", Rank: 3, Answer: &wrong},
		"request 0, at the end, rank 3: the logits' bits":                {Kind: "answer", Rank: 3, Answer: &bits},
		"rank 2: takes requests [1] of rank 2 over, another said [0]":    {Kind: "taken", Rank: 2, Step: 9, From: 2, Requests: []int{1}},
		"rank 2: epoch 2 has ranks [0 1], another said [0 1 3]":          {Kind: "step", Rank: 2, Epoch: 2, Active: []int{0, 1}},
	} {
		a := acted(t)
		a.tell(90, e)
		r := a.report(options{ranks: 4}, a.kills, a.rejoins)
		require.False(t, r.Identical)
		require.Contains(t, strings.Join(r.Differs, "\n"), want)
	}
	a := acted(t)
	a.hashes[0] = a.hashes[0][:1]
	require.Equal(t, []string{"request 0: nobody said byte 1"}, a.verdict())
	a = acted(t)
	a.procs[2].answers = 0
	require.Equal(t, []string{"rank 2 has given 0 answers of 2"}, a.verdict())
}

func TestUntilEndsWithItsCause(t *testing.T) {
	a := acted(t)
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	require.ErrorIs(t, a.until(ctx, "nothing", func() bool { return false }), cause)
	require.NoError(t, a.until(ctx, "what is there", func() bool { return true }))
	require.Empty(t, a.waits)
	_, _, ok := a.resumed(0, 3)
	require.False(t, ok)
}

// The timeline can be drawn of whatever there is.
func TestTimeline(t *testing.T) {
	for name, act := range map[string]func(a *acting){
		"all":          func(*acting) {},
		"no rejoin":    func(a *acting) { a.rejoins = nil },
		"nothing":      func(a *acting) { a.kills, a.rejoins, a.times = nil, nil, nil },
		"one byte":     func(a *acting) { a.kills, a.rejoins, a.times = nil, nil, a.times[:1] },
		"a long while": func(a *acting) { a.times[len(a.times)-1] = a.at(1e7) },
	} {
		t.Run(name, func(t *testing.T) {
			a := acted(t)
			act(a)
			rep := a.report(options{ranks: 4}, a.kills, a.rejoins)
			res, err := newResults(t.TempDir())
			require.NoError(t, err)
			require.NoError(t, res.write(a.watcher, rep))
		})
	}
	for _, c := range [][2]float64{{0.01, 1}, {1, 1}, {1.5, 2}, {3, 5}, {51, 100}, {700, 1000}} {
		require.Equal(t, c[1], nice(c[0]))
	}
	require.False(t, math.IsNaN(acted(t).rate(time.Unix(0, 0), time.Unix(0, 0))))
}

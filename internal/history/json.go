package history

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/serry-project/serry/internal/slots"
)

var (
	kindNames    = []string{Joined: "joined", View: "view", Lost: "lost", Made: "made", Issue: "issue", Return: "return", Ended: "ended"}
	opNames      = []string{Barrier: "barrier", AllReduce: "all_reduce", AllGather: "all_gather", Broadcast: "broadcast", AllToAll: "all_to_all", ReduceScatter: "reduce_scatter", Pair: "pair", Step: "step", Send: "send", Recv: "recv", Sub: "sub", Close: "close", Boundary: "boundary"}
	outcomeNames = []string{OK: "ok", RankLost: "rank_lost", SourceLost: "source_lost", Failed: "failed", Late: "late", Evicted: "evicted", NoQuorum: "no_quorum", AllGone: "all_gone", ClosedHere: "closed", Left: "left", Other: "other"}
	doneNames    = []string{Kill: "kill", Stop: "stop", Cut: "cut", Slow: "slow", Leave: "leave", Minority: "minority"}
)

func name(names []string, i int) string {
	if i < len(names) && names[i] != "" {
		return names[i]
	}
	return strconv.Itoa(i)
}

func (k Kind) String() string    { return name(kindNames, int(k)) }
func (o Op) String() string      { return name(opNames, int(o)) }
func (o Outcome) String() string { return name(outcomeNames, int(o)) }
func (d Done) String() string    { return name(doneNames, int(d)) }

// ParseOp is the operation of that name, 0 if there is none.
func ParseOp(s string) Op { return Op(max(0, slices.Index(opNames, s))) }

// AppendJSON appends the event as one line of JSON, with its newline. Fields that are zero are left out.
func (e *Event) AppendJSON(b []byte) []byte {
	b = strconv.AppendInt(append(b, `{"t":`...), e.Time, 10)
	b = append(append(append(b, `,"kind":"`...), e.Kind.String()...), '"')
	text := func(key, s string) {
		b = append(append(append(append(append(b, `,"`...), key...), `":"`...), s...), '"')
	}
	num := func(key string, v uint64) {
		if v != 0 {
			b = strconv.AppendUint(append(append(append(b, `,"`...), key...), `":`...), v, 10)
		}
	}
	if e.Op != 0 {
		text("op", e.Op.String())
	}
	if e.Outcome != 0 {
		text("outcome", e.Outcome.String())
	}
	num("group", e.Group)
	num("call", e.Call)
	num("seq", e.Seq)
	num("epoch", e.Epoch)
	num("sum", e.Sum)
	num("n", uint64(e.N))
	num("inc", uint64(e.Inc))
	num("size", uint64(e.Size))
	if e.Op.Local() {
		b = strconv.AppendInt(append(b, `,"peer":`...), int64(e.Peer), 10)
	}
	if !e.Set.Empty() {
		b = append(b, `,"set":[`...)
		for i, first := e.Set.Next(0), true; i >= 0; i, first = e.Set.Next(i+1), false {
			if !first {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(i), 10)
		}
		b = append(b, ']')
	}
	if e.Why != "" {
		w, _ := json.Marshal(e.Why)
		b = append(append(b, `,"why":`...), w...)
	}
	return append(b, '}', '\n')
}

type line struct {
	T                            int64
	Kind, Op, Outcome            string
	Group, Call, Seq, Epoch, Sum uint64
	N, Inc, Size                 uint32
	Peer                         int16
	Set                          []int
	Why                          string
}

// MarshalJSON is AppendJSON for package json.
func (e Event) MarshalJSON() ([]byte, error) { return bytes.TrimSpace(e.AppendJSON(nil)), nil }

// UnmarshalJSON reads what AppendJSON wrote.
func (e *Event) UnmarshalJSON(b []byte) error {
	var l line
	if err := json.Unmarshal(b, &l); err != nil {
		return err
	}
	return l.event(e)
}

func (l *line) event(e *Event) error {
	k, err := index(kindNames, l.Kind)
	o, err2 := index(opNames, l.Op)
	out, err3 := index(outcomeNames, l.Outcome)
	if err = errors.Join(err, err2, err3); err != nil {
		return err
	}
	*e = Event{Time: l.T, Kind: Kind(k), Op: Op(o), Outcome: Outcome(out), Peer: l.Peer, Inc: l.Inc, N: l.N, Size: l.Size,
		Group: l.Group, Call: l.Call, Seq: l.Seq, Epoch: l.Epoch, Sum: l.Sum, Why: l.Why}
	for _, s := range l.Set {
		if s < 0 || s >= slots.Max {
			return fmt.Errorf("history: slot %d: they are from 0 to %d", s, slots.Max-1)
		}
		e.Set.Add(s)
	}
	return nil
}

func index(names []string, s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	i := slices.Index(names, s)
	if i < 0 {
		return 0, fmt.Errorf("history: unknown name %q: want one of %v", s, names[1:])
	}
	return i, nil
}

// Parse reads lines of events. A process that was killed may have left its last line unfinished: that is no error.
func Parse(text []byte) (es []Event, _ error) {
	for len(text) > 0 {
		n := bytes.IndexByte(text, '\n')
		if n < 0 {
			return es, nil
		}
		var l line
		var e Event
		err := json.Unmarshal(text[:n], &l)
		if err == nil {
			err = l.event(&e)
		}
		if err != nil {
			return es, fmt.Errorf("history: line %d: %w", len(es)+1, err)
		}
		es = append(es, e)
		text = text[n+1:]
	}
	return es, nil
}

package faulty

import (
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/internal/wire"
)

// Script is a list of rules. The zero value has none.
type Script struct {
	rules    []rule
	counters int
}

type action uint8

const (
	drop action = iota
	delay
	corrupt
	closes
	full
)

var actions = []string{drop: "drop", delay: "delay", corrupt: "corrupt", closes: "close", full: "full"}

type rule struct {
	action action
	delay  time.Duration
	recv   bool
	preds  []pred
	index  int // in the script
}

type op uint8

const (
	opKind op = iota
	opField
	opNth
	opEvery
	opChance
	opAnd
	opOr
	opNot
)

// pred is a node of a predicate's tree.
type pred struct {
	op      op
	name    string // of a field
	get     func(*wire.Header) uint64
	kinds   []wire.Kind
	lo, hi  uint64  // range; every: lo
	p       float64 // chance
	kids    []pred
	counter int
}

// state is what changes in a script's predicates: counts and luck.
type state struct {
	counts []uint64
	chance rand.PCG
}

func (s *state) copy(from *state) {
	copy(s.counts, from.counts)
	s.chance = from.chance
}

// all looks at predicates up to the first that does not match.
func (s *state) all(preds []pred, f *device.Frame) bool {
	for i := range preds {
		if !s.matches(&preds[i], f) {
			return false
		}
	}
	return true
}

func (s *state) matches(p *pred, f *device.Frame) bool {
	switch p.op {
	case opKind:
		for _, k := range p.kinds {
			if f.Kind == k {
				return true
			}
		}
		return false
	case opField:
		x := p.get(&f.Header)
		return p.lo <= x && x <= p.hi
	case opNth:
		s.counts[p.counter]++
		x := s.counts[p.counter]
		return p.lo <= x && x <= p.hi
	case opEvery:
		s.counts[p.counter]++
		return s.counts[p.counter]%p.lo == 0
	case opChance:
		return float64(s.chance.Uint64()>>11)/(1<<53) < p.p
	case opAnd:
		return s.all(p.kids, f)
	case opOr:
		for i := range p.kids {
			if s.matches(&p.kids[i], f) {
				return true
			}
		}
		return false
	}
	return !s.matches(&p.kids[0], f) // opNot
}

var fields = []struct {
	name string
	get  func(*wire.Header) uint64
}{
	{"op", func(h *wire.Header) uint64 { return uint64(h.Op) }},
	{"phase", func(h *wire.Header) uint64 { return uint64(h.Phase) }},
	{"flags", func(h *wire.Header) uint64 { return uint64(h.Flags) }},
	{"group", func(h *wire.Header) uint64 { return h.Group }},
	{"version", func(h *wire.Header) uint64 { return h.Version }},
	{"seq", func(h *wire.Header) uint64 { return h.Seq }},
	{"completed", func(h *wire.Header) uint64 { return h.Completed }},
	{"slot", func(h *wire.Header) uint64 { return uint64(h.Slot) }},
	{"to", func(h *wire.Header) uint64 { return uint64(h.To) }},
	{"inc", func(h *wire.Header) uint64 { return uint64(h.Inc) }},
	{"toinc", func(h *wire.Header) uint64 { return uint64(h.ToInc) }},
	{"tag", func(h *wire.Header) uint64 { return uint64(h.Tag) }},
	{"offset", func(h *wire.Header) uint64 { return h.Offset }},
	{"total", func(h *wire.Header) uint64 { return h.Total }},
	{"size", func(h *wire.Header) uint64 { return uint64(h.Length) }},
}

var kinds = []struct {
	name string
	kind wire.Kind
}{
	{"control", wire.KindControl},
	{"agent", wire.KindAgent},
	{"data", wire.KindData},
	{"hold", wire.KindHold},
	{"need", wire.KindNeed},
	{"forward", wire.KindForward},
	{"done", wire.KindDone},
	{"p2p", wire.KindP2P},
}

// String is the script in the form that Parse reads.
func (s *Script) String() string {
	if s == nil {
		return ""
	}
	var b strings.Builder
	for i := range s.rules {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(s.rules[i].String())
	}
	return b.String()
}

func (r *rule) String() string {
	var b strings.Builder
	b.WriteByte('(')
	b.WriteString(actions[r.action])
	if r.action == delay {
		b.WriteByte(' ')
		b.WriteString(r.delay.String())
	}
	if r.recv {
		b.WriteString(" recv")
	}
	for i := range r.preds {
		b.WriteByte(' ')
		r.preds[i].print(&b)
	}
	b.WriteByte(')')
	return b.String()
}

func (p *pred) print(b *strings.Builder) {
	b.WriteByte('(')
	switch p.op {
	case opKind:
		b.WriteString("kind")
		for _, k := range p.kinds {
			b.WriteByte(' ')
			b.WriteString(kindName(k))
		}
	case opField:
		b.WriteString(p.name)
		p.printRange(b)
	case opNth:
		b.WriteString("nth")
		p.printRange(b)
	case opEvery:
		b.WriteString("every ")
		b.WriteString(strconv.FormatUint(p.lo, 10))
	case opChance:
		b.WriteString("chance ")
		b.WriteString(strconv.FormatFloat(p.p, 'g', -1, 64))
	case opAnd, opOr, opNot:
		b.WriteString(map[op]string{opAnd: "and", opOr: "or", opNot: "not"}[p.op])
		for i := range p.kids {
			b.WriteByte(' ')
			p.kids[i].print(b)
		}
	}
	b.WriteByte(')')
}

func (p *pred) printRange(b *strings.Builder) {
	b.WriteByte(' ')
	b.WriteString(strconv.FormatUint(p.lo, 10))
	switch {
	case p.hi == p.lo:
	case p.hi == math.MaxUint64:
		b.WriteString("..")
	default:
		b.WriteString("..")
		b.WriteString(strconv.FormatUint(p.hi, 10))
	}
}

func kindName(k wire.Kind) string {
	for _, x := range kinds {
		if x.kind == k {
			return x.name
		}
	}
	return strconv.Itoa(int(k))
}

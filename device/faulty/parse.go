package faulty

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/wire"
)

// Parse reads a script. Its errors say where and what was expected.
func Parse(text string) (*Script, error) {
	p := &parser{text: text, script: new(Script)}
	for {
		p.next()
		if p.err == nil && p.tok == "" {
			return p.script, nil
		}
		r := p.rule()
		if p.err != nil {
			return nil, p.err
		}
		r.index = len(p.script.rules)
		p.script.rules = append(p.script.rules, r)
	}
}

// MustParse is Parse of a script that is part of the program.
func MustParse(text string) *Script {
	s, err := Parse(text)
	if err != nil {
		panic(err)
	}
	return s
}

// Set makes a Script a flag.Value.
func (s *Script) Set(text string) error {
	parsed, err := Parse(text)
	if err == nil {
		*s = *parsed
	}
	return err
}

// maxDepth bounds how deep and, or, not nest.
const maxDepth = 50

// parser reads token by token; after the first error it only reports that.
type parser struct {
	text   string
	at     int    // behind tok
	tok    string // "(", ")", a word, or "" at the end
	start  int    // of tok
	depth  int
	script *Script
	err    error
}

func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("faulty: byte %d of %q: %s", p.start, p.text, fmt.Sprintf(format, args...))
	}
}

func (p *parser) next() {
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.at]) >= 0 {
		p.at++
	}
	p.start = p.at
	switch {
	case p.at == len(p.text):
		p.tok = ""
	case p.text[p.at] == '(' || p.text[p.at] == ')':
		p.at++
		p.tok = p.text[p.start:p.at]
	default:
		for p.at < len(p.text) && strings.IndexByte(" \t\r\n()", p.text[p.at]) < 0 {
			p.at++
		}
		p.tok = p.text[p.start:p.at]
	}
}

// isWord says whether the current token is neither a parenthesis nor the end.
func (p *parser) isWord() bool { return p.tok != "" && p.tok != "(" && p.tok != ")" }

// found names the current token in an error.
func (p *parser) found() string {
	if p.tok == "" {
		return "the end"
	}
	return strconv.Quote(p.tok)
}

func (p *parser) rule() (r rule) {
	if p.tok != "(" {
		p.fail("found %s, want a rule: (drop ...), (delay 5ms ...), (corrupt ...), (close ...), (full ...)", p.found())
		return r
	}
	p.next()
	known := false
	for a, name := range actions {
		if p.tok == name {
			r.action, known = action(a), true
		}
	}
	if !known {
		p.fail("found %s, want an action: %s", p.found(), strings.Join(actions, ", "))
		return r
	}
	p.next()
	if r.action == delay {
		d, err := time.ParseDuration(p.tok)
		if err != nil || d < 0 {
			p.fail("found %s, want a duration that is not negative, such as 5ms", p.found())
			return r
		}
		r.delay = d
		p.next()
	}
	if p.tok == "recv" {
		r.recv = true
		if r.action == full {
			p.fail("what comes in cannot be refused as full: leave recv out")
		}
		p.next()
	}
	r.preds = p.preds()
	return r
}

// preds reads predicates up to the closing parenthesis.
func (p *parser) preds() (list []pred) {
	for p.err == nil && p.tok == "(" {
		list = append(list, p.pred())
		p.next()
	}
	if p.tok != ")" {
		p.fail("found %s, want a predicate in parentheses or )", p.found())
	}
	return list
}

// pred reads one predicate and leaves its closing parenthesis as the current token.
func (p *parser) pred() (x pred) {
	if p.depth++; p.depth > maxDepth {
		p.fail("predicates nest deeper than %d", maxDepth)
		return x
	}
	defer func() { p.depth-- }()
	p.next()
	name := p.tok
	start := p.start
	p.next()
	switch name {
	case "kind":
		x.op = opKind
		for p.isWord() {
			x.kinds = append(x.kinds, p.kind())
			p.next()
		}
		if len(x.kinds) == 0 {
			p.fail("found %s, want a kind: %s, or a number", p.found(), names())
		}
	case "nth", "every":
		x.op = opNth
		x.counter = p.script.counters
		p.script.counters++
		if name == "every" {
			x.op = opEvery
			if x.lo = p.number(p.tok); x.lo == 0 {
				p.fail("found %s, want a number from 1", p.found())
			}
		} else {
			x.lo, x.hi = p.span()
		}
		p.next()
	case "chance":
		x.op = opChance
		v, err := strconv.ParseFloat(p.tok, 64)
		if err != nil || !(v >= 0 && v <= 1) {
			p.fail("found %s, want a fraction from 0 to 1", p.found())
		}
		x.p = v
		p.next()
	case "and", "or", "not":
		x.op = map[string]op{"and": opAnd, "or": opOr, "not": opNot}[name]
		x.kids = p.preds()
		if x.op == opNot && len(x.kids) != 1 {
			p.fail("not takes one predicate, found %d", len(x.kids))
		}
	default:
		for _, f := range fields {
			if f.name == name {
				x.op, x.name, x.get = opField, name, f.get
			}
		}
		if x.get == nil {
			p.tok, p.start = name, start
			p.fail("found %s, want a predicate: kind, nth, every, chance, and, or, not, %s", p.found(), fieldNames())
			return x
		}
		x.lo, x.hi = p.span()
		p.next()
	}
	if p.tok != ")" {
		p.fail("found %s, want )", p.found())
	}
	return x
}

func (p *parser) kind() wire.Kind {
	for _, k := range kinds {
		if p.tok == k.name {
			return k.kind
		}
	}
	v, err := strconv.ParseUint(p.tok, 0, 8)
	if err != nil {
		p.fail("found %s, want a kind: %s, or a number", p.found(), names())
	}
	return wire.Kind(v)
}

func (p *parser) number(text string) uint64 {
	v, err := strconv.ParseUint(text, 0, 64)
	if err != nil {
		p.fail("found %s, want a number", p.found())
	}
	return v
}

// span reads a range from the current token.
func (p *parser) span() (lo, hi uint64) {
	from, to, isRange := strings.Cut(p.tok, "..")
	if !isRange {
		lo = p.number(from)
		return lo, lo
	}
	lo, hi = 0, math.MaxUint64
	if from == "" && to == "" {
		p.fail("found %s, want a number on one side at least", p.found())
	}
	if from != "" {
		lo = p.number(from)
	}
	if to != "" {
		hi = p.number(to)
	}
	if lo > hi {
		p.fail("found %s, a range that holds nothing", p.found())
	}
	return lo, hi
}

func names() string {
	var list []string
	for _, k := range kinds {
		list = append(list, k.name)
	}
	return strings.Join(list, ", ")
}

func fieldNames() string {
	var list []string
	for _, f := range fields {
		list = append(list, f.name)
	}
	return strings.Join(list, ", ")
}

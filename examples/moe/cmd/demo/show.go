package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// mood is what kind of event a line tells.
type mood int

const (
	plain mood = iota
	bad
	good
)

// view is how things stand.
type view struct {
	at            time.Duration
	tokens, total int
	rate          float64
	epoch         uint64
	active        []int
	ranks         int
	rows          []row
}

// row is one request.
type row struct {
	owner        int  // -1: none yet
	moved        bool // it has another owner than a moment ago
	done         bool
	want         int // bytes
	prompt, text string
}

// screen shows what happens. Its methods may be called from any goroutine.
type screen interface {
	event(m mood, line string)
	update(v view)
	close()
}

// newScreen is a picture that is redrawn if out is a terminal, and lines otherwise.
func newScreen(out io.Writer, lines bool) screen {
	if f, ok := out.(*os.File); ok && !lines {
		if _, _, ok := terminalSize(f); ok {
			return &picture{out: out, size: func() (int, int) { w, h, _ := terminalSize(f); return w, h }}
		}
	}
	return &log{out: out}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, _, ok = terminalSize(f)
	return ok
}

// logSteps is how many lines of progress there are in all.
const logSteps = 25

// log prints lines: events, and now and then how things stand, with a piece of the text as it is written.
type log struct {
	mu    sync.Mutex
	out   io.Writer
	shown []int // bytes of each answer
	next  int   // bytes at which to print the next line
}

func (l *log) event(_ mood, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintln(l.out, clean(line))
}

func (l *log) update(v view) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v.tokens < l.next || v.tokens == 0 {
		return
	}
	l.next = v.tokens + max(v.total/logSteps, 1)
	if l.shown == nil {
		l.shown = make([]int, len(v.rows))
	}
	best := 0 // the one that has moved furthest since it was shown last
	for i, r := range v.rows {
		if len(r.text)-l.shown[i] > len(v.rows[best].text)-l.shown[best] {
			best = i
		}
	}
	r := v.rows[best]
	piece := tail(oneLine(r.text[min(l.shown[best], len(r.text)):]), 60)
	l.shown[best] = len(r.text)
	fmt.Fprintf(l.out, "%7.3fs  %*d/%d bytes %5.0f/s  ranks %v  #%d@%d %s\n", v.at.Seconds(), len(fmt.Sprint(v.total)), v.tokens, v.total, v.rate, v.active, best, r.owner, piece)
}

func (l *log) close() {}

// picture is a line for each request and one for all, which are redrawn in place; events are printed above and stay.
type picture struct {
	mu     sync.Mutex
	out    io.Writer
	size   func() (width, height int)
	last   view
	lines  int // of the picture on the screen
	closed bool
}

// Escape sequences.
const (
	up       = "\x1b[%dA"
	eraseEnd = "\x1b[K" // to the end of the line
	erase    = "\x1b[J" // to the end of the screen
	dim      = "\x1b[2m"
	red      = "\x1b[31m"
	green    = "\x1b[32m"
	yellow   = "\x1b[33m"
	bold     = "\x1b[1m"
	reset    = "\x1b[0m"
)

func (p *picture) event(m mood, line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	color := map[mood]string{bad: red, good: green}[m]
	line = clean(line)
	if color != "" {
		line = color + line + reset
	}
	p.draw([]string{line})
}

func (p *picture) update(v view) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = v
	p.draw(nil)
}

// close removes the picture; the events stay.
func (p *picture) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lines > 0 {
		fmt.Fprintf(p.out, up+"\r"+erase, p.lines)
	}
	p.lines, p.closed = 0, true
}

// draw prints lines that stay, and the picture below them, in one write.
func (p *picture) draw(stay []string) {
	var b strings.Builder
	if p.lines > 0 {
		fmt.Fprintf(&b, up+"\r", p.lines)
	}
	var lines []string
	if !p.closed && p.last.rows != nil {
		w, h := p.size()
		lines = p.last.lines(w-1, h-1)
	}
	for _, l := range append(stay, lines...) {
		b.WriteString(l + eraseEnd + "\n")
	}
	b.WriteString(erase)
	p.lines = len(lines)
	_, _ = io.WriteString(p.out, b.String())
}

// lines are the picture, at most so wide and high.
func (v *view) lines(width, height int) []string {
	width = max(width, 20)
	active := make([]string, v.ranks)
	for r := range active {
		active[r] = red + "-" + reset
	}
	for _, r := range v.active {
		if r < len(active) {
			active[r] = fmt.Sprint(r)
		}
	}
	status := fmt.Sprintf("%d of %d bytes  %s%.0f/s%s  ranks %s  epoch %d", v.tokens, v.total, bold, v.rate, reset, strings.Join(active, " "), v.epoch)
	ls := []string{dim + strings.Repeat("─", min(width, 80)) + reset}
	room := height - 2
	hidden := max(0, len(v.rows)-room)
	for i, r := range v.rows {
		if hidden > 0 && r.done { // on a low screen those that are written
			hidden--
			continue
		}
		if len(ls) > room {
			break
		}
		ls = append(ls, r.line(i, width))
	}
	return append(ls, status)
}

// line is one request: its number, rank and length, and the end of its text.
func (r *row) line(i, width int) string {
	owner, color := "  ", ""
	switch {
	case r.done:
		owner = "ok"
	case r.moved:
		color = yellow
		fallthrough
	case r.owner >= 0:
		owner = fmt.Sprintf("r%d", r.owner)
	}
	head := fmt.Sprintf("#%-2d %-3s %3d ", i, owner, len(r.text))
	prompt, text := []rune(oneLine(r.prompt)), []rune(oneLine(r.text))
	room := max(0, width-len(head))
	if over := len(prompt) + len(text) - room; over > 0 {
		cut := min(over, len(prompt))
		prompt, text = prompt[cut:], text[over-cut:]
	}
	return color + head + reset + dim + string(prompt) + reset + string(text)
}

// oneLine makes text fit for one line of a screen: every rune has width 1.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return '⏎'
		case r == '\t':
			return '→'
		case r < ' ' || r > '~':
			return '·'
		}
		return r
	}, s)
}

// clean makes text fit for a terminal: a tab becomes four spaces, and of what is no line's end and cannot be printed (ESC
// above all) a dot is left.
func clean(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == '\t':
			b.WriteString("    ")
		case r == '\n' || (unicode.IsPrint(r) && !(r == utf8.RuneError && n == 1)):
			b.WriteRune(r)
		default:
			b.WriteRune('·')
		}
		i += n
	}
	return b.String()
}

// tail is the end of a text, at most n runes.
func tail(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return "…" + string(r[len(r)-n+1:])
	}
	return s
}

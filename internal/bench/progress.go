package bench

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// progress says on one line how far a measurement is: over and over on a terminal, every ten seconds elsewhere.
type progress struct {
	w        io.Writer // nil: silent
	terminal bool
	last     time.Time
	width    int
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w}
	if f, ok := w.(*os.File); ok {
		st, err := f.Stat()
		p.terminal = err == nil && st.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) say(format string, a ...any) {
	every := 10 * time.Second
	if p.terminal {
		every = 100 * time.Millisecond
	}
	if p.w == nil || time.Since(p.last) < every {
		return
	}
	p.last = time.Now()
	s := fmt.Sprintf(format, a...)
	if !p.terminal {
		fmt.Fprintln(p.w, s)
		return
	}
	n := len([]rune(s))
	fmt.Fprintf(p.w, "\r%s%s", s, strings.Repeat(" ", max(0, p.width-n)))
	p.width = n
}

// line is something to keep.
func (p *progress) line(format string, a ...any) {
	if p.w == nil {
		return
	}
	p.clear()
	fmt.Fprintf(p.w, format+"\n", a...)
}

func (p *progress) clear() {
	if p.w != nil && p.width > 0 {
		fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", p.width))
		p.width = 0
	}
}

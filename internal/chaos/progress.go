package chaos

import (
	"fmt"
	"io"
	"os"
	"time"
)

// progress says on one line how far a run is: over and over on a terminal, every ten seconds elsewhere.
type progress struct {
	w     io.Writer // nil: silent
	every time.Duration
	again string // what goes before a line that replaces the last one
	last  time.Time
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, every: 10 * time.Second}
	if f, ok := w.(*os.File); ok {
		if st, err := f.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
			p.every, p.again = 100*time.Millisecond, "\r\x1b[K"
		}
	}
	return p
}

func (p *progress) say(format string, a ...any) {
	if p.w == nil || time.Since(p.last) < p.every {
		return
	}
	p.last = time.Now()
	end := "\n"
	if p.again != "" {
		end = ""
	}
	fmt.Fprintf(p.w, p.again+format+end, a...)
}

// line is something to keep.
func (p *progress) line(format string, a ...any) {
	if p.w != nil {
		fmt.Fprintf(p.w, p.again+format+"\n", a...)
	}
}

func (p *progress) clear() {
	if p.w != nil {
		fmt.Fprint(p.w, p.again)
	}
}

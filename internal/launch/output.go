package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

const (
	longestLine = 64 << 10 // a longer one is broken
	readSize    = 32 << 10
	drainTime   = 300 * time.Millisecond // after a rank's end, for what others that hold its output still write
	drainMost   = 3 * time.Second        // and in all
)

// printer writes the lines of all ranks to the launcher's own output, one at a time, so that none is torn.
type printer struct {
	log *slog.Logger

	mu     sync.Mutex
	to     [2]io.Writer // stdout, stderr
	broken [2]bool
}

func (p *printer) print(which int, line []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken[which] {
		return
	}
	if _, err := p.to[which].Write(line); err != nil {
		p.broken[which] = true
		p.log.Warn("cannot print the ranks' output any more; they go on", "err", err)
	}
}

// tag is what comes before each line of a rank.
func tag(rank int, color bool) string {
	if !color {
		return fmt.Sprintf("[%d] ", rank)
	}
	colors := [...]int{36, 33, 32, 35, 34, 31}
	return fmt.Sprintf("\x1b[%dm[%d]\x1b[0m ", colors[rank%len(colors)], rank)
}

// lineWriter cuts what is written into lines and hands each to line, with its newline. A carriage return ends a line
// too: progress bars use it alone.
type lineWriter struct {
	line    func([]byte)
	buf     []byte
	afterCR bool
}

func (l *lineWriter) Write(b []byte) (int, error) {
	n := len(b)
	for len(b) > 0 {
		if l.afterCR && b[0] == '\n' {
			b = b[1:]
			l.afterCR = false
			continue
		}
		l.afterCR = false
		end := bytes.IndexAny(b, "\r\n")
		room := longestLine - len(l.buf)
		switch {
		case end >= 0 && end <= room:
			l.buf = append(l.buf, b[:end]...)
			l.afterCR = b[end] == '\r'
			if len(l.buf) > 0 || !l.afterCR {
				l.flush(true)
			}
			b = b[end+1:]
		case len(b) >= room:
			l.buf = append(l.buf, b[:room]...)
			l.flush(true)
			b = b[room:]
		default:
			l.buf = append(l.buf, b...)
			b = nil
		}
	}
	return n, nil
}

// flush hands on what there is of a line, always if even an empty one counts.
func (l *lineWriter) flush(always bool) {
	if len(l.buf) == 0 && !always {
		return
	}
	l.line(append(l.buf, '\n'))
	l.buf = l.buf[:0]
}

// logFile is the log of one rank. It outlives restarts.
type logFile struct {
	rank int
	log  *slog.Logger

	mu     sync.Mutex
	file   *os.File
	warned bool
}

func openLog(dir string, rank int, log *slog.Logger) *logFile {
	l := &logFile{rank: rank, log: log}
	var err error
	l.file, err = os.OpenFile(filepath.Join(dir, fmt.Sprintf("rank-%d.log", rank)), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		l.warn(err)
	}
	return l
}

func (l *logFile) warn(err error) {
	if !l.warned {
		l.warned = true
		l.log.Warn("a log file is not complete; the rank goes on", "rank", l.rank, "err", err)
	}
}

func (l *logFile) write(line []byte) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return
	}
	if _, err := l.file.Write(line); err != nil {
		l.warn(err)
	}
}

func (l *logFile) close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		if err := l.file.Close(); err != nil {
			l.warn(err)
		}
		l.file = nil
	}
}

// stream is one pipe from one start of a rank.
type stream struct {
	read, write *os.File
	lines       lineWriter
	ended       atomic.Bool // the rank is dead
	done        chan struct{}
}

func newStream(p *printer, which int, tag string, log *logFile) (*stream, error) {
	r, wr, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s := &stream{read: r, write: wr, done: make(chan struct{})}
	var tagged []byte
	s.lines.line = func(line []byte) {
		log.write(line)
		tagged = append(append(tagged[:0], tag...), line...)
		p.print(which, tagged)
	}
	return s, nil
}

// copy passes lines on until the pipe is closed by all who write to it, or has gone quiet after the rank's end.
func (s *stream) copy() {
	defer close(s.done)
	defer func() { _ = s.read.Close() }()
	defer s.lines.flush(false)
	buf := make([]byte, readSize)
	var last time.Time
	for {
		if s.ended.Load() {
			now := time.Now()
			if last.IsZero() {
				last = now.Add(drainMost)
			}
			if now.After(last) {
				return
			}
			_ = s.read.SetReadDeadline(now.Add(drainTime))
		}
		n, err := s.read.Read(buf)
		_, _ = s.lines.Write(buf[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) && last.IsZero() {
			continue // that was the nudge of end
		}
		if err != nil {
			return
		}
	}
}

// end waits for the last lines of a rank that is dead.
func (s *stream) end() {
	s.ended.Store(true)
	_ = s.read.SetReadDeadline(time.Now().Add(drainTime))
	<-s.done
}

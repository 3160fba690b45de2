package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// terminal is as much of one as the picture needs: what it shows, line by line.
type terminal struct {
	t       testing.TB
	lines   [][]rune
	row     int
	col     int
	unclear int // sequences that it does not know
}

func (s *terminal) Write(b []byte) (int, error) {
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		i += n
		for len(s.lines) <= s.row {
			s.lines = append(s.lines, nil)
		}
		switch {
		case r == '\n':
			s.row, s.col = s.row+1, 0
		case r == '\r':
			s.col = 0
		case r == 0x1b:
			end := i + bytes.IndexFunc(b[i:], func(r rune) bool { return r >= 'A' && r != '[' })
			k := 1
			_, _ = fmt.Sscanf(string(b[i:end]), "[%d", &k)
			switch b[end] {
			case 'A':
				s.row -= k
				require.GreaterOrEqual(s.t, s.row, 0)
			case 'K':
				s.lines[s.row] = s.lines[s.row][:min(s.col, len(s.lines[s.row]))]
			case 'J':
				s.lines[s.row] = s.lines[s.row][:min(s.col, len(s.lines[s.row]))]
				s.lines = s.lines[:s.row+1]
			case 'm':
			default:
				s.unclear++
			}
			i = end + 1
		default:
			require.True(s.t, r >= ' ' && r != 0x7f, "%q on the screen", r)
			l := s.lines[s.row]
			for len(l) <= s.col {
				l = append(l, ' ')
			}
			l[s.col] = r
			s.lines[s.row] = l
			s.col++
		}
	}
	return len(b), nil
}

func (s *terminal) text() (ls []string) {
	for _, l := range s.lines {
		ls = append(ls, strings.TrimRight(string(l), " "))
	}
	for len(ls) > 0 && ls[len(ls)-1] == "" {
		ls = ls[:len(ls)-1]
	}
	return ls
}

func someView(requests int) view {
	v := view{tokens: 100, total: 4000, rate: 123, epoch: 3, active: []int{0, 1, 3}, ranks: 4}
	for i := range requests {
		v.rows = append(v.rows, row{owner: i % 4, want: 100, prompt: "a prompt\nof\ttwo lines", text: strings.Repeat(fmt.Sprint(i), i*10)})
	}
	return v
}

// Events stay above the picture, which is redrawn in place and gone at the end.
func TestPicture(t *testing.T) {
	s := &terminal{t: t}
	p := &picture{out: s, size: func() (int, int) { return 60, 24 }}
	p.event(plain, "first")
	require.Equal(t, []string{"first"}, s.text())
	v := someView(3)
	p.update(v)
	p.event(bad, "kill -9 \x1b[2J\trank 1")
	v.tokens = 200
	v.rows[1].text += "\x1b[31mred\x07\xff"
	p.update(v)
	want := []string{
		"first", "kill -9 ·[2J    rank 1", strings.Repeat("─", 59),
		"#0  r0    0 a prompt⏎of→two lines",
		"#1  r1   20 a prompt⏎of→two lines1111111111·[31mred··",
		"#2  r2   20 a prompt⏎of→two lines22222222222222222222",
		"200 of 4000 bytes  123/s  ranks 0 1 - 3  epoch 3",
	}
	require.Equal(t, want, s.text())
	p.close()
	require.Equal(t, want[:2], s.text())
	p.update(v)
	p.event(good, "last")
	p.close()
	require.Equal(t, append(want[:2:2], "last"), s.text())
	require.Zero(t, s.unclear)
}

// No line is wider than the terminal and the picture is not higher, whatever the texts are.
func TestPictureFits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w, h := rapid.IntRange(30, 200).Draw(rt, "width"), rapid.IntRange(5, 40).Draw(rt, "height")
		s := &terminal{t: t}
		p := &picture{out: s, size: func() (int, int) { return w, h }}
		v := someView(rapid.IntRange(1, 14).Draw(rt, "requests"))
		for range rapid.IntRange(1, 4).Draw(rt, "times") {
			r := &v.rows[rapid.IntRange(0, len(v.rows)-1).Draw(rt, "which")]
			r.text += rapid.String().Draw(rt, "text")
			r.done, r.moved = rapid.Bool().Draw(rt, "done"), rapid.Bool().Draw(rt, "moved")
			p.update(v)
			ls := s.text()
			if len(ls) > h {
				rt.Fatalf("%d lines on %d", len(ls), h)
			}
			for _, l := range ls[:len(ls)-1] { // the last one is of fixed length
				if n := utf8.RuneCountInString(l); n >= w {
					rt.Fatalf("%d runes on %d: %s", n, w, l)
				}
			}
		}
	})
}

// Without a terminal: few lines, however many updates there are, and no escape sequence.
func TestLog(t *testing.T) {
	var b bytes.Buffer
	l := newScreen(&b, false)
	require.IsType(t, &log{}, l)
	v := someView(5)
	l.event(bad, "an \x1b[31mevent\x1b[0m")
	for v.tokens = range v.total + 1 {
		v.rows[v.tokens%5].text += "x\x1b\n"
		v.at = time.Duration(v.tokens) * time.Millisecond
		l.update(v)
	}
	l.close()
	require.LessOrEqual(t, strings.Count(b.String(), "\n"), logSteps+2)
	require.GreaterOrEqual(t, strings.Count(b.String(), "\n"), logSteps)
	require.NotContains(t, b.String(), "\x1b")
	require.Contains(t, b.String(), "/4000 bytes")
}

func TestCleanLeavesNothingThatATerminalObeys(t *testing.T) {
	require.Equal(t, "a    b\nc·[2J·d··ü·", clean("a\tb\nc\x1b[2J\rd\x00\xffü\u0085"))
	require.Equal(t, "a→b⏎c·[2J·d··", oneLine("a\tb\nc\x1b[2J\rd\xffü"))
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		for _, r := range clean(s) {
			if r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 || r == '\u202e' {
				t.Fatalf("%q", r)
			}
		}
		for _, r := range oneLine(s) {
			if r < ' ' || r == 0x7f {
				t.Fatalf("%q", r)
			}
		}
	})
	require.Equal(t, "…fg", tail("abcdefg", 3))
	require.Equal(t, "ab…", head("abcdefg", 3))
	require.Equal(t, "abc", head(tail("abc", 3), 3))
}

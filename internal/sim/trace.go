package sim

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
)

// tell writes a line of the trace, if one is wanted.
func (w *World) tell(f string, a ...any) {
	if w.trace != nil {
		fmt.Fprintf(w.trace, "%12v  "+f+"\n", append([]any{w.now}, a...)...)
	}
}

// Trace is what happened, line by line (Options.Trace).
func (w *World) Trace() string {
	if w.trace == nil {
		return ""
	}
	return w.trace.String()
}

// logger takes what a process logs into the trace.
func (w *World) logger(p *proc) *slog.Logger {
	if w.trace == nil {
		return nil
	}
	return slog.New(&tracer{p: p})
}

type tracer struct {
	p *proc
}

func (t *tracer) Enabled(context.Context, slog.Level) bool { return true }
func (t *tracer) WithAttrs([]slog.Attr) slog.Handler       { return t }
func (t *tracer) WithGroup(string) slog.Handler            { return t }

func (t *tracer) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	})
	t.p.w.tell("%v: %s%s", t.p, r.Message, b.String())
	return nil
}

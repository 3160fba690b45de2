package chaos

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/internal/harness"
	"github.com/serry-project/serry/internal/history"
	"github.com/serry-project/serry/pg"
)

// recorder writes the history of this process to a file, each event with one write(2): what was written survives the
// process.
type recorder struct {
	mu   sync.Mutex
	file *os.File
	buf  []byte
	err  error
}

func newRecorder(path string) (*recorder, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("chaos: no history can be written: %w", err)
	}
	return &recorder{file: f}, nil
}

// put stamps the event, if it is not, and writes it.
func (r *recorder) put(e *history.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Time == 0 {
		e.Time = harness.Mono()
	}
	r.buf = e.AppendJSON(r.buf[:0])
	if _, err := r.file.Write(r.buf); err != nil {
		r.err = errors.Join(r.err, err)
	}
}

// outcome is how an error of an operation is written down, with what it tells.
func outcome(err error, local bool, e *history.Event) {
	var lost *pg.RankLost
	var source *collectives.ErrSourceLost
	var failed *pg.GroupFailed
	switch {
	case err == nil:
		e.Outcome = history.OK
		return
	case errors.As(err, &lost):
		e.Outcome, e.Epoch = history.RankLost, lost.Epoch
		for _, s := range lost.Slots {
			e.Set.Add(s)
		}
	case errors.As(err, &source):
		e.Outcome = history.SourceLost
	case errors.As(err, &failed):
		e.Outcome, e.Epoch, e.Why = history.Failed, failed.Epoch, failed.Reason
		return
	case errors.Is(err, pg.ErrFailed):
		e.Outcome = history.Failed
	case local && errors.Is(err, context.DeadlineExceeded):
		e.Outcome = history.Late
		return // when, and after how many bytes, is each end's own
	default:
		e.Outcome = ending(err)
	}
	e.Why = err.Error()
}

// ending is how an error ends a process.
func ending(err error) history.Outcome {
	switch {
	case errors.Is(err, pg.ErrEvicted):
		return history.Evicted
	case errors.Is(err, pg.ErrNoQuorum):
		return history.NoQuorum
	case errors.Is(err, pg.ErrAllGone):
		return history.AllGone
	case errors.Is(err, pg.ErrClosed):
		return history.ClosedHere
	}
	return history.Other
}

// grave is a file for the times at which a process was killed, or stopped, by itself.
type grave struct{ file *os.File }

const graveBytes = 16 // when it was killed (8), when it was stopped (8)

func dig(path string) (*grave, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(make([]byte, graveBytes))
	return &grave{f}, err
}

func (g *grave) note(at int64) {
	b := binary.LittleEndian.AppendUint64(nil, uint64(harness.Mono()))
	_, _ = g.file.WriteAt(b, at)
}

// readGrave reads the times; 0: it was not.
func readGrave(path string) (killed, stopped int64) {
	b, err := os.ReadFile(path)
	if err != nil || len(b) != graveBytes {
		return 0, 0
	}
	return int64(binary.LittleEndian.Uint64(b)), int64(binary.LittleEndian.Uint64(b[8:]))
}

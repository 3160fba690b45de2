package flight

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// DefaultPrefix is what names of dumps for torch begin with; the rank follows.
const DefaultPrefix = "serry_trace_rank_"

// Dump writes what is remembered into a directory, which it makes: <prefix><rank> for torch (prefix "" is DefaultPrefix) and
// operations.<rank>.<incarnation>.jsonl. It returns their paths. Dumps before of the same name are replaced, each whole.
// On an error no file is left half-written, nor one of the two without the other, unless the first was there before.
//
// `python -m torch.distributed.flight_recorder.fr_trace DIR` compares the dumps of all ranks; where ranks were lost, with
// --allow-incomplete-ranks.
func (r *Recorder) Dump(dir, prefix string) (paths []string, err error) {
	if r == nil {
		return nil, nil
	}
	if prefix == "" {
		prefix = DefaultPrefix
	}
	lines := fmt.Sprintf("operations.%d.%d.jsonl", r.cfg.Rank, r.cfg.Incarnation)
	switch last := prefix[len(prefix)-1]; {
	case strings.ContainsRune(prefix, filepath.Separator), last >= '0' && last <= '9', strings.Contains(lines, prefix):
		return nil, fmt.Errorf("flight: prefix %q of dumps: want a name that does not end in a digit and is no part of %s", prefix, lines)
	}
	r.dumping.Lock()
	defer r.dumping.Unlock()
	paths, err = dump(dir, []file{{lines, r.WriteJSON}, {fmt.Sprintf("%s%d", prefix, r.cfg.Rank), r.WriteTorch}})
	if err != nil {
		return nil, fmt.Errorf("flight: rank %d cannot dump its operations to %s: %w: nothing was left there; is there room, and may this user write?",
			r.cfg.Rank, dir, err)
	}
	return paths, nil
}

type file struct {
	name  string
	write func(io.Writer) error
}

// dump writes all files beside their places and then moves them there.
func dump(dir string, files []file) (paths []string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	var temps []string
	defer func() {
		for _, t := range temps {
			_ = os.Remove(t)
		}
	}()
	for _, f := range files {
		t, err := write(dir, f.write)
		if t != "" {
			temps = append(temps, t)
		}
		if err != nil {
			return nil, err
		}
	}
	for i, f := range files {
		path := filepath.Join(dir, f.name)
		if err := os.Rename(temps[i], path); err != nil {
			for _, p := range paths {
				_ = os.Remove(p)
			}
			return nil, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}

// write makes a temporary file, whose name torch's analyser passes over: it ends in no digit and contains no prefix.
func write(dir string, to func(io.Writer) error) (name string, err error) {
	f, err := os.CreateTemp(dir, ".partial.*.tmp")
	if err != nil {
		return "", err
	}
	b := bufio.NewWriterSize(f, 1<<16)
	if err = to(b); err == nil {
		err = b.Flush()
	}
	if err == nil {
		err = f.Chmod(0o644)
	}
	return f.Name(), cmp.Or(err, f.Close())
}

package model

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	corpusPiece      = 2048    // bytes a file gives to the held-out sample
	corpusMaxFile    = 200_000 // bytes
	corpusHeldOut    = 26      // first hash byte of a held-out directory lies below
	corpusGenerated  = 1024    // bytes searched for "Code generated"
	bitsStride       = 256     // bytes from one scoring window to the next
	bitsBatchWindows = 4       // windows scored in one batch
)

// File is one file of the corpus.
type File struct {
	Path string // slash separated, relative to GOROOT/src
	Text []byte
}

// Corpus reads the Go tree's own source below goroot/src and splits it into
// training and held-out files, both sorted by path. The rule is that of
// examples/moe/train/data.py:
//
//   - every file whose name ends in .go, except files with a path element
//     "testdata", files above 200000 bytes, empty files, files that hold a zero
//     byte and files with "Code generated" in their first 1024 bytes;
//   - a file is held out when the first byte of the SHA-256 of its directory's
//     path (relative to src, "." for src itself) is below 26;
//   - a held-out file whose content equals that of a training file is dropped,
//     as is every repetition of a content within one side.
func Corpus(goroot string) (train, heldOut []File, err error) {
	src := filepath.Join(goroot, "src")
	err = filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "testdata" {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || !strings.HasSuffix(d.Name(), ".go") {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Size() == 0 || info.Size() > corpusMaxFile {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if bytes.IndexByte(text, 0) >= 0 || bytes.Contains(text[:min(len(text), corpusGenerated)], []byte("Code generated")) {
			return nil
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		f := File{Path: filepath.ToSlash(rel), Text: text}
		if sha256.Sum256([]byte(path.Dir(f.Path)))[0] < corpusHeldOut {
			heldOut = append(heldOut, f)
		} else {
			train = append(train, f)
		}
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading the Go source below %s: %w; name a GOROOT that has its src folder", src, err)
	}
	seen := map[[sha256.Size]byte]bool{}
	return unseen(train, seen), unseen(heldOut, seen), nil
}

// unseen sorts the files by path and keeps the first of each content.
func unseen(files []File, seen map[[sha256.Size]byte]bool) []File {
	slices.SortFunc(files, func(a, b File) int { return cmp.Compare(a.Path, b.Path) })
	return slices.DeleteFunc(files, func(f File) bool {
		h := sha256.Sum256(f.Text)
		old := seen[h]
		seen[h] = true
		return old
	})
}

// Sample returns pieces of the held-out files, n bytes in all or fewer where the
// files have less to give: the files in the order of the SHA-256 of their
// paths, of each one piece of at most 2048 bytes at the offset (first 8 bytes of
// that hash, big endian) mod (size-2048+1), the last piece cut to n.
func Sample(heldOut []File, n int) []File {
	type keyed struct {
		hash [sha256.Size]byte
		File
	}
	all := make([]keyed, len(heldOut))
	for i, f := range heldOut {
		all[i] = keyed{sha256.Sum256([]byte(f.Path)), f}
	}
	slices.SortFunc(all, func(a, b keyed) int { return bytes.Compare(a.hash[:], b.hash[:]) })
	var out []File
	for _, f := range all {
		if n <= 0 {
			break
		}
		text := f.Text
		if len(text) > corpusPiece {
			off := binary.BigEndian.Uint64(f.hash[:]) % uint64(len(text)-corpusPiece+1)
			text = text[off : off+corpusPiece]
		}
		text = text[:min(len(text), n)]
		out = append(out, File{Path: f.Path, Text: text})
		n -= len(text)
	}
	return out
}

// window is a stretch of a piece: the bytes from begin to end are fed, those
// from score on are scored.
type window struct {
	text              []byte
	begin, score, end int
}

// Bits returns the model's code length for the pieces in bits and the number of
// bytes scored, which is all of them. Each piece is read in windows of the
// model's context that begin every 256 bytes, a zero byte in front; the first
// window scores all its bytes, each later one only those that no window before
// it has scored. It runs on GOMAXPROCS goroutines. An error names the missing
// expert.
func (m *Model) Bits(pieces [][]byte) (bits float64, n int, err error) {
	var windows []window
	for _, text := range pieces {
		for begin, scored := 0, 0; scored < len(text); begin += bitsStride {
			end := min(begin+m.Context, len(text))
			windows = append(windows, window{text, begin, scored, end})
			scored = end
		}
	}
	groups := slices.Collect(slices.Chunk(windows, bitsBatchWindows))
	sums, errs := make([]float64, len(groups)), make([]error, len(groups))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(len(groups), runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			s := newScorer(m)
			for {
				g := int(next.Add(1)) - 1
				if g >= len(groups) {
					return
				}
				sums[g], errs[g] = s.score(groups[g])
			}
		})
	}
	wg.Wait()
	for g, group := range groups { // in order: the result is the same with any number of goroutines
		bits += sums[g]
		for _, w := range group {
			n += w.end - w.score
		}
	}
	return bits, n, errors.Join(errs...)
}

// scorer scores groups of windows, each group as one batch.
type scorer struct {
	m      *Model
	b      *Batch
	caches []*Cache
	rows   []Row
}

func newScorer(m *Model) *scorer {
	s := &scorer{m: m, b: m.NewBatch()}
	for range bitsBatchWindows {
		s.caches = append(s.caches, m.NewCache())
	}
	return s
}

func (s *scorer) score(group []window) (bits float64, err error) {
	s.rows = s.rows[:0]
	for i, w := range group {
		s.caches[i].Truncate(0)
		for p := w.begin; p < w.end; p++ {
			row := Row{Cache: s.caches[i], Pos: p - w.begin}
			if p > w.begin {
				row.Token = w.text[p-1]
			}
			s.rows = append(s.rows, row)
		}
	}
	logits, err := s.m.Step(s.b, s.rows)
	if err != nil {
		return 0, err
	}
	r := 0
	for _, w := range group {
		for p := w.begin; p < w.end; p++ {
			if p >= w.score {
				bits += codeLength(logits[r*s.m.Vocab:(r+1)*s.m.Vocab], w.text[p])
			}
			r++
		}
	}
	return bits, nil
}

// codeLength returns -log2 of the softmax share of the byte.
func codeLength(logits []float32, b byte) float64 {
	top := float64(slices.Max(logits))
	var sum float64
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	return (math.Log(sum) + top - float64(logits[b])) / math.Ln2
}

// Command bpb measures how well the model foretells Go source it has not seen:
// its bits per byte over a sample of the held-out files of the installed GOROOT,
// beside what xz -9 reaches on the same bytes.
//
// With --logits it prints the logits of a text instead (for
// examples/moe/train/compare.py), with --greedy a text's likeliest continuation.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/serry-project/serry/examples/moe/model"
)

type options struct {
	weights, goroot string
	sample          int
	json            bool
	logits, greedy  string
	length          int
}

// report is what --json prints.
type report struct {
	Weights      string  `json:"weights"`
	SHA256       string  `json:"sha256"`
	HeldOutFiles int     `json:"held_out_files"`
	HeldOutBytes int     `json:"held_out_bytes"`
	SampleFiles  int     `json:"sample_files"`
	SampleBytes  int     `json:"sample_bytes"`
	BitsPerByte  float64 `json:"bits_per_byte"`
	Seconds      float64 `json:"seconds"`
	// XZ is null when there is no xz; XZNote then says so.
	XZ     *float64 `json:"xz_bits_per_byte"`
	XZAll  *float64 `json:"xz_bits_per_byte_all_held_out"`
	XZNote string   `json:"xz_note,omitempty"`
}

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "bpb:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	var o options
	fs := flag.NewFlagSet("bpb", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&o.weights, "weights", "examples/moe/weights/model.safetensors", "the weight `file`")
	fs.StringVar(&o.goroot, "goroot", "", "the Go tree whose held-out files are read (default: what go env GOROOT prints)")
	fs.IntVar(&o.sample, "bytes", 8192, "sample this `number` of held-out bytes, at most 2048 of a file; 0 samples every file")
	fs.BoolVar(&o.json, "json", false, "print one JSON object")
	fs.StringVar(&o.logits, "logits", "", "print the logits of the text in this `file` (- is standard input) as JSON, and nothing else")
	fs.StringVar(&o.greedy, "greedy", "", "print the likeliest continuation of this `text`, and nothing else")
	fs.IntVar(&o.length, "n", 200, "most bytes --greedy prints")
	fs.Usage = func() {
		fmt.Fprintln(stderr, "bpb prints the model's bits per byte on Go source held out from its training.\n\nUsage: bpb [flags]")
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; bpb takes only flags, see --help", fs.Arg(0))
	}
	if o.sample < 0 {
		return fmt.Errorf("--bytes is %d, want 0 or more", o.sample)
	}
	m, err := model.Load(o.weights, nil)
	if err != nil {
		return fmt.Errorf("%w (name the weight file with --weights)", err)
	}
	switch {
	case o.logits != "":
		return printLogits(m, o.logits, stdin, stdout)
	case o.greedy != "":
		out, err := m.Greedy(o.greedy, o.length)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(stdout, "%s%s\n", o.greedy, out)
		return err
	}
	r, err := measure(m, o)
	if err != nil {
		return err
	}
	if o.json {
		return json.NewEncoder(stdout).Encode(r)
	}
	return printReport(stdout, r)
}

// measure scores the sample with the model and with xz.
func measure(m *model.Model, o options) (*report, error) {
	if o.goroot == "" {
		out, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			return nil, fmt.Errorf("asking go env GOROOT: %w; name the Go tree with --goroot", err)
		}
		o.goroot = strings.TrimSpace(string(out))
	}
	_, held, err := model.Corpus(o.goroot)
	if err != nil {
		return nil, err
	}
	if len(held) == 0 {
		return nil, fmt.Errorf("%s has no held-out Go files; name a whole Go tree with --goroot", o.goroot)
	}
	r := &report{Weights: o.weights, SHA256: fmt.Sprintf("%x", m.Digest), HeldOutFiles: len(held)}
	var all, text []byte
	for _, f := range held {
		all = append(all, f.Text...)
	}
	r.HeldOutBytes = len(all)
	if o.sample == 0 {
		o.sample = len(all)
	}
	var pieces [][]byte
	for _, f := range model.Sample(held, o.sample) {
		pieces = append(pieces, f.Text)
		text = append(text, f.Text...)
	}
	r.SampleFiles, r.SampleBytes = len(pieces), len(text)
	start := time.Now()
	bits, n, err := m.Bits(pieces)
	if err != nil {
		return nil, err
	}
	r.BitsPerByte, r.Seconds = bits/float64(n), time.Since(start).Seconds()
	if r.XZ, err = xz(text); err == nil {
		r.XZAll, err = xz(all)
	}
	if err != nil {
		r.XZNote = err.Error()
	}
	return r, nil
}

// xz returns the bits per byte that xz -9 needs for the text.
func xz(text []byte) (*float64, error) {
	path, err := exec.LookPath("xz")
	if err != nil {
		return nil, errors.New("xz is not installed, so there is nothing to compare with")
	}
	cmd := exec.Command(path, "-9", "--stdout")
	cmd.Stdin = bytes.NewReader(text)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("xz -9 failed: %w", err)
	}
	v := float64(len(out)) * 8 / float64(len(text))
	return &v, nil
}

func printReport(w io.Writer, r *report) error {
	xzLines := "xz -9:    " + r.XZNote
	if r.XZ != nil && r.XZAll != nil {
		xzLines = fmt.Sprintf("xz -9:    %.3f bits/byte on the same bytes, %.3f on all held-out bytes at once", *r.XZ, *r.XZAll)
	}
	_, err := fmt.Fprintf(w, "held out: %d files, %d bytes\nsample:   %d files, %d bytes\nmodel:    %.3f bits/byte (%.1f s)\n%s\n",
		r.HeldOutFiles, r.HeldOutBytes, r.SampleFiles, r.SampleBytes, r.BitsPerByte, r.Seconds, xzLines)
	return err
}

// printLogits prints {"vocab":V,"logits":[...]}: one row for the zero byte in
// front and one for each byte of the text.
func printLogits(m *model.Model, file string, stdin io.Reader, stdout io.Writer) error {
	var text []byte
	var err error
	if file == "-" {
		text, err = io.ReadAll(stdin)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return fmt.Errorf("reading the text for --logits: %w", err)
	}
	tokens := model.Prompt(string(text))
	if len(tokens) > m.Context {
		return fmt.Errorf("--logits: the text has %d bytes, at most %d fit the context", len(text), m.Context-1)
	}
	var rows []model.Row
	c := m.NewCache()
	for p, t := range tokens {
		rows = append(rows, model.Row{Cache: c, Pos: p, Token: t})
	}
	logits, err := m.Step(m.NewBatch(), rows)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(map[string]any{"vocab": m.Vocab, "logits": logits})
}

package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"strings"
)

// MaxHeader is the longest safetensors header, in bytes, that a reader of this
// package accepts.
const MaxHeader = 1 << 20

// maxDims bounds the rank of a tensor.
const maxDims = 8

// TensorInfo describes one tensor of a safetensors file.
type TensorInfo struct {
	Name  string
	DType string // "F16", "BF16", "F32", "U8" or "I32"
	Shape []int
	begin int64 // within the data section
	end   int64
}

// Elements returns the number of values of the tensor.
func (t TensorInfo) Elements() int {
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Tensors is an open safetensors file whose header has been checked: every
// tensor lies within the file, its size agrees with its shape and dtype, and
// the tensors cover the data section without overlap or gap. Values are read
// on demand. It is safe for concurrent use when its io.ReaderAt is.
type Tensors struct {
	Metadata map[string]string
	name     string
	r        io.ReaderAt
	data     int64 // file offset of the data section
	infos    map[string]TensorInfo
}

// dtypeSize maps the dtypes this reader knows to the bytes of a value.
var dtypeSize = map[string]int64{"F16": 2, "BF16": 2, "F32": 4, "U8": 1, "I32": 4}

// NewTensors reads and checks the safetensors header of the size bytes of r.
// The name is what errors call the file. An error says what is wrong with the
// file, naming the tensor where there is one, what was wanted and what was
// found.
func NewTensors(name string, r io.ReaderAt, size int64) (*Tensors, error) {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%s: not a usable safetensors file: %s", name, fmt.Sprintf(format, a...))
	}
	if size < 8 {
		return nil, bad("the header length wants 8 bytes, the file has %d", size)
	}
	var word [8]byte
	if err := readAt(r, word[:], 0); err != nil {
		return nil, fmt.Errorf("%s: reading the header length: %w", name, err)
	}
	n := binary.LittleEndian.Uint64(word[:])
	if n > MaxHeader {
		return nil, bad("the header claims %d bytes, at most %d are accepted (is this another format?)", n, MaxHeader)
	}
	if int64(n) > size-8 {
		return nil, bad("the header claims %d bytes, the file has %d after the length: it is truncated", n, size-8)
	}
	head := make([]byte, n)
	if err := readAt(r, head, 8); err != nil {
		return nil, fmt.Errorf("%s: reading the header of %d bytes: %w", name, n, err)
	}
	t := &Tensors{name: name, r: r, data: 8 + int64(n), infos: map[string]TensorInfo{}}
	if err := t.parse(head, size-t.data); err != nil {
		return nil, bad("%s", err)
	}
	return t, nil
}

// readAt fills b from off; a short read is io.ErrUnexpectedEOF.
func readAt(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// parse fills t from the header; the data section has size bytes.
func (t *Tensors) parse(head []byte, size int64) error {
	entries, err := objectEntries(head)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.key == "__metadata__" {
			if err := strictDecode(e.raw, &t.Metadata); err != nil {
				return fmt.Errorf("__metadata__ must map strings to strings: %w", err)
			}
			continue
		}
		info, err := parseInfo(e.key, e.raw, size)
		if err != nil {
			return err
		}
		t.infos[e.key] = info
	}
	// Non-empty tensors, sorted by offset, must follow each other exactly.
	order := make([]TensorInfo, 0, len(t.infos))
	for _, i := range t.infos {
		order = append(order, i)
	}
	sort.Slice(order, func(a, b int) bool {
		x, y := order[a], order[b]
		if x.begin != y.begin {
			return x.begin < y.begin
		}
		if x.end != y.end {
			return x.end < y.end
		}
		return x.Name < y.Name
	})
	at, last := int64(0), "the start of the data"
	for _, i := range order {
		switch {
		case i.begin < at:
			return fmt.Errorf("tensor %q: its data at %d overlaps %s, which ends at %d", i.Name, i.begin, last, at)
		case i.begin > at:
			return fmt.Errorf("tensor %q: its data at %d leaves a gap after %s, which ends at %d", i.Name, i.begin, last, at)
		}
		at, last = i.end, fmt.Sprintf("tensor %q", i.Name)
	}
	if at != size {
		return fmt.Errorf("the tensors end at %d, the data section has %d bytes: %d bytes belong to no tensor", at, size, size-at)
	}
	return nil
}

// parseInfo reads one tensor's header entry against a data section of size bytes.
func parseInfo(name string, raw json.RawMessage, size int64) (TensorInfo, error) {
	var f struct {
		DType   *string   `json:"dtype"`
		Shape   *[]int64  `json:"shape"`
		Offsets *[2]int64 `json:"data_offsets"`
	}
	if err := strictDecode(raw, &f); err != nil {
		return TensorInfo{}, fmt.Errorf("tensor %q: %w", name, err)
	}
	if f.DType == nil || f.Shape == nil || f.Offsets == nil {
		return TensorInfo{}, fmt.Errorf("tensor %q: wants dtype, shape and data_offsets, one is missing", name)
	}
	unit, ok := dtypeSize[*f.DType]
	if !ok {
		return TensorInfo{}, fmt.Errorf("tensor %q: dtype %q is not one of F16, BF16, F32, U8, I32", name, *f.DType)
	}
	if len(*f.Shape) > maxDims {
		return TensorInfo{}, fmt.Errorf("tensor %q: %d dimensions, at most %d are accepted", name, len(*f.Shape), maxDims)
	}
	info := TensorInfo{Name: name, DType: *f.DType, Shape: []int{}, begin: f.Offsets[0], end: f.Offsets[1]}
	want := unit
	for _, d := range *f.Shape {
		if d < 0 || (d > 0 && want > math.MaxInt32/d) {
			return TensorInfo{}, fmt.Errorf("tensor %q: shape %v is negative or too large", name, *f.Shape)
		}
		want *= d
		info.Shape = append(info.Shape, int(d))
	}
	if info.begin < 0 || info.end < info.begin {
		return TensorInfo{}, fmt.Errorf("tensor %q: data_offsets [%d, %d] are not a range", name, info.begin, info.end)
	}
	if info.end > size {
		return TensorInfo{}, fmt.Errorf("tensor %q: its data ends at %d, the data section has %d bytes: the file is truncated", name, info.end, size)
	}
	if info.end-info.begin != want {
		return TensorInfo{}, fmt.Errorf("tensor %q: %s of shape %v wants %d bytes, data_offsets give %d",
			name, info.DType, info.Shape, want, info.end-info.begin)
	}
	return info, nil
}

type entry struct {
	key string
	raw json.RawMessage
}

// objectEntries splits a JSON object, refusing a key that occurs twice and
// anything but blanks after it.
func objectEntries(b []byte) ([]entry, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	tok, err := d.Token()
	if err != nil || tok != json.Delim('{') {
		return nil, fmt.Errorf("the header is not a JSON object (is this another format?)")
	}
	var out []entry
	seen := map[string]bool{}
	for d.More() {
		k, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("the header is not valid JSON: %w", err)
		}
		e := entry{key: k.(string)}
		if seen[e.key] {
			return nil, fmt.Errorf("the header names tensor %q twice", e.key)
		}
		seen[e.key] = true
		if err := d.Decode(&e.raw); err != nil {
			return nil, fmt.Errorf("the header is not valid JSON at %q: %w", e.key, err)
		}
		out = append(out, e)
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("the header is not valid JSON: %w", err)
	}
	if rest := strings.TrimRight(string(b[d.InputOffset():]), " \t\r\n"); rest != "" {
		return nil, fmt.Errorf("the header has %d bytes after its JSON object", len(rest))
	}
	return out, nil
}

// strictDecode decodes raw into v and refuses unknown fields.
func strictDecode(raw []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	return d.Decode(v)
}

// Names returns the names of all tensors, sorted.
func (t *Tensors) Names() []string {
	out := make([]string, 0, len(t.infos))
	for n := range t.infos {
		out = append(out, n)
	}
	sort.Strings(out)
	return out
}

// Info returns what the header says of the named tensor.
func (t *Tensors) Info(name string) (TensorInfo, bool) {
	i, ok := t.infos[name]
	return i, ok
}

// check returns the named tensor when its shape is the wanted one (a negative
// dimension fits any) and its dtype is among dtypes.
func (t *Tensors) check(name string, dtypes []string, shape ...int) (TensorInfo, error) {
	i, ok := t.infos[name]
	if !ok {
		return i, fmt.Errorf("%s: tensor %q is missing: want %s of shape %v, the file has %d other tensors",
			t.name, name, strings.Join(dtypes, " or "), shape, len(t.infos))
	}
	same := len(i.Shape) == len(shape)
	for k := 0; same && k < len(shape); k++ {
		same = shape[k] < 0 || shape[k] == i.Shape[k]
	}
	if !same {
		return i, fmt.Errorf("%s: tensor %q has shape %v, want %v", t.name, name, i.Shape, shape)
	}
	for _, d := range dtypes {
		if d == i.DType {
			return i, nil
		}
	}
	return i, fmt.Errorf("%s: tensor %q has dtype %s, want %s", t.name, name, i.DType, strings.Join(dtypes, " or "))
}

func (t *Tensors) bytes(i TensorInfo) ([]byte, error) {
	b := make([]byte, i.end-i.begin)
	if err := readAt(t.r, b, t.data+i.begin); err != nil {
		return nil, fmt.Errorf("%s: reading the %d bytes of tensor %q: %w", t.name, len(b), i.Name, err)
	}
	return b, nil
}

// Float32 returns the values of an F16, BF16 or F32 tensor of the wanted shape
// (a negative dimension fits any), widened to float32 without rounding. A value
// that is not finite is an error.
func (t *Tensors) Float32(name string, shape ...int) ([]float32, error) {
	i, err := t.check(name, []string{"F16", "BF16", "F32"}, shape...)
	if err != nil {
		return nil, err
	}
	b, err := t.bytes(i)
	if err != nil {
		return nil, err
	}
	out := make([]float32, i.Elements())
	for k := range out {
		switch i.DType {
		case "F16":
			out[k] = half(binary.LittleEndian.Uint16(b[2*k:]))
		case "BF16":
			out[k] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*k:])) << 16)
		default:
			out[k] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*k:]))
		}
		if v := out[k]; v-v != 0 { // NaN or an infinity
			return nil, fmt.Errorf("%s: tensor %q holds %v at index %d, want finite values", t.name, name, v, k)
		}
	}
	return out, nil
}

// Int32 returns the values of an I32 tensor of the wanted shape.
func (t *Tensors) Int32(name string, shape ...int) ([]int32, error) {
	i, err := t.check(name, []string{"I32"}, shape...)
	if err != nil {
		return nil, err
	}
	b, err := t.bytes(i)
	if err != nil {
		return nil, err
	}
	out := make([]int32, i.Elements())
	for k := range out {
		out[k] = int32(binary.LittleEndian.Uint32(b[4*k:]))
	}
	return out, nil
}

// Bytes returns the values of a U8 tensor of the wanted shape.
func (t *Tensors) Bytes(name string, shape ...int) ([]byte, error) {
	i, err := t.check(name, []string{"U8"}, shape...)
	if err != nil {
		return nil, err
	}
	return t.bytes(i)
}

// half widens an IEEE 754 binary16 value.
func half(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp := uint32(h>>10) & 0x1f
	frac := uint32(h & 0x3ff)
	switch exp {
	case 0: // zero or subnormal: frac * 2^-24, exact in float32
		v := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(v) | sign)
	case 31:
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

// OpenTensors opens the safetensors file at path and checks its header. Close
// the returned closer when no more tensors are needed.
func OpenTensors(path string) (*Tensors, io.Closer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("opening the weights: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, nil, fmt.Errorf("opening the weights: %w", err)
	}
	if !st.Mode().IsRegular() {
		f.Close()
		return nil, nil, fmt.Errorf("opening the weights: %s is not a regular file", path)
	}
	t, err := NewTensors(path, f, st.Size())
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return t, f, nil
}

package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fileWith returns a safetensors file with the header and n bytes of data.
func fileWith(header string, n int) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(out, header...), make([]byte, n)...)
}

func openBytes(b []byte) (*Tensors, error) {
	return NewTensors("w.safetensors", bytes.NewReader(b), int64(len(b)))
}

func TestTensorsRefuses(t *testing.T) {
	one := `{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}`
	good := fileWith(one, 12)
	_, err := openBytes(good)
	require.NoError(t, err)

	huge := binary.LittleEndian.AppendUint64(nil, 1<<40)
	for _, tc := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "the header length wants 8 bytes, the file has 0"},
		{"over-long header", append(huge, good...), "the header claims 1099511627776 bytes, at most 1048576 are accepted"},
		{"cut header", good[:20], "the header claims 57 bytes, the file has 12 after the length: it is truncated"},
		{"cut data", good[:len(good)-1], `tensor "a": its data ends at 12, the data section has 11 bytes: the file is truncated`},
		{"data without tensor", fileWith(one, 13), "the tensors end at 12, the data section has 13 bytes: 1 bytes belong to no tensor"},
		{"another format", []byte("GGUF\x00\x00\x00\x00tensors"), "the header claims 1179993927 bytes"},
		{"not an object", fileWith(`[1]`, 0), "the header is not a JSON object"},
		{"broken JSON", fileWith(`{"a":{]`, 0), "the header is not valid JSON"},
		{"unended JSON", fileWith(`{`, 0), "the header is not valid JSON"},
		{"after the object", fileWith(`{} x`, 0), "the header has 2 bytes after its JSON object"},
		{"twice", fileWith(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}`, 0), `the header names tensor "a" twice`},
		{"foreign field", fileWith(`{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"q":1}}`, 0), `tensor "a": json: unknown field "q"`},
		{"no shape", fileWith(`{"a":{"dtype":"U8","data_offsets":[0,0]}}`, 0), `tensor "a": wants dtype, shape and data_offsets, one is missing`},
		{"dtype", fileWith(`{"a":{"dtype":"Q4","shape":[0],"data_offsets":[0,0]}}`, 0), `tensor "a": dtype "Q4" is not one of F16, BF16, F32, U8, I32`},
		{"rank", fileWith(`{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}`, 1), `tensor "a": 9 dimensions, at most 8`},
		{"negative", fileWith(`{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}`, 1), `tensor "a": shape [-1] is negative or too large`},
		{"overflow", fileWith(`{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0), `tensor "a": shape [4294967296 4294967296] is negative or too large`},
		{"no range", fileWith(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}`, 1), `tensor "a": data_offsets [1, 0] are not a range`},
		{"size", fileWith(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4), `tensor "a": F32 of shape [2] wants 8 bytes, data_offsets give 4`},
		{"overlap", fileWith(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}`, 6),
			`tensor "b": its data at 2 overlaps tensor "a", which ends at 4`},
		{"gap", fileWith(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, 3),
			`tensor "b": its data at 2 leaves a gap after tensor "a", which ends at 1`},
		{"metadata", fileWith(`{"__metadata__":{"a":1}}`, 0), "__metadata__ must map strings to strings"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := openBytes(tc.file)
			require.ErrorContains(t, err, tc.want)
			require.ErrorContains(t, err, "w.safetensors: ")
		})
	}
}

func TestTensorsValues(t *testing.T) {
	header := `{"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]},` +
		`"e":{"dtype":"F32","shape":[3,0],"data_offsets":[6,6]},"i":{"dtype":"I32","shape":[],"data_offsets":[6,10]},"__metadata__":{"k":"v"}}  `
	f := fileWith(header, 0)
	f = append(f, 0x00, 0x3c, 0x01, 0x80, 0xc0, 0xbf, 0xfe, 0xff, 0xff, 0xff)
	w, err := openBytes(f)
	require.NoError(t, err)
	require.Equal(t, []string{"b", "e", "h", "i"}, w.Names())
	require.Equal(t, "v", w.Metadata["k"])

	h, err := w.Float32("h", -1)
	require.NoError(t, err)
	require.Equal(t, []float32{1, -1.0 / (1 << 24)}, h)
	b, err := w.Float32("b", 1)
	require.NoError(t, err)
	require.Equal(t, []float32{-1.5}, b)
	i, err := w.Int32("i")
	require.NoError(t, err)
	require.Equal(t, []int32{-2}, i)

	_, err = w.Float32("x", 1)
	require.EqualError(t, err, `w.safetensors: tensor "x" is missing: want F16 or BF16 or F32 of shape [1], the file has 4 other tensors`)
	_, err = w.Float32("h", 3)
	require.EqualError(t, err, `w.safetensors: tensor "h" has shape [2], want [3]`)
	_, err = w.Bytes("h", 2)
	require.EqualError(t, err, `w.safetensors: tensor "h" has dtype F16, want U8`)

	f[len(f)-9] = 0x7c // h[0] becomes an infinity
	w, err = openBytes(f)
	require.NoError(t, err)
	_, err = w.Float32("h", 2)
	require.EqualError(t, err, `w.safetensors: tensor "h" holds +Inf at index 0, want finite values`)
}

// tiny describes the smallest model Load accepts; every weight is zero.
type tiny struct {
	config Config
	shapes map[string][]int
	dtype  map[string]string
	meta   map[string]string
}

func newTiny() *tiny {
	c := Config{Vocab: 256, Hidden: 8, Layers: 1, Heads: 1, Experts: 8, TopK: 2, FFN: 16, Context: 8, RopeBase: 10000, Eps: 1e-6}
	s := map[string][]int{"embed": {256, 8}, "norm": {8}, "head": {256, 8}}
	for _, n := range []string{"attn_norm", "ffn_norm", "q_norm", "k_norm"} {
		s["layers.0."+n] = []int{8}
	}
	for _, n := range []string{"wq", "wk", "wv", "wo", "router"} {
		s["layers.0."+n] = []int{8, 8}
	}
	for e := range 8 {
		s[fmt.Sprintf("layers.0.experts.%d.up", e)] = []int{16, 8}
		s[fmt.Sprintf("layers.0.experts.%d.down", e)] = []int{8, 16}
	}
	return &tiny{config: c, shapes: s, dtype: map[string]string{}, meta: map[string]string{}}
}

func (w *tiny) write(t *testing.T) string {
	header := map[string]any{}
	at := 0
	var names []string
	for n := range w.shapes {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		dtype := w.dtype[n]
		if dtype == "" {
			dtype = "BF16"
		}
		size := int(dtypeSize[dtype])
		for _, d := range w.shapes[n] {
			size *= d
		}
		header[n] = map[string]any{"dtype": dtype, "shape": w.shapes[n], "data_offsets": []int{at, at + size}}
		at += size
	}
	if w.meta != nil {
		if w.meta["config"] == "" {
			c, err := json.Marshal(w.config)
			require.NoError(t, err)
			w.meta["config"] = string(c)
		}
		header["__metadata__"] = w.meta
	}
	text, err := json.Marshal(header)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "tiny.safetensors")
	require.NoError(t, os.WriteFile(path, fileWith(string(text), at), 0o600))
	return path
}

func TestLoadRefuses(t *testing.T) {
	m, err := Load(newTiny().write(t), nil)
	require.NoError(t, err)
	require.Equal(t, int64(8*2*8*16*4), m.ResidentExpertBytes())
	_, err = m.Greedy("ab", 20)
	require.NoError(t, err)

	for _, tc := range []struct {
		name string
		edit func(*tiny)
		want string
	}{
		{"no config", func(w *tiny) { w.meta = nil }, `the metadata have no "config": not a file written by examples/moe/train`},
		{"config not JSON", func(w *tiny) { w.meta["config"] = "8 layers" }, "the metadata's config 8 layers: "},
		{"config field", func(w *tiny) { w.meta["config"] = `{"width":8}` }, `unknown field "width"`},
		{"no layers", func(w *tiny) { w.config.Layers = 0 }, "the metadata's config: layers is 0, want a multiple of 1 up to 64"},
		{"odd width", func(w *tiny) { w.config.FFN = 14 }, "ffn is 14, want a multiple of 4 up to 16384"},
		{"heads", func(w *tiny) { w.config.Heads = 3 }, "hidden 8 over 3 heads: want a multiple of 4 for each head"},
		{"top_k", func(w *tiny) { w.config.TopK = 9 }, "top_k is 9, want at most the 8 experts"},
		{"eps", func(w *tiny) { w.config.Eps = 0 }, "rope_base 10000 and eps 0: want"},
		{"missing dense", func(w *tiny) { delete(w.shapes, "layers.0.wq") },
			`tensor "layers.0.wq" is missing: want F16 or BF16 or F32 of shape [8 8], the file has 27 other tensors`},
		{"missing expert", func(w *tiny) { delete(w.shapes, "layers.0.experts.3.down") },
			`tensor "layers.0.experts.3.down" is missing`},
		{"shape", func(w *tiny) { w.shapes["layers.0.experts.7.up"] = []int{8, 16} },
			`tensor "layers.0.experts.7.up" has shape [8 16], want [16 8]`},
		{"dtype", func(w *tiny) { w.dtype["head"] = "I32" }, `tensor "head" has dtype I32, want F16 or BF16 or F32`},
		{"foreign", func(w *tiny) { w.shapes["layers.1.wq"] = []int{8, 8} },
			`tensor "layers.1.wq" is no part of a model of 1 layers with 8 experts: not these weights`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newTiny()
			tc.edit(w)
			path := w.write(t)
			_, err := Load(path, func(_, e int) bool { return e == 0 })
			require.ErrorContains(t, err, tc.want)
			require.True(t, strings.HasPrefix(err.Error(), path+": "), "%v should begin with the file", err)
		})
	}

	_, err = Load(filepath.Join(t.TempDir(), "none"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Load(t.TempDir(), nil)
	require.ErrorContains(t, err, "is not a regular file")
}

func TestLoadExpertsRefusesOtherWeights(t *testing.T) {
	path := newTiny().write(t)
	m, err := Load(path, func(int, int) bool { return false })
	require.NoError(t, err)
	require.Zero(t, m.ResidentExpertBytes())

	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[len(b)-1] ^= 1
	require.NoError(t, os.WriteFile(path, b, 0o600))
	all := func(int, int) bool { return true }
	require.ErrorContains(t, m.LoadExperts(all), "the weights changed since they were loaded")
	require.NoError(t, os.Remove(path))
	require.ErrorIs(t, m.LoadExperts(all), os.ErrNotExist)
}

func FuzzTensors(f *testing.F) {
	f.Add(fileWith(`{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"__metadata__":{"k":"v"}}`, 12))
	f.Add(fileWith(`{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}}`, 8))
	f.Add(fileWith(`{`, 1))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := openBytes(b)
		if err != nil {
			require.Contains(t, err.Error(), "w.safetensors")
			return
		}
		sum := 0
		for _, n := range w.Names() {
			i, ok := w.Info(n)
			require.True(t, ok)
			sum += i.Elements() * int(dtypeSize[i.DType])
			switch i.DType {
			case "U8":
				v, err := w.Bytes(n, i.Shape...)
				require.NoError(t, err)
				require.Len(t, v, i.Elements())
			case "I32":
				v, err := w.Int32(n, i.Shape...)
				require.NoError(t, err)
				require.Len(t, v, i.Elements())
			default:
				v, err := w.Float32(n, i.Shape...)
				if err == nil {
					require.Len(t, v, i.Elements())
				}
			}
		}
		require.LessOrEqual(t, sum, len(b)-8)
	})
}

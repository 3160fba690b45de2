package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	weightsPath   = "../weights/model.safetensors"
	referencePath = "../weights/reference.safetensors"
)

var shared = sync.OnceValues(func() (*Model, error) { return Load(weightsPath, nil) })

func loadShared(t testing.TB) *Model {
	t.Helper()
	m, err := shared()
	require.NoError(t, err)
	return m
}

func openReference(t testing.TB) *Tensors {
	t.Helper()
	ref, f, err := OpenTensors(referencePath)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return ref
}

// prefill returns the logits [len(tokens)][Vocab] of a sequence, computed in
// chunks of the given size.
func prefill(t testing.TB, m *Model, tokens []byte, chunk int) []float32 {
	t.Helper()
	b, c := m.NewBatch(), m.NewCache()
	var out []float32
	for at := 0; at < len(tokens); at += chunk {
		var rows []Row
		for p := at; p < min(at+chunk, len(tokens)); p++ {
			rows = append(rows, Row{Cache: c, Pos: p, Token: tokens[p]})
		}
		logits, err := m.Step(b, rows)
		require.NoError(t, err)
		out = append(out, logits...)
	}
	require.Equal(t, len(tokens), c.Len())
	return out
}

// sameBits fails unless got and want agree in every bit.
func sameBits(t require.TestingT, want, got []float32, what string) {
	require.Equal(t, len(want), len(got), what)
	for i := range want {
		if math.Float32bits(want[i]) != math.Float32bits(got[i]) {
			require.FailNowf(t, what, "value %d: want %x (%v), got %x (%v)", i,
				math.Float32bits(want[i]), want[i], math.Float32bits(got[i]), got[i])
		}
	}
}

func TestLogitsMatchPyTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("long, and no goroutine in it")
	}
	m, ref := loadShared(t), openReference(t)
	n, err := strconv.Atoi(ref.Metadata["texts"])
	require.NoError(t, err)
	var worst float64
	for i := range n {
		text, err := ref.Bytes(fmt.Sprintf("text.%d", i), -1)
		require.NoError(t, err)
		want, err := ref.Float32(fmt.Sprintf("logits.%d", i), -1, m.Vocab)
		require.NoError(t, err)
		got := prefill(t, m, Prompt(string(text)), 64)
		got = got[len(got)-len(want):]
		for k := range want {
			worst = max(worst, math.Abs(float64(want[k]-got[k])))
		}
		require.LessOrEqual(t, worst, 1e-3, "text %d of %d bytes", i, len(text))
	}
	t.Logf("largest difference over %d texts: %.2g", n, worst)
}

func TestBitsPerByteMatchPyTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("long, and no goroutine in it")
	}
	m, ref := loadShared(t), openReference(t)
	want, err := strconv.ParseFloat(ref.Metadata["bits_per_byte"], 64)
	require.NoError(t, err)
	sample, err := ref.Bytes("sample", -1)
	require.NoError(t, err)
	sizes, err := ref.Int32("pieces", -1)
	require.NoError(t, err)
	var pieces [][]byte
	for at, i := 0, 0; i < len(sizes); i++ {
		pieces = append(pieces, sample[at:at+int(sizes[i])])
		at += int(sizes[i])
	}
	bits, n, err := m.Bits(pieces)
	require.NoError(t, err)
	require.Equal(t, len(sample), n)
	got := bits / float64(n)
	t.Logf("%d bytes: Go %.6f, PyTorch %.6f bits/byte", n, got, want)
	require.InDelta(t, want, got, 0.0005)
	require.LessOrEqual(t, got, 2.2, "the weights should be retrained")
}

// TestGolden pins the exact bits, so that a compiler that fuses operations, or a
// change of a kernel's order, shows. After retraining, put the printed value
// here.
func TestGolden(t *testing.T) {
	m := loadShared(t)
	h := sha256.New()
	for _, v := range prefill(t, m, Prompt(goldenText), 16) {
		var b [4]byte
		binary.LittleEndian.PutUint32(b[:], math.Float32bits(v))
		h.Write(b[:])
	}
	require.Equal(t, golden, hex.EncodeToString(h.Sum(nil)[:8]), "the logits' bits have changed (on %s)", runtime.GOARCH)
}

// golden begins the SHA-256 of the logits' bits of goldenText.
const golden = "7ea5224e48a75397"

const goldenText = "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfor i := range 10 {\n"

func TestGreedyReadsLikeGo(t *testing.T) {
	if testing.Short() {
		t.Skip("long, and no goroutine in it")
	}
	m := loadShared(t)
	const prompt = "// Copyright 2009 The Go Authors."
	out, err := m.Greedy(prompt, 130)
	require.NoError(t, err)
	t.Logf("%s", out)
	require.True(t, strings.HasPrefix(string(out), " All rights reserved.\n"+
		"// Use of this source code is governed by a BSD-style\n"+
		"// license that can be found in the LICENSE file.\n"), "the licence should follow, got %q", out)

	again, err := m.Greedy(prompt, 130)
	require.NoError(t, err)
	require.Equal(t, out, again)
}

func TestGreedyLimits(t *testing.T) {
	m := loadShared(t)
	_, err := m.Greedy(strings.Repeat("x", m.Context), 1)
	require.ErrorContains(t, err, "does not fit the context of 512; shorten it to 511")

	out, err := m.Greedy(strings.Repeat("if a {\n", 72), 100) // 504 bytes and the zero byte
	require.NoError(t, err)
	require.LessOrEqual(t, len(out), m.Context-504)

	out, err = m.Greedy("x", 0)
	require.NoError(t, err)
	require.Empty(t, out)
}

func TestArgmaxTakesTheLowest(t *testing.T) {
	require.Equal(t, byte(1), Argmax([]float32{0, 3, 3, 2}))
	require.Equal(t, byte(0), Argmax([]float32{-1, -1}))
}

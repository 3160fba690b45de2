// Package storetest is what every rendezvous.Store must do, as one test suite.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/serry-project/serry/rendezvous"
)

// Fresh makes an empty store and returns how to get a handle of it, as another process would; the test closes each. It
// may be called by several tests at once.
type Fresh func(t *testing.T) (open func() rendezvous.Store)

// slack is how late a call may end after its context. It is wide since test machines are shared.
const slack = 10 * time.Second

// Run runs the suite, and again through a Prefix.
func Run(t *testing.T, fresh Fresh) {
	t.Run("plain", func(t *testing.T) { Plain(t, fresh) })
	t.Run("prefixed", func(t *testing.T) {
		suite(t, tests[:forPrefix], func(t *testing.T) func() rendezvous.Store {
			open := fresh(t)
			return func() rendezvous.Store { return rendezvous.Prefix(open(), "a/b") }
		})
	})
	t.Run("prefixes apart", func(t *testing.T) { prefixesApart(t, fresh) })
}

// Plain runs the suite without a Prefix.
func Plain(t *testing.T, fresh Fresh) { suite(t, tests, fresh) }

type test struct {
	name string
	run  func(t *testing.T, open func() rendezvous.Store)
}

// The first forPrefix are those that a prefix could break.
const forPrefix = 6

var tests = []test{
	{"SetGet", setGet},
	{"WaitForMany", waitForMany},
	{"WaitsEndWithContext", waitsEnd},
	{"CompareAndSet", compareAndSet},
	{"LikeAMap", likeAMap},
	{"Close", closes},
	{"GetWaits", getWaits},
	{"WaitHoldsUpNothing", waitHoldsUpNothing},
	{"ManyWaiters", manyWaiters},
	{"Add", add},
	{"AddConcurrently", addConcurrently},
	{"AddNotNumber", addNotNumber},
	{"CompareAndSetHasOneWinner", oneWinner},
	{"CompareAndSetLosesNothing", losesNothing},
	{"Ownership", ownership},
	{"Limits", limits},
}

func suite(t *testing.T, tests []test, fresh Fresh) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // most of the time a store waits
			open := fresh(t)
			test.run(t, func() rendezvous.Store {
				s := open()
				t.Cleanup(func() { require.NoError(t, s.Close()) })
				return s
			})
		})
	}
}

// within is a context for calls that need not wait long.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func short() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 40*time.Millisecond)
}

func setGet(t *testing.T, open func() rendezvous.Store) {
	ctx, a, b := within(t), open(), open()
	values := map[string][]byte{
		"plain":             []byte("value"),
		"a/b/c":             []byte("slashes"),
		"..":                []byte("dots"),
		"with space % é \n": []byte("odd"),
		"\x00\xff":          {0, 255, '\n'},
		"empty":             {},
	}
	for k, v := range values {
		require.NoError(t, a.Set(ctx, k, v))
	}
	for k, v := range values {
		got, err := b.Get(ctx, k)
		require.NoError(t, err)
		require.NotNil(t, got)
		require.Equal(t, v, got, "key %q", k)
	}
	require.NoError(t, b.Set(ctx, "plain", []byte("other")))
	got, err := a.Get(ctx, "plain")
	require.NoError(t, err)
	require.Equal(t, "other", string(got))
}

func getWaits(t *testing.T, open func() rendezvous.Store) {
	ctx, a, b := within(t), open(), open()
	for i, set := range []func(key string) error{
		func(k string) error { return b.Set(ctx, k, []byte("7")) },
		func(k string) error { _, err := b.Add(ctx, k, 7); return err },
		func(k string) error { _, err := b.CompareAndSet(ctx, k, nil, []byte("7")); return err },
	} {
		key := strconv.Itoa(i)
		var g errgroup.Group
		g.Go(func() error {
			v, err := a.Get(ctx, key)
			if err == nil && string(v) != "7" {
				err = fmt.Errorf("got %q", v)
			}
			return err
		})
		time.Sleep(5 * time.Millisecond) // so that the get mostly comes first
		require.NoError(t, set(key))
		require.NoError(t, g.Wait())
	}
}

func waitForMany(t *testing.T, open func() rendezvous.Store) {
	ctx, a, b := within(t), open(), open()
	require.NoError(t, a.Wait(ctx))
	keys := []string{"x", "y", "z", "x"}
	var g errgroup.Group
	g.Go(func() error { return a.Wait(ctx, keys...) })
	for _, k := range keys {
		require.NoError(t, b.Set(ctx, k, nil))
	}
	require.NoError(t, g.Wait())
	require.NoError(t, b.Wait(ctx, keys...))
}

func waitsEnd(t *testing.T, open func() rendezvous.Store) {
	s := open()
	require.NoError(t, s.Set(within(t), "there", nil))
	calls := map[string]func(context.Context) error{
		"get":  func(ctx context.Context) error { _, err := s.Get(ctx, "missing"); return err },
		"wait": func(ctx context.Context) error { return s.Wait(ctx, "there", "missing") },
	}
	for name, call := range calls {
		ctx, cancel := short()
		begin := time.Now()
		err := call(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded, name)
		require.Less(t, time.Since(begin), slack, name)
		var e *rendezvous.Error
		require.ErrorAs(t, err, &e, name)
		require.Equal(t, name, e.Op)
		require.NotEmpty(t, e.Store, name)
		require.NotEmpty(t, e.Hint, name)
		require.Contains(t, err.Error(), e.Store)

		ctx, cancel = context.WithCancel(context.Background())
		time.AfterFunc(10*time.Millisecond, cancel)
		require.ErrorIs(t, call(ctx), context.Canceled, name)
	}
	_, err := s.Get(within(t), "there") // the store is as good as before
	require.NoError(t, err)

	over, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, s.Set(over, "k", nil), context.Canceled)
	_, err = s.Add(over, "k", 1)
	require.ErrorIs(t, err, context.Canceled)
	_, err = s.CompareAndSet(over, "k", nil, nil)
	require.ErrorIs(t, err, context.Canceled)
}

func waitHoldsUpNothing(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	var g errgroup.Group
	for i := range 8 {
		g.Go(func() error { _, err := s.Get(ctx, fmt.Sprint("later", i)); return err })
	}
	for i := range 8 {
		require.NoError(t, s.Set(ctx, "now", []byte("v")))
		v, err := s.Get(ctx, "now")
		require.NoError(t, err)
		require.Equal(t, "v", string(v))
		require.NoError(t, s.Set(ctx, fmt.Sprint("later", i), nil))
	}
	require.NoError(t, g.Wait())
}

func manyWaiters(t *testing.T, open func() rendezvous.Store) {
	const waiters = 24
	ctx, setter := within(t), open()
	stores := []rendezvous.Store{open(), open(), open(), open()}
	var g errgroup.Group
	for i := range waiters {
		g.Go(func() error {
			v, err := stores[i%len(stores)].Get(ctx, "go")
			if err == nil && string(v) != "now" {
				err = fmt.Errorf("got %q", v)
			}
			return err
		})
	}
	time.Sleep(5 * time.Millisecond)
	require.NoError(t, setter.Set(ctx, "go", []byte("now")))
	require.NoError(t, g.Wait())
}

func add(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	for _, step := range []struct{ delta, want int64 }{{5, 5}, {-7, -2}, {0, -2}, {1 << 40, 1<<40 - 2}} {
		n, err := s.Add(ctx, "n", step.delta)
		require.NoError(t, err)
		require.Equal(t, step.want, n)
		v, err := s.Get(ctx, "n")
		require.NoError(t, err)
		require.Equal(t, strconv.FormatInt(step.want, 10), string(v))
	}
	require.NoError(t, s.Set(ctx, "m", []byte("41")))
	n, err := s.Add(ctx, "m", 1)
	require.NoError(t, err)
	require.EqualValues(t, 42, n)
}

func addConcurrently(t *testing.T, open func() rendezvous.Store) {
	const workers, each = 6, 20
	ctx := within(t)
	var mu sync.Mutex
	seen := map[int64]bool{}
	var g errgroup.Group
	shared := open()
	for w := range workers {
		s := shared
		if w%2 == 0 {
			s = open()
		}
		g.Go(func() error {
			for range each {
				n, err := s.Add(ctx, "n", 1)
				if err != nil {
					return err
				}
				mu.Lock()
				seen[n] = true
				mu.Unlock()
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	require.Len(t, seen, workers*each)
	require.True(t, seen[workers*each])
}

func addNotNumber(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	require.NoError(t, s.Set(ctx, "text", []byte("abc")))
	_, err := s.Add(ctx, "text", 1)
	require.ErrorIs(t, err, rendezvous.ErrNotNumber)
	require.Contains(t, err.Error(), "text")
	v, err := s.Get(ctx, "text")
	require.NoError(t, err)
	require.Equal(t, "abc", string(v))
}

func compareAndSet(t *testing.T, open func() rendezvous.Store) {
	ctx, s, other := within(t), open(), open()
	for _, step := range []struct {
		key, expected, desired string
		want                   any
	}{
		{"k", "old", "new", nil},    // nothing there, something expected
		{"k", "", "first", "first"}, // nothing there, nothing expected
		{"k", "", "second", "first"},
		{"k", "wrong", "second", "first"},
		{"k", "first", "second", "second"},
		{"k", "second", "second", "second"},
		{"k", "second", "", ""},
		{"k", "", "third", "third"}, // an empty value equals an empty expectation
		{"m", "same", "same", nil},
	} {
		v, err := s.CompareAndSet(ctx, step.key, []byte(step.expected), []byte(step.desired))
		require.NoError(t, err)
		if step.want == nil {
			require.Nil(t, v, "%+v", step)
			continue
		}
		require.NotNil(t, v, "%+v", step)
		require.Equal(t, step.want, string(v), "%+v", step)
		v, err = other.Get(ctx, step.key)
		require.NoError(t, err)
		require.Equal(t, step.want, string(v), "%+v", step)
	}
	over, cancel := short()
	defer cancel()
	require.ErrorIs(t, s.Wait(over, "m"), context.DeadlineExceeded, "a comparison that failed set something")
}

func oneWinner(t *testing.T, open func() rendezvous.Store) {
	const callers = 8
	ctx := within(t)
	answers := make([]string, callers)
	var g errgroup.Group
	start := make(chan struct{})
	for i := range callers {
		s := open()
		g.Go(func() error {
			<-start
			v, err := s.CompareAndSet(ctx, "founder", nil, []byte{byte('a' + i)})
			answers[i] = string(v)
			return err
		})
	}
	close(start)
	require.NoError(t, g.Wait())
	winners := 0
	for i, a := range answers {
		require.Equal(t, answers[0], a)
		if a == string(rune('a'+i)) {
			winners++
		}
	}
	require.Equal(t, 1, winners)
}

// losesNothing has callers append their letter to one value.
func losesNothing(t *testing.T, open func() rendezvous.Store) {
	const callers, each = 3, 8
	ctx := within(t)
	var g errgroup.Group
	for i := range callers {
		s, letter := open(), string(rune('a'+i))
		g.Go(func() error {
			seen := ""
			for done := 0; done < each; {
				v, err := s.CompareAndSet(ctx, "letters", []byte(seen), []byte(seen+letter))
				if err != nil {
					return err
				}
				if string(v) == seen+letter {
					done++
				}
				seen = string(v)
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	v, err := open().Get(ctx, "letters")
	require.NoError(t, err)
	for i := range callers {
		require.Equal(t, each, strings.Count(string(v), string(rune('a'+i))), "%s", v)
	}
}

func ownership(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	v := []byte("value")
	require.NoError(t, s.Set(ctx, "set", v))
	copy(v, "XXXXX")
	v = []byte("value")
	_, err := s.CompareAndSet(ctx, "cas", nil, v)
	require.NoError(t, err)
	copy(v, "XXXXX")
	for _, k := range []string{"set", "cas"} {
		for range 2 {
			got, err := s.Get(ctx, k)
			require.NoError(t, err)
			require.Equal(t, "value", string(got))
			copy(got, "YYYYY")
		}
	}
	got, err := s.CompareAndSet(ctx, "cas", []byte("other"), nil)
	require.NoError(t, err)
	copy(got, "ZZZZZ")
	got, err = s.Get(ctx, "cas")
	require.NoError(t, err)
	require.Equal(t, "value", string(got))
}

func limits(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	long := strings.Repeat("k", rendezvous.MaxKey)
	big := bytes.Repeat([]byte{1, 2, 3, 4}, rendezvous.MaxValue/4)
	require.NoError(t, s.Set(ctx, long, big))
	got, err := s.Get(ctx, long)
	require.NoError(t, err)
	require.True(t, bytes.Equal(big, got))
	got, err = s.CompareAndSet(ctx, long, big, big[4:])
	require.NoError(t, err)
	require.Len(t, got, len(big)-4)

	require.ErrorIs(t, s.Set(ctx, "k", append(big, 0)), rendezvous.ErrTooLarge)
	_, err = s.CompareAndSet(ctx, "k", nil, append(big, 0))
	require.ErrorIs(t, err, rendezvous.ErrTooLarge)
	for _, bad := range []string{"", strings.Repeat("k", rendezvous.MaxKey+1)} {
		require.ErrorIs(t, s.Set(ctx, bad, nil), rendezvous.ErrBadKey)
		_, err = s.Get(ctx, bad)
		require.ErrorIs(t, err, rendezvous.ErrBadKey)
		require.ErrorIs(t, s.Wait(ctx, "k", bad), rendezvous.ErrBadKey)
		_, err = s.Add(ctx, bad, 1)
		require.ErrorIs(t, err, rendezvous.ErrBadKey)
		_, err = s.CompareAndSet(ctx, bad, nil, nil)
		require.ErrorIs(t, err, rendezvous.ErrBadKey)
	}
}

func closes(t *testing.T, open func() rendezvous.Store) {
	ctx, s := within(t), open()
	keeps := open() // so that the store itself lives on
	var g errgroup.Group
	errs := make([]error, 4)
	for i := range errs {
		g.Go(func() error {
			if i%2 == 0 {
				_, errs[i] = s.Get(ctx, "never")
			} else {
				errs[i] = s.Wait(ctx, "never")
			}
			return nil
		})
	}
	time.Sleep(5 * time.Millisecond)
	require.NoError(t, s.Close())
	require.NoError(t, g.Wait())
	for _, err := range errs {
		require.ErrorIs(t, err, rendezvous.ErrClosed)
	}
	require.ErrorIs(t, s.Set(ctx, "k", nil), rendezvous.ErrClosed)
	_, err := s.Add(ctx, "k", 1)
	require.ErrorIs(t, err, rendezvous.ErrClosed)
	_, err = s.CompareAndSet(ctx, "k", nil, nil)
	require.ErrorIs(t, err, rendezvous.ErrClosed)
	require.NoError(t, keeps.Set(ctx, "k", nil))
}

// likeAMap does random calls and compares with a map.
func likeAMap(t *testing.T, open func() rendezvous.Store) {
	const rounds, calls = 20, 12
	ctx := within(t)
	handles := []rendezvous.Store{open(), open()}
	keys, values := []string{"a", "b", "c"}, []string{"", "1", "-3", "x", "yy"}
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	pick := func(of []string) string { return of[rnd.IntN(len(of))] }
	model := map[string]string{}
	for i := range rounds * calls {
		s, key := handles[rnd.IntN(len(handles))], fmt.Sprint(i/calls, pick(keys))
		old, had := model[key]
		switch rnd.IntN(4) {
		case 0:
			v := pick(values)
			require.NoError(t, s.Set(ctx, key, []byte(v)))
			model[key] = v
		case 1:
			want, notNumber := strconv.ParseInt(old, 10, 64)
			delta := rnd.Int64N(19) - 9
			got, err := s.Add(ctx, key, delta)
			if had && notNumber != nil {
				require.ErrorIs(t, err, rendezvous.ErrNotNumber)
				break
			}
			require.NoError(t, err)
			require.Equal(t, want+delta, got)
			model[key] = strconv.FormatInt(got, 10)
		case 2:
			expected, desired := pick(values), pick(values)
			got, err := s.CompareAndSet(ctx, key, []byte(expected), []byte(desired))
			require.NoError(t, err)
			if had && old == expected || !had && expected == "" {
				model[key] = desired
			}
			now, has := model[key]
			require.Equal(t, has, got != nil)
			require.Equal(t, now, string(got))
		case 3:
			if had {
				got, err := s.Get(ctx, key)
				require.NoError(t, err)
				require.Equal(t, old, string(got))
			}
		}
	}
}

func prefixesApart(t *testing.T, fresh Fresh) {
	ctx := within(t)
	base := fresh(t)()
	defer func() { require.NoError(t, base.Close()) }()
	a, b := rendezvous.Prefix(base, "a"), rendezvous.Prefix(base, "b")
	nested := rendezvous.Prefix(a, "b")
	require.Same(t, base, rendezvous.Prefix(base, ""))
	require.NoError(t, a.Set(ctx, "k", []byte("a")))
	require.NoError(t, b.Set(ctx, "k", []byte("b")))
	require.NoError(t, nested.Set(ctx, "k", []byte("ab")))
	for key, want := range map[string]string{"a/k": "a", "b/k": "b", "a/b/k": "ab"} {
		v, err := base.Get(ctx, key)
		require.NoError(t, err)
		require.Equal(t, want, string(v))
	}
	v, err := a.CompareAndSet(ctx, "k", nil, []byte("x"))
	require.NoError(t, err)
	require.Equal(t, "a", string(v))
	over, cancel := short()
	defer cancel()
	_, err = b.Get(over, "b/k")
	require.True(t, errors.Is(err, context.DeadlineExceeded))
	require.Contains(t, err.Error(), "b/b/k")
}

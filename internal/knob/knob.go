// Package knob is the only reader of the environment. Each variable has a name,
// a type, a default and a sentence in one table, which "serry env" prints; a
// value that cannot be used is an error that says what is allowed.
//
// Nothing writes the environment. A value is read when it is asked for, so a
// program may set variables before it opens anything.
package knob

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Knob is one variable of type T.
type Knob[T any] struct {
	name    string
	aliases []string // honoured if the variable itself is not set
	kind    string
	def     string // "" is no default
	allowed string
	doc     string
	parse   func(string) (T, error)
}

// Name is the variable's name.
func (k *Knob[T]) Name() string { return k.name }

// Lookup returns the value, or the default and false if the variable is not set
// or empty.
func (k *Knob[T]) Lookup() (v T, set bool, err error) {
	text, from := k.text()
	if from == "" {
		if k.def == "" {
			return v, false, nil
		}
		v, err = k.parse(k.def)
		return v, false, err
	}
	v, err = k.parse(text)
	if err != nil {
		return v, true, &Error{Name: from, Value: text, Allowed: k.allowed}
	}
	return v, true, nil
}

// Get returns the value or the default; the zero value if there is neither.
func (k *Knob[T]) Get() (T, error) {
	v, _, err := k.Lookup()
	return v, err
}

// text is the value and the variable that it comes from, "" if none is set.
func (k *Knob[T]) text() (value, from string) {
	for _, name := range append([]string{k.name}, k.aliases...) {
		if v := os.Getenv(name); v != "" {
			return v, name
		}
	}
	return "", ""
}

// Error is a variable with a value that cannot be used.
type Error struct {
	Name, Value, Allowed string
}

func (e *Error) Error() string {
	return fmt.Sprintf("knob: %s=%q: want %s", e.Name, e.Value, e.Allowed)
}

// Setting is a knob as "serry env" prints it.
type Setting struct {
	Name    string
	Aliases []string
	Type    string // string, list, bool, int, bytes, duration, one of
	Allowed string
	Default string // "" is none
	Doc     string

	Value string // as set, else the default
	From  string // the variable that it comes from; "" is the default
	Err   error  // why Value cannot be used
}

func (k *Knob[T]) setting() Setting {
	s := Setting{Name: k.name, Aliases: slices.Clone(k.aliases), Type: k.kind, Allowed: k.allowed, Default: k.def, Doc: k.doc}
	s.Value, s.From = k.text()
	if s.From == "" {
		s.Value = k.def
	}
	_, _, s.Err = k.Lookup()
	return s
}

type entry interface {
	setting() Setting
	Name() string
}

// List returns all knobs with their present values, in the order of the table.
func List() []Setting {
	all := make([]Setting, len(table))
	for i, k := range table {
		all[i] = k.setting()
	}
	return all
}

// Check returns an error for each variable that cannot be used, alone or with
// the others, and for each SERRY_ variable that no knob has: a misspelt name
// would otherwise do nothing.
func Check() []error {
	var errs []error
	for _, s := range List() {
		if s.Err != nil {
			errs = append(errs, s.Err)
		}
	}
	return append(append(errs, together()...), unknown(os.Environ())...)
}

// together returns what is wrong with values that can be used alone.
func together() []error {
	every, err := Heartbeat.Get()
	limit, limitSet, err2 := HeartbeatLimit.Lookup()
	if err != nil || err2 != nil || limit >= 2*every {
		return nil
	}
	e := &Error{HeartbeatLimit.name, limit.String(), fmt.Sprintf("at least twice %s, which is %v", Heartbeat.name, every)}
	if !limitSet { // so the other is
		e = &Error{Heartbeat.name, every.String(), fmt.Sprintf("at most half of %s, which is %v", HeartbeatLimit.name, limit)}
	}
	return []error{e}
}

// reserved begin the variables by which tests talk to the processes that they
// start, which may read the environment as any rank.
var reserved = []string{prefix + "TEST_", prefix + "HARNESS_"}

func isReserved(name string) bool {
	return slices.ContainsFunc(reserved, func(r string) bool { return strings.HasPrefix(name, r) })
}

func unknown(environ []string) []error {
	var errs []error
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, prefix) && !has(name) && !isReserved(name) {
			errs = append(errs, fmt.Errorf("knob: %s is set and means nothing: see serry env for the names", name))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errs
}

// Getenv is os.Getenv for the names in the table and their aliases. It panics
// for any other: a variable that is not in the table is not read.
func Getenv(name string) string {
	if !has(name) {
		panic("knob: " + name + " is not in the table")
	}
	return os.Getenv(name)
}

func has(name string) bool {
	return slices.ContainsFunc(table, func(k entry) bool {
		return k.Name() == name || slices.Contains(k.setting().Aliases, name)
	})
}

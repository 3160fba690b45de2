package knob

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// errBad is replaced by an Error that says what is allowed.
var errBad = errors.New("knob: bad value")

func text(name, def string) *Knob[string] {
	return &Knob[string]{name: name, kind: "string", def: def, allowed: "any text",
		parse: func(s string) (string, error) { return s, nil }}
}

func list(name, def string) *Knob[[]string] {
	return &Knob[[]string]{name: name, kind: "list", def: def, allowed: "values separated by commas",
		parse: func(s string) ([]string, error) {
			var vs []string
			for v := range strings.SplitSeq(s, ",") {
				if v = strings.TrimSpace(v); v != "" {
					vs = append(vs, v)
				}
			}
			return vs, nil
		}}
}

func oneOf(name, def string, values ...string) *Knob[string] {
	last := len(values) - 1
	return &Knob[string]{name: name, kind: "one of", def: def,
		allowed: strings.Join(values[:last], ", ") + " or " + values[last],
		parse: func(s string) (string, error) {
			s = strings.ToLower(s)
			if !slices.Contains(values, s) {
				return "", errBad
			}
			return s, nil
		}}
}

func boolean(name, def string) *Knob[bool] {
	return &Knob[bool]{name: name, kind: "bool", def: def, allowed: "on or off (1, 0, true, false, yes, no)",
		parse: func(s string) (bool, error) {
			switch strings.ToLower(s) {
			case "on", "1", "true", "yes":
				return true, nil
			case "off", "0", "false", "no":
				return false, nil
			}
			return false, errBad
		}}
}

func integer(name, def string, low, high int) *Knob[int] {
	return &Knob[int]{name: name, kind: "int", def: def, allowed: fmt.Sprintf("a number from %d to %d", low, high),
		parse: func(s string) (int, error) {
			v, err := strconv.Atoi(s)
			if err != nil || v < low || v > high {
				return 0, errBad
			}
			return v, nil
		}}
}

func duration(name, def string, low, high time.Duration) *Knob[time.Duration] {
	return &Knob[time.Duration]{name: name, kind: "duration", def: def,
		allowed: fmt.Sprintf("a time with its unit, such as 100ms or 1.5s, from %v to %v", low, high),
		parse: func(s string) (time.Duration, error) {
			v, err := time.ParseDuration(s)
			if err != nil || v < low || v > high {
				return 0, errBad
			}
			return v, nil
		}}
}

func size(name, def string, low, high int64) *Knob[int64] {
	return &Knob[int64]{name: name, kind: "bytes", def: def,
		allowed: fmt.Sprintf("a number of bytes, KiB, MiB or GiB, such as 65536 or 64KiB, from %s to %s", Bytes(low), Bytes(high)),
		parse: func(s string) (int64, error) {
			v, ok := parseBytes(s)
			if !ok || v < low || v > high {
				return 0, errBad
			}
			return v, nil
		}}
}

var units = []struct {
	name  string
	bytes int64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}}

func parseBytes(s string) (int64, bool) {
	for _, u := range units {
		digits, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		v, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
		return v * u.bytes, err == nil && v >= 0 && v <= math.MaxInt64/u.bytes
	}
	return 0, false
}

// Bytes spells a size as a knob takes it: 64KiB.
func Bytes(n int64) string {
	for _, u := range units[:3] {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

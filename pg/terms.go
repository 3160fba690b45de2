package pg

import (
	"encoding/binary"
	"fmt"
	"time"
)

// terms are what has to be equal on all ranks of a world: who differed would wait for bytes that never come, or take a
// result for complete that others still need. The founder that is first writes its own for all (identity). Checksums need
// no term: a link has them unless one of its two sides wants none.
type terms struct {
	opts   Options
	retain int
}

// unlike is the error of a rank that was started otherwise than the others. To start it again mends nothing.
type unlike struct{ why string }

func (e *unlike) Error() string { return e.why }

const termsBytes = optionsBytes + 8

func (t *terms) encode(b []byte) []byte {
	return binary.LittleEndian.AppendUint64(t.opts.encode(b), uint64(t.retain))
}

func (t *terms) decode(b []byte) {
	t.opts.decode(b)
	t.retain = int(binary.LittleEndian.Uint64(b[optionsBytes:]))
}

// agree compares the terms of this process with those of the world, which rank by wrote. The error names the first that
// differs. A newcomer takes over what was not given to it.
func (c *Config) agree(world terms, by int, newcomer bool, given *Config) error {
	o, g, w := &c.Options, &given.Options, &world.opts
	for _, x := range []struct {
		name        string
		here, there any
		given       bool
	}{
		{"SERRY_DEPTH (Config.Options.Depth)", o.Depth, w.Depth, g.Depth != 0},
		{"SERRY_RETAIN_BYTES (Config.Retain)", c.Retain, world.retain, given.Retain != 0},
		{"Config.Options.SlotBytes", o.SlotBytes, w.SlotBytes, g.SlotBytes != 0},
		{"Config.Options.Timeout", o.Timeout, w.Timeout, g.Timeout != 0},
		{"Config.Options.Mode", o.Mode, w.Mode, g.Mode != 0},
		{"Config.Options.Pairs", o.Pairs, w.Pairs, g.Pairs},
		{"Config.Options.ManualResume", o.ManualResume, w.ManualResume, g.ManualResume},
	} {
		if x.here != x.there && (x.given || !newcomer) {
			return &unlike{fmt.Sprintf("%s is %v here, on rank %d, and %v in the world that rank %d began: give all ranks the same", x.name, x.here, c.Rank, x.there, by)}
		}
	}
	c.Options, c.Retain = world.opts, world.retain
	return nil
}

// optionsBytes is the size of encoded Options: mode (1), pairs (1), manual (1), timeout (8), slot bytes (8), depth (4).
const optionsBytes = 23

func (o *Options) encode(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, byte(o.Mode), bit(o.Pairs), bit(o.ManualResume))
	b = le.AppendUint64(b, uint64(o.Timeout))
	b = le.AppendUint64(b, uint64(o.SlotBytes))
	return le.AppendUint32(b, uint32(o.Depth))
}

func (o *Options) decode(b []byte) {
	le := binary.LittleEndian
	*o = Options{
		Mode: Mode(b[0]), Pairs: b[1] == 1, ManualResume: b[2] == 1,
		Timeout: time.Duration(le.Uint64(b[3:])), SlotBytes: int(le.Uint64(b[11:])), Depth: int(le.Uint32(b[19:])),
	}
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

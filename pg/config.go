package pg

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/serry-project/serry/collectives"
	"github.com/serry-project/serry/device"
	"github.com/serry-project/serry/fault"
	"github.com/serry-project/serry/rendezvous"
)

// What Options may ask for at most: the bytes of an area, depth x lanes x (slot + what stands before it), are then far
// from the end of an int64, and the arena says what it has room for.
const (
	maxSlotBytes = 1 << 40
	maxDepth     = 1024 // in lanes
)

// check names the first field that makes no sense. It looks at what was given: zero means the default.
func (o *Options) check() error {
	switch {
	case o.Mode > Raise:
		return fmt.Errorf("Options.Mode is %d: there are Continue (%d) and Raise (%d)", o.Mode, Continue, Raise)
	case o.Timeout < 0:
		return negative("Options.Timeout", o.Timeout)
	case o.SlotBytes < 0:
		return negative("Options.SlotBytes", o.SlotBytes)
	case int64(o.SlotBytes) > maxSlotBytes:
		return fmt.Errorf("Options.SlotBytes is %d: at most %d can be", o.SlotBytes, int64(maxSlotBytes))
	case o.Depth < 0:
		return negative("Options.Depth", o.Depth)
	case o.Depth > maxDepth/o.lanes():
		return fmt.Errorf("Options.Depth is %d: at most %d can be, or %d with Pairs", o.Depth, maxDepth, maxDepth/2)
	}
	return nil
}

func negative(field string, x any) error {
	return fmt.Errorf("%s is %v: it cannot be negative (0 means the default)", field, x)
}

// check is that of Options, for what else was given.
func (c *Config) check() error {
	switch {
	case c.ArenaBytes < 0:
		return negative("Config.ArenaBytes", c.ArenaBytes)
	case c.HeartbeatEvery < 0:
		return negative("Config.HeartbeatEvery", c.HeartbeatEvery)
	case c.HeartbeatLimit < 0:
		return negative("Config.HeartbeatLimit", c.HeartbeatLimit)
	case c.Links != "" && c.Links != "auto" && c.Links != "tcp":
		return fmt.Errorf("Config.Links is %q: it is auto or tcp", c.Links)
	}
	if err := c.Options.check(); err != nil {
		return fmt.Errorf("Config.%w", err)
	}
	return nil
}

// Config says who joins what. The zero value of a field means its default.
type Config struct {
	// Rank asks for a slot; -1 (with Rejoin) takes any free one, or a new one within Capacity.
	Rank int
	// Size is the number of founders. Capacity (default Size) is how many ranks there can ever be.
	Size, Capacity int
	// Store is where the ranks meet. After founding only newcomers read it.
	Store rendezvous.Store
	// Name tells worlds in one Store apart (default "world").
	Name string
	// Rejoin: this process takes a place in a running world, and never founds one.
	Rejoin bool
	// Peers are invitations (World.Invite) of living members, for a Rejoin without a Store.
	Peers []string

	// Options of the world's group, equal on all ranks: Join compares them. A newcomer takes over those that it leaves zero.
	Options Options

	Links      string // "auto": shared memory on the same host, else TCP; "tcp": TCP only
	ArenaBytes int64  // shared memory of this process for slots (default 64 MiB)
	Listen     string // address or interface to listen on (default: that of the route to Via)
	Via        string // "host:port" of the rendezvous
	SocketDir  string // for unix sockets where a host's processes share no network namespace (default: abstract names)

	// Retain is the bytes up to which a result is kept for others instead of an extra hop between hosts (default 64 KiB;
	// negative: none). It is equal on all ranks, as Options are.
	Retain int

	// HeartbeatLimit (default 1 s) is the silence after which a process of another host is suspected; HeartbeatEvery
	// (default a tenth of it) is how often this one is heard.
	HeartbeatEvery, HeartbeatLimit time.Duration
	// NoChecksum saves that of frames between hosts. A link has none if either of its sides wants none.
	NoChecksum bool
	// Wrap puts something around each link: faults, in tests.
	Wrap func(device.Link) device.Link
	// Log gets what happens (default: nothing is logged).
	Log *slog.Logger
}

func (c *Config) fill() error {
	wrong := c.check()
	if c.Capacity == 0 {
		c.Capacity = c.Size
	}
	if c.Name == "" {
		c.Name = "world"
	}
	if c.Retain == 0 {
		c.Retain = 64 << 10
	}
	if c.HeartbeatLimit == 0 {
		c.HeartbeatLimit = time.Second
	}
	if c.HeartbeatEvery == 0 {
		c.HeartbeatEvery = c.HeartbeatLimit / 10
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.ArenaBytes == 0 {
		c.ArenaBytes = 64 << 20
	}
	c.Options = c.Options.withDefaults(1 << 20)
	bad := func(f string, a ...any) error { return &JoinError{Rank: c.Rank, What: fmt.Sprintf(f, a...)} }
	switch {
	case wrong != nil:
		return bad("%v", wrong)
	case c.Store == nil && len(c.Peers) == 0:
		return bad("neither a Store nor Peers are given")
	case c.Size < 1 && !c.Rejoin:
		return bad("the world's size is %d", c.Size)
	case !c.Rejoin && (c.Rank < 0 || c.Rank >= c.Size):
		return bad("ranks of a world of %d are 0 to %d", c.Size, c.Size-1)
	case c.Capacity < c.Size:
		return bad("capacity %d is less than size %d", c.Capacity, c.Size)
	case c.Capacity > fault.MaxSlots:
		return bad("capacity %d is more than %d", c.Capacity, fault.MaxSlots)
	case !c.Rejoin && c.Store == nil:
		return bad("founding needs a Store")
	}
	if c.Rejoin {
		return nil // the members' options count
	}
	return c.fits()
}

// fits says whether the world's slots have room in the arena.
func (c *Config) fits() error {
	if n := int64(c.shape().Bytes()) + 64<<10; n > c.ArenaBytes {
		return &JoinError{Rank: c.Rank, What: fmt.Sprintf(
			"the world's slots take %d bytes, the arena has %d: raise SERRY_SHM_BYTES or use smaller slots", n, c.ArenaBytes)}
	}
	return nil
}

// shape is that of the world's own group.
func (c *Config) shape() collectives.Shape { return c.Options.shape(max(c.Capacity, 1)) }

package pg

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"

	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/rendezvous"
)

// FromEnv is the Config that the environment describes, as `serry run` and torchrun set it: RANK, WORLD_SIZE and where
// the rendezvous is, and the SERRY_ variables that `serry env` lists. The caller may change it before Join.
func FromEnv(ctx context.Context) (Config, error) {
	var cfg Config
	if errs := knob.Check(); len(errs) > 0 {
		return cfg, errors.Join(errs...)
	}
	st, env, err := rendezvous.FromEnv(ctx, knob.Getenv)
	if err != nil {
		return cfg, err
	}
	cfg = Config{Rank: env.Rank, Size: env.Size, Store: st, Rejoin: env.Rejoin > 0, Peers: env.Peers}
	// knob.Check has seen that the values can be read.
	cfg.Links, _ = knob.Links.Get()
	if cfg.Links == "shm" {
		cfg.Links = "auto"
	}
	cfg.ArenaBytes, _ = knob.ShmBytes.Get()
	cfg.Listen, _ = knob.SocketIfname.Get()
	cfg.SocketDir, _ = knob.SocketDir.Get()
	cfg.HeartbeatEvery, _ = knob.Heartbeat.Get()
	cfg.HeartbeatLimit, _ = knob.HeartbeatLimit.Get()
	if n, _ := knob.RetainBytes.Get(); n > 0 {
		cfg.Retain = int(n)
	} else {
		cfg.Retain = -1
	}
	if d, _ := knob.Depth.Get(); d > 0 {
		cfg.Options.Depth = int(d)
	}
	if crc, err := knob.CRC.Get(); err == nil {
		cfg.NoChecksum = !crc
	}
	if a, _ := knob.MasterAddr.Get(); a != "" {
		if p := knob.Getenv("MASTER_PORT"); p != "" {
			cfg.Via = a + ":" + p
		}
	}
	cfg.Log = logger(env.Rank)
	return cfg, nil
}

// logger is what SERRY_LOG asks for, on stderr, with the rank.
func logger(rank int) *slog.Logger {
	name, _ := knob.Log.Get()
	if name == "off" {
		return slog.New(slog.DiscardHandler)
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(strings.ToUpper(name))); err != nil {
		level = slog.LevelWarn
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", rank)
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/serry-project/serry/internal/knob"
	"github.com/serry-project/serry/pg"
	"github.com/serry-project/serry/rendezvous"
)

// bare unsets all that is read.
func bare(t *testing.T) {
	for _, s := range knob.List() {
		for _, name := range append([]string{s.Name}, s.Aliases...) {
			t.Setenv(name, "")
		}
	}
}

func TestEnv(t *testing.T) {
	bare(t)
	t.Setenv("SERRY_TEST_X", "for a test")
	var out bytes.Buffer
	require.Zero(t, run([]string{"env"}, &out, &out), &out)
	require.Contains(t, out.String(), "SERRY_HEARTBEAT ")
	require.NotContains(t, out.String(), "WORLD_SIZE ")
	t.Setenv("SERRY_LOG", "info")
	out.Reset()
	require.Zero(t, run([]string{"env", "--all"}, &out, &out), &out)
	require.Contains(t, out.String(), "* SERRY_LOG ")
	require.Contains(t, out.String(), "WORLD_SIZE ")
}

// What a rank would be refused with is said before, and by name.
func TestEnvRefuses(t *testing.T) {
	for vars, want := range map[string]string{
		"SERRY_LOG=loud":                                    `SERRY_LOG="loud": want debug`,
		"SERRY_LOOG=info":                                   "SERRY_LOOG is set and means nothing",
		"SERRY_HEARTBEAT=2s":                                "want at most half of SERRY_HEARTBEAT_LIMIT",
		"SERRY_RENDEZVOUS=node0:29500":                      "not the URL of a rendezvous",
		"RANK=3 WORLD_SIZE=3 SERRY_RENDEZVOUS=a:1":          "not the URL",
		"RANK=3 WORLD_SIZE=3 SERRY_RENDEZVOUS=tcp://a:1":    "must be less than WORLD_SIZE",
		"RANK=0 WORLD_SIZE=2":                               "nor is MASTER_ADDR",
		"RANK=0 WORLD_SIZE=2000 SERRY_RENDEZVOUS=tcp://a:1": `WORLD_SIZE="2000": want at most 1024 ranks`,
		"SERRY_DEPTH=64":                                    `SERRY_SHM_BYTES="64MiB": want at least`,
		"SERRY_SHM_BYTES=2MiB":                              "want at least 5MiB for SERRY_DEPTH=4",
		"SERRY_SOCKET_DIR=/nowhere/at/all":                  "want a directory that is there",
		"SERRY_PEERS=a:1":                                   `want invitations (World.Invite), which start with "serry1:"`,
	} {
		t.Run(vars, func(t *testing.T) {
			bare(t)
			for _, kv := range strings.Fields(vars) {
				name, value, _ := strings.Cut(kv, "=")
				t.Setenv(name, value)
			}
			var stdout, stderr bytes.Buffer
			require.Equal(t, 1, run([]string{"env", "--json"}, &stdout, &stderr))
			require.Contains(t, stderr.String(), want)
			var vs []variable
			require.NoError(t, json.Unmarshal(stdout.Bytes(), &vs))
			errs := 0
			for _, v := range vs {
				if v.Error != "" {
					require.Contains(t, stderr.String(), v.Error)
					errs++
				}
			}
			require.Equal(t, !strings.Contains(vars, "LOOG"), errs > 0)
		})
	}
}

// The numbers that are taken from pg are still its own.
func TestEnvAgreesWithJoin(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // it refuses before, or ends at once
	st, err := rendezvous.Open(t.Context(), "mem://"+t.Name())
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	for _, size := range []int{1, 3, 700} {
		for _, depth := range []int{1, 4, 64} {
			for less, want := range map[int64]bool{0: false, 1: true} {
				_, err := pg.Join(ctx, pg.Config{Size: size, Store: st, ArenaBytes: arena(size, depth) - less, Options: pg.Options{Depth: depth}})
				require.Error(t, err)
				require.Equal(t, want, strings.Contains(err.Error(), "raise SERRY_SHM_BYTES"), "%d ranks, depth %d: %v", size, depth, err)
			}
		}
	}
	_, err = pg.Join(t.Context(), pg.Config{Rank: -1, Rejoin: true, Peers: []string{"a:1"}})
	var refused *pg.JoinError
	require.True(t, errors.As(err, &refused))
	require.ErrorContains(t, err, invitation)
}

package rendezvous_test

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/serry-project/serry/rendezvous"
)

type vars map[string]string

func (v vars) get(name string) string { return v[name] }

// with returns a copy of v with more variables.
func (v vars) with(pairs ...string) vars {
	w := vars{}
	for k, x := range v {
		w[k] = x
	}
	for i := 0; i < len(pairs); i += 2 {
		w[pairs[i]] = pairs[i+1]
	}
	return w
}

func torchrun(addr string) vars {
	host, port, _ := net.SplitHostPort(addr)
	return vars{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
}

func TestFromEnvAgentStore(t *testing.T) {
	server := serve(t)
	v := torchrun(server.Addr()).with(
		"TORCHELASTIC_USE_AGENT_STORE", "True", "TORCHELASTIC_RUN_ID", "job", "TORCHELASTIC_RESTART_COUNT", "2")
	s, env, err := rendezvous.FromEnv(soon(t), v.get)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.Equal(t, rendezvous.Env{
		Rank: 0, Size: 2, LocalRank: 0, LocalSize: 2, RunID: "job", Attempt: 2, Rendezvous: "torch://" + server.Addr(),
	}, env)
	require.NoError(t, s.Set(soon(t), "k", []byte("v")))
	got, err := server.Store().Get(soon(t), "serry/job/attempt-2/k")
	require.NoError(t, err)
	require.Equal(t, "v", string(got))
}

// Without an agent rank 0 serves the store, and the others find it.
func TestFromEnvRankZeroHosts(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	var g errgroup.Group
	for rank := range 2 {
		g.Go(func() error {
			s, env, err := rendezvous.FromEnv(soon(t), torchrun(addr).with("RANK", fmt.Sprint(rank)).get)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			if env.Hosts != (rank == 0) {
				return fmt.Errorf("rank %d: hosts: %v", rank, env.Hosts)
			}
			if err := s.Set(soon(t), fmt.Sprint(rank), nil); err != nil {
				return err
			}
			if err := s.Wait(soon(t), "0", "1"); err != nil {
				return err
			}
			if rank == 1 { // the host leaves last
				return s.Set(soon(t), "end", nil)
			}
			return s.Wait(soon(t), "end")
		})
	}
	// Rank 1 may see the server end after its last call was done, but before it was told.
	if err := g.Wait(); err != nil {
		require.Contains(t, err.Error(), `set "serry/end"`)
	}
}

func TestFromEnvPortTaken(t *testing.T) {
	server := serve(t)
	_, _, err := rendezvous.FromEnv(soon(t), torchrun(server.Addr()).get)
	_, port, _ := net.SplitHostPort(server.Addr())
	require.ErrorContains(t, err, "port "+port+" of 127.0.0.1 is in use")
}

// An address that others use for this host, and which it does not have itself.
func TestFromEnvForeignAddress(t *testing.T) {
	s, env, err := rendezvous.FromEnv(soon(t), vars{
		"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": freePort(t),
	}.get)
	require.NoError(t, err)
	require.True(t, env.Hosts)
	require.Equal(t, -1, env.LocalRank)
	require.NoError(t, s.Close())
}

func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", ":0")
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func TestFromEnvSerry(t *testing.T) {
	server := serve(t)
	founder := vars{"RANK": "1", "WORLD_SIZE": "3", "SERRY_RENDEZVOUS": server.URL(), "MASTER_ADDR": "elsewhere"}
	s, env, err := rendezvous.FromEnv(soon(t), founder.get)
	require.NoError(t, err)
	require.Equal(t, server.URL(), env.Rendezvous)
	require.Zero(t, env.Rejoin)
	require.NoError(t, s.Close())

	// One that rejoins finds the keys of the founders.
	again := founder.with("SERRY_REJOIN", "2", "SERRY_PEERS", "10.0.0.1:7, 10.0.0.2:8,")
	s, env, err = rendezvous.FromEnv(soon(t), again.get)
	require.NoError(t, err)
	require.NotNil(t, s)
	require.Equal(t, 2, env.Rejoin)
	require.Equal(t, []string{"10.0.0.1:7", "10.0.0.2:8"}, env.Peers)
	require.NoError(t, s.Close())

	// And does without the rendezvous if it must.
	require.NoError(t, server.Close())
	begin := time.Now()
	s, env, err = rendezvous.FromEnv(soon(t), again.get)
	require.NoError(t, err)
	require.Nil(t, s)
	require.ErrorContains(t, env.NoStore, "connection refused")
	require.Less(t, time.Since(begin), 20*time.Second)
	s, env, err = rendezvous.FromEnv(soon(t), again.with("SERRY_RENDEZVOUS", "", "MASTER_ADDR", "").get)
	require.NoError(t, err)
	require.Nil(t, s)
	require.Error(t, env.NoStore)

	// A founder cannot.
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, _, err = rendezvous.FromEnv(ctx, founder.get)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestCheckEnv(t *testing.T) {
	good := torchrun("127.0.0.1:1")
	for _, v := range []vars{{}, good, {"SERRY_RENDEZVOUS": "tcp://node0:29500"}} {
		require.NoError(t, rendezvous.CheckEnv(v.get), "%v", v)
	}
	require.ErrorContains(t, rendezvous.CheckEnv(vars{"SERRY_RENDEZVOUS": "node0:29500"}.get),
		`SERRY_RENDEZVOUS="node0:29500": not the URL of a rendezvous: no scheme; write mem://name`)
	require.ErrorContains(t, rendezvous.CheckEnv(good.with("RANK", "2").get), "less than WORLD_SIZE")
	require.ErrorContains(t, rendezvous.CheckEnv(vars{"RANK": "0"}.get), "WORLD_SIZE is not set")
}

func TestFromEnvFaults(t *testing.T) {
	good := torchrun("127.0.0.1:1")
	for name, c := range map[string]struct {
		vars vars
		want string
	}{
		"nothing":        {vars{}, "RANK is not set: start the program with `serry run"},
		"no size":        {good.with("WORLD_SIZE", ""), "WORLD_SIZE is not set"},
		"no number":      {good.with("RANK", "x"), `RANK="x": not a whole number of at least 0`},
		"negative":       {good.with("WORLD_SIZE", "0"), `WORLD_SIZE="0": not a whole number of at least 1`},
		"too high":       {good.with("RANK", "2"), "must be less than WORLD_SIZE, which is 2"},
		"no address":     {good.with("MASTER_ADDR", ""), "SERRY_RENDEZVOUS is not set: nor is MASTER_ADDR"},
		"no port":        {good.with("MASTER_PORT", ""), "MASTER_PORT is not set"},
		"bad port":       {good.with("MASTER_PORT", "http"), "MASTER_PORT"},
		"high port":      {good.with("MASTER_PORT", "70000"), "at most 65535"},
		"bad rejoin":     {good.with("SERRY_REJOIN", "yes"), "SERRY_REJOIN"},
		"bad url":        {good.with("SERRY_RENDEZVOUS", "10.0.0.1:3"), "not the URL of a rendezvous"},
		"peers to found": {good.with("MASTER_ADDR", "", "SERRY_PEERS", "a:1"), "SERRY_RENDEZVOUS is not set"},
	} {
		_, _, err := rendezvous.FromEnv(soon(t), c.vars.get)
		require.ErrorContains(t, err, c.want, name)
	}
}

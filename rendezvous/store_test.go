package rendezvous_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/serry-project/serry/rendezvous"
	"github.com/serry-project/serry/rendezvous/storetest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("SERRY_TEST_ROLE"); role != "" {
		os.Exit(runRole(role))
	}
	goleak.VerifyTestMain(m)
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func opener(t *testing.T, url string) func() rendezvous.Store {
	return func() rendezvous.Store {
		s, err := rendezvous.Open(soon(t), url)
		require.NoError(t, err)
		return s
	}
}

func serve(t *testing.T) *rendezvous.Server {
	s, err := rendezvous.Listen(soon(t), "127.0.0.1:0", nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestMem(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store { return opener(t, "mem://"+t.Name()) })
}

func TestFile(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store { return opener(t, "file://"+t.TempDir()) })
}

func TestTCP(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store { return opener(t, serve(t).URL()) })
}

func TestServerStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store { return serve(t).Store })
}

func TestTorchClientOnOurServer(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store { return opener(t, "torch://"+serve(t).Addr()) })
}

// One port, two protocols, the same keys: each handle of the suite is of another kind.
func TestMixedClients(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() rendezvous.Store {
		server, n := serve(t), 0
		kinds := []func() rendezvous.Store{
			opener(t, server.URL()), opener(t, "torch://"+server.Addr()), server.Store,
		}
		return func() rendezvous.Store { n++; return kinds[n%len(kinds)]() }
	})
}

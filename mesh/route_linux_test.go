package mesh

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMatchInterface(t *testing.T) {
	for _, spec := range []string{"lo", "=lo", "l", "nosuch,lo", "=nosuch,lo"} {
		ifi, err := matchInterface(spec)
		require.NoError(t, err, spec)
		require.NotNil(t, ifi, spec)
		require.Equal(t, "lo", ifi.Name, spec)
	}
	ifi, err := matchInterface("127.0.0.1")
	require.NoError(t, err)
	require.Nil(t, ifi, "a host, not an interface")
	_, err = matchInterface("=nosuch")
	require.ErrorContains(t, err, `"=nosuch"`)
	if ifi, err := matchInterface("^nosuch"); err == nil {
		require.NotEqual(t, "lo", ifi.Name, "loopback is taken only by name")
	}
}

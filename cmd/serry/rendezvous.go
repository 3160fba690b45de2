package main

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

	"github.com/serry-project/serry/rendezvous"
)

const rendezvousHelp = `Serves the store at which the ranks of groups find each other, until it is stopped (Ctrl-C, SIGTERM): that is its normal
end, with exit code 0. One port answers our own protocol and that of torch.distributed's TCPStore. All is in memory and
gone at the end.

serry run serves one itself. This is for ranks that are started otherwise: give them SERRY_RENDEZVOUS=tcp://host:port, RANK
and WORLD_SIZE; programs of torch MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE=True. There is no password:
listen where only the ranks' hosts reach.`

func rendezvousCommand() *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use:   "rendezvous",
		Short: "Serve the store where ranks find each other",
		Long:  rendezvousHelp,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s := catch()
			defer s.release()
			server, err := rendezvous.Listen(s.ctx, listen, logger(cmd.ErrOrStderr()))
			if errors.Is(err, rendezvous.ErrBadURL) {
				return &exitCode{exitUsage, fmt.Errorf("--listen: %w", err)}
			}
			if err != nil {
				return err
			}
			host, port, _ := net.SplitHostPort(server.Addr())
			if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
				if name, err := os.Hostname(); err == nil {
					host = name // which others can reach
				}
			}
			fmt.Fprintf(cmd.OutOrStdout(), "SERRY_RENDEZVOUS=tcp://%s\nMASTER_ADDR=%s\nMASTER_PORT=%s\n", net.JoinHostPort(host, port), host, port)
			<-s.ctx.Done()
			return server.Close()
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:29500", "host:port; without a host all addresses of this one, port 0 for a free one")
	return cmd
}

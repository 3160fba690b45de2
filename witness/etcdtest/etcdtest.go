// Package etcdtest runs an etcd of one or more members on loopback, for tests and proofs: the binary that Debian's
// etcd-server installs, as it is.
package etcdtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// ErrMissing: there is no etcd to run.
var ErrMissing = errors.New("there is no etcd in PATH: apt-get install etcd-server has one")

// Server is one member.
type Server struct {
	Addr string // host:port for clients
	cmd  *exec.Cmd
	log  *bytes.Buffer
	done chan struct{}
}

// Start starts n members with their data under dir, and returns when they have a leader. args are more flags for all.
func Start(ctx context.Context, dir string, n int, args ...string) (members []*Server, err error) {
	bin, err := exec.LookPath("etcd")
	if err != nil {
		return nil, ErrMissing
	}
	var ports []string
	var held []net.Listener
	for range 2 * n { // all at once, or one might be given twice
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		ports = append(ports, l.Addr().String())
		held = append(held, l)
	}
	for _, l := range held {
		_ = l.Close()
	}
	var cluster []string
	for i := range n {
		cluster = append(cluster, fmt.Sprintf("m%d=http://%s", i, ports[n+i]))
	}
	scheme := "http"
	if strings.Contains(strings.Join(args, " "), "--cert-file") {
		scheme = "https"
	}
	defer func() {
		if err != nil {
			for _, s := range members {
				err = fmt.Errorf("%w; %s said: %.2000s", err, s.Addr, s.Kill())
			}
			members = nil
		}
	}()
	for i := range n {
		s := &Server{Addr: ports[i], log: &bytes.Buffer{}, done: make(chan struct{})}
		s.cmd = exec.Command(bin, append([]string{"--name", fmt.Sprintf("m%d", i), "--data-dir", filepath.Join(dir, fmt.Sprintf("m%d", i)),
			"--listen-client-urls", scheme + "://" + s.Addr, "--advertise-client-urls", scheme + "://" + s.Addr,
			"--listen-peer-urls", "http://" + ports[n+i], "--initial-advertise-peer-urls", "http://" + ports[n+i],
			"--initial-cluster", strings.Join(cluster, ","), "--logger", "zap", "--log-level", "warn"}, args...)...)
		s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
		s.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64") // what it says on arm64 otherwise
		if err = s.cmd.Start(); err != nil {
			return members, err
		}
		go func() {
			_ = s.cmd.Wait()
			close(s.done)
		}()
		members = append(members, s)
	}
	for _, s := range members {
		if err = s.ready(ctx, scheme == "https"); err != nil {
			return members, err
		}
	}
	return members, nil
}

// ready waits until a member answers a question that needs a leader; over TLS, until it listens.
func (s *Server) ready(ctx context.Context, secure bool) error {
	for {
		if c, err := net.DialTimeout("tcp", s.Addr, time.Second); err == nil {
			_ = c.Close()
			break
		}
		select {
		case <-s.done:
			return errors.New("an etcd ended at its start")
		case <-ctx.Done():
			return fmt.Errorf("an etcd does not listen: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	if secure {
		return nil
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + s.Addr}, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Get(ctx, "ready")
	return err
}

// Process is the running member, to be stopped and continued by signals.
func (s *Server) Process() *os.Process { return s.cmd.Process }

// Kill ends it, waits for its end, and returns what it logged.
func (s *Server) Kill() string {
	_ = s.cmd.Process.Kill()
	<-s.done
	return s.log.String()
}

// URL is the witness URL of members.
func URL(members []*Server) string {
	var addrs []string
	for _, s := range members {
		addrs = append(addrs, s.Addr)
	}
	return "etcd://" + strings.Join(addrs, ",")
}

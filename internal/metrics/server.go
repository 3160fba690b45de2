package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	scrapeTimeout = 10 * time.Second
	scrapesAtOnce = 4
	readTimeout   = 5 * time.Second
)

// Handler serves /metrics, and /healthz: 200 while this process is a member of its world, else 503 with the reason.
func (e *Exporter) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(e.reg, promhttp.HandlerOpts{
		EnableOpenMetrics: true, Timeout: scrapeTimeout, MaxRequestsInFlight: scrapesAtOnce,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if why := e.down(); why != "" {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, why+"\n")
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}

// Addr is the address for one of several processes of a host that were given the same: its port is offset higher. Port 0
// stays, any free one is meant.
func Addr(addr string, offset int) (string, error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("metrics: address %q: want host:port", addr)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || offset < 0 || int(port)+offset > 65535 {
		return "", fmt.Errorf("metrics: address %q: the port of process %d of the host must be a number up to 65535", addr, offset)
	}
	if port > 0 {
		port += uint64(offset)
	}
	return net.JoinHostPort(host, strconv.FormatUint(port, 10)), nil
}

// Server answers scrapes.
type Server struct {
	http *http.Server
	addr string
	done chan error
}

// Serve listens on addr (host:port; without a host on all interfaces, port 0 takes a free one) and answers until Close.
func (e *Exporter) Serve(addr string) (*Server, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, listenError(addr, err)
	}
	s := &Server{
		http: &http.Server{Handler: e.Handler(), ReadHeaderTimeout: readTimeout, IdleTimeout: time.Minute},
		addr: ln.Addr().String(), done: make(chan error, 1),
	}
	go func() { s.done <- s.http.Serve(ln) }()
	return s, nil
}

func listenError(addr string, err error) error {
	why := ""
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		why = ": another process has the port: give each process of the host its own, or port 0"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		why = ": the address is not one of this host"
	case errors.Is(err, syscall.EACCES):
		why = ": this user may not have the port: take one above 1023"
	}
	return fmt.Errorf("metrics: cannot serve on %q: %w%s", addr, err, why)
}

// Addr is where it listens.
func (s *Server) Addr() string { return s.addr }

// Close stops listening and lets scrapes that have begun end, until ctx does; then it cuts them off. It returns the error
// of a server that ended before, or that of ctx.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		_ = s.http.Close()
	}
	if ended := <-s.done; ended != nil && !errors.Is(ended, http.ErrServerClosed) {
		return fmt.Errorf("metrics: the server on %s had ended: %w", s.addr, ended)
	}
	return err
}

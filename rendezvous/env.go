package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Env is what the environment says about this process and its group.
type Env struct {
	Rank, Size int // 0 <= Rank < Size

	// Among the ranks that one launcher started on this host; LocalRank is -1 and LocalSize 0 if nothing says so.
	LocalRank, LocalSize int

	RunID   string // the same for all ranks of one run; may be empty
	Attempt int    // how often torchrun has restarted the whole group; each attempt is a group of its own

	// Rejoin is how often this rank was started before: with 0 it is a founder, with more it joins a group that exists
	// and never founds one.
	Rejoin int
	Peers  []string // addresses of members, one of which is enough to join

	Rendezvous string // URL of the store
	Hosts      bool   // this process serves the store, which ends with its handle
	NoStore    error  // why there is no Store; only for one that rejoins and has Peers
}

// EnvError is an environment in which a rank cannot find its group.
type EnvError struct {
	Name, Value string // the variable
	Reason      string
}

func (e *EnvError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("environment: %s is not set: %s", e.Name, e.Reason)
	}
	return fmt.Sprintf("environment: %s=%q: %s", e.Name, e.Value, e.Reason)
}

const (
	howToStart   = "start the program with `serry run -n 4 -- program` or with torchrun"
	rejoinTries  = 2 * time.Second // for the store of one that has peers and so does not need it
	torchTrue    = "True"
	prefixOfOurs = "serry"
)

// FromEnv finds the rendezvous by the variables that getenv returns:
//
//	SERRY_RENDEZVOUS   URL for Open; serry run sets it
//	SERRY_REJOIN       how often this rank was restarted; serry run sets it for a restarted one
//	SERRY_PEERS        addresses of members, with commas
//	RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
//	TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT
//	                   as torchrun and serry run set them
//
// Without SERRY_RENDEZVOUS the store is torch's at MASTER_ADDR:MASTER_PORT: the launcher's, if
// TORCHELASTIC_USE_AGENT_STORE is "True"; otherwise rank 0 serves it, until it closes the Store, and the others connect.
// The Store has a prefix for run and attempt. It is nil, with the reason in NoStore, only for a rank that rejoins, has
// Peers and does not reach the rendezvous: a group outlives that.
func FromEnv(ctx context.Context, getenv func(string) string) (Store, Env, error) {
	env, err := parseEnv(getenv)
	if err != nil {
		return nil, Env{}, err
	}
	optional := env.Rejoin > 0 && len(env.Peers) > 0
	if env.Rendezvous == "" {
		env.NoStore = &EnvError{Name: "SERRY_RENDEZVOUS", Reason: howToStart}
		return nil, env, nil // parseEnv allows it only if optional
	}
	dialCtx := ctx
	if optional {
		var cancel context.CancelFunc
		dialCtx, cancel = context.WithTimeout(ctx, rejoinTries)
		defer cancel()
	}
	var store Store
	if env.Hosts {
		store, err = host(ctx, env.Rendezvous)
	} else {
		store, err = Open(dialCtx, env.Rendezvous)
	}
	switch {
	case err != nil && optional && ctx.Err() == nil:
		env.NoStore = err
		return nil, env, nil
	case err != nil:
		return nil, Env{}, err
	}
	return Prefix(store, env.prefix()), env, nil
}

// CheckEnv is why [FromEnv] would refuse these variables, or nil. Where nothing says that this process is a rank, only
// what is set is looked at.
func CheckEnv(getenv func(string) string) error {
	if u := getenv("SERRY_RENDEZVOUS"); u != "" {
		if _, _, err := parseURL(u); err != nil {
			return &EnvError{"SERRY_RENDEZVOUS", u, fmt.Sprintf("%v; %s", err, hintURL)}
		}
	}
	if getenv("RANK") == "" && getenv("WORLD_SIZE") == "" {
		return nil
	}
	_, err := parseEnv(getenv)
	return err
}

// prefix keeps runs, and attempts of one run, apart.
func (e Env) prefix() string {
	parts := []string{prefixOfOurs}
	if e.RunID != "" {
		parts = append(parts, e.RunID)
	}
	if e.Attempt > 0 {
		parts = append(parts, "attempt-"+strconv.Itoa(e.Attempt))
	}
	return strings.Join(parts, "/")
}

// envReader reads numbers; the first that is none is kept in err.
type envReader struct {
	getenv func(string) string
	err    error
}

func (r *envReader) number(name string, missing, least int) int {
	value := r.getenv(name)
	if value == "" {
		return missing
	}
	n, err := strconv.Atoi(value)
	if (err != nil || n < least) && r.err == nil {
		r.err = &EnvError{name, value, fmt.Sprintf("not a whole number of at least %d", least)}
	}
	return n
}

func (r *envReader) required(name string, least int) int {
	if r.getenv(name) == "" && r.err == nil {
		r.err = &EnvError{Name: name, Reason: howToStart}
	}
	return r.number(name, 0, least)
}

func parseEnv(getenv func(string) string) (Env, error) {
	r := &envReader{getenv: getenv}
	env := Env{
		Rank:       r.required("RANK", 0),
		Size:       r.required("WORLD_SIZE", 1),
		LocalRank:  r.number("LOCAL_RANK", -1, 0),
		LocalSize:  r.number("LOCAL_WORLD_SIZE", 0, 1),
		RunID:      getenv("TORCHELASTIC_RUN_ID"),
		Attempt:    r.number("TORCHELASTIC_RESTART_COUNT", 0, 0),
		Rejoin:     r.number("SERRY_REJOIN", 0, 0),
		Rendezvous: getenv("SERRY_RENDEZVOUS"),
	}
	for p := range strings.SplitSeq(getenv("SERRY_PEERS"), ",") {
		if p = strings.TrimSpace(p); p != "" {
			env.Peers = append(env.Peers, p)
		}
	}
	if r.err == nil && env.Rank >= env.Size {
		r.err = &EnvError{"RANK", strconv.Itoa(env.Rank), fmt.Sprintf("must be less than WORLD_SIZE, which is %d", env.Size)}
	}
	if r.err != nil || env.Rendezvous != "" {
		return env, r.err
	}
	addr, port := getenv("MASTER_ADDR"), r.number("MASTER_PORT", 0, 1)
	switch {
	case addr == "" && env.Rejoin > 0 && len(env.Peers) > 0:
		return env, nil
	case addr == "":
		r.err = &EnvError{Name: "SERRY_RENDEZVOUS", Reason: "nor is MASTER_ADDR: " + howToStart}
	case port == 0:
		_ = r.required("MASTER_PORT", 1)
	case port > 65535:
		r.err = &EnvError{"MASTER_PORT", strconv.Itoa(port), "a port is at most 65535"}
	}
	env.Rendezvous = "torch://" + net.JoinHostPort(addr, strconv.Itoa(port))
	env.Hosts = env.Rank == 0 && env.Rejoin == 0 && getenv("TORCHELASTIC_USE_AGENT_STORE") != torchTrue
	return env, r.err
}

// hosted is the Store of a process that serves it, and serves it until Close.
type hosted struct {
	Store
	server *Server
}

func (h *hosted) Close() error {
	_ = h.Store.Close()
	return h.server.Close()
}

// host serves the store at the address of rawURL. That may be an address by which others reach this host and which the
// host does not have, behind a translating router or a service of a cluster: then it listens on all, as torch does.
func host(ctx context.Context, rawURL string) (Store, error) {
	_, addr, _ := strings.Cut(rawURL, "://")
	server, err := Listen(ctx, addr, nil)
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		_, port, _ := net.SplitHostPort(addr)
		server, err = Listen(ctx, ":"+port, nil)
	}
	if err != nil {
		return nil, err
	}
	return &hosted{server.Store(), server}, nil
}

package knob

import "time"

const prefix = "SERRY_"

// The knobs of serry.
var (
	Log = add(oneOf("SERRY_LOG", "warn", "debug", "info", "warn", "error", "off")).
		does("what is logged to stderr")
	Rendezvous = add(text("SERRY_RENDEZVOUS", "")).
			does("where ranks find each other: a URL such as tcp://host:port, torch://host:port, file:///path")
	Peers = add(list("SERRY_PEERS", "")).
		does("invitations of members (World.Invite), separated by commas; one that lives is enough to join")
	Rejoin = add(integer("SERRY_REJOIN", "0", 0, 1<<30)).
		does("how often this rank was started before: above 0 it joins a running group and never founds one; set by serry run")
	SocketIfname = add(text("SERRY_SOCKET_IFNAME", "")).or("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME").
			does("interfaces for tcp, in NCCL's syntax: prefixes separated by commas, ^ excludes them, = means the whole name; " +
			"unset: the route to the rendezvous")
	SocketDir = add(text("SERRY_SOCKET_DIR", "")).
			does("directory for unix sockets where processes of a host do not share a network namespace")
	ShmBytes = add(size("SERRY_SHM_BYTES", "64MiB", 1<<20, 1<<40)).
			does("shared memory of each process for slots")
	Links = add(oneOf("SERRY_LINKS", "auto", "auto", "shm", "tcp")).
		does("which links are used: auto (or shm) takes shared memory inside a host and tcp between hosts; tcp takes no shared memory")
	Heartbeat = add(duration("SERRY_HEARTBEAT", "100ms", time.Millisecond, time.Minute)).
			does("how often each process tells the others that it lives")
	HeartbeatLimit = add(duration("SERRY_HEARTBEAT_LIMIT", "1s", 5*time.Millisecond, time.Hour)).
			does("silence after which a process of another host is suspected")
	RetainBytes = add(size("SERRY_RETAIN_BYTES", "64KiB", 0, 1<<30)).
			does("up to this size an operation's bytes are kept by copy for those who still miss them; equal on all ranks")
	Depth = add(integer("SERRY_DEPTH", "4", 1, 64)).
		does("operations of a group with bytes in flight at once; equal on all ranks")
	CRC = add(boolean("SERRY_CRC", "on")).
		does("frames between hosts carry a checksum, if both sides want it")
)

// What the Go runtime reads itself; here because it overrides what we would do.
var GoMaxProcs = add(integer("GOMAXPROCS", "", 1, 1<<20)).
	does("how many threads may run Go code at once; unset: the cores that may be used and 4 more, because a caller that waits holds one")

// What launchers set.
var (
	Rank = add(integer("RANK", "", 0, 1<<20)).
		does("rank of this process, set by the launcher")
	WorldSize = add(integer("WORLD_SIZE", "", 1, 1<<20)).
			does("number of processes, set by the launcher")
	LocalRank = add(integer("LOCAL_RANK", "", 0, 1<<20)).
			does("rank among the processes of this host, set by the launcher")
	LocalWorldSize = add(integer("LOCAL_WORLD_SIZE", "", 1, 1<<20)).
			does("number of processes on this host, set by the launcher")
	MasterAddr = add(text("MASTER_ADDR", "")).
			does("host of torch's store")
	MasterPort = add(integer("MASTER_PORT", "", 1, 65535)).
			does("port of torch's store")
	ElasticRunID = add(text("TORCHELASTIC_RUN_ID", "")).
			does("id of the job, set by torchrun")
	ElasticRestartCount = add(integer("TORCHELASTIC_RESTART_COUNT", "", 0, 1<<30)).
				does("how often torchrun has restarted the workers")
	ElasticMaxRestarts = add(integer("TORCHELASTIC_MAX_RESTARTS", "", 0, 1<<30)).
				does("how often torchrun will restart the workers")
	ElasticUseAgentStore = add(boolean("TORCHELASTIC_USE_AGENT_STORE", "")).
				does("the launcher hosts torch's store, no rank does")
)

// table holds the knobs in the order of their declaration.
var table []entry

func add[T any](k *Knob[T]) *Knob[T] {
	table = append(table, k)
	return k
}

func (k *Knob[T]) does(doc string) *Knob[T] {
	k.doc = doc
	return k
}

func (k *Knob[T]) or(aliases ...string) *Knob[T] {
	k.aliases = aliases
	return k
}

package launch

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/serry-project/serry/rendezvous"
)

const (
	beatTime   = 2 * time.Second
	silentTime = 10 * time.Second // after which a node is not waited for any more
	storeTime  = 2 * time.Second  // for one call that is not worth waiting for
	lingerPoll = 200 * time.Millisecond
)

// nodes is how the launchers of several hosts know of each other. All of it goes through the rendezvous, and none of it
// is needed for the ranks to go on: a launcher that loses the others says so once.
//
//	run              the run id, chosen by who comes first
//	<run>/shape      number of nodes and of ranks on each, likewise
//	<run>/N/claims   counts the launchers that said they are node N
//	<run>/N/beat     counts up while the launcher of node N lives
//	<run>/N/done     1 when its ranks have ended
//	<run>/failed     1 when a rank failed for good and FailFast is set
type nodes struct {
	store rendezvous.Store
	cfg   *Config
	log   *slog.Logger
	life  context.Context
	end   context.CancelFunc
}

const nodesPrefix = "serry-launch"

// meet introduces this launcher to the others. It sets cfg.RunID if that is empty.
func meet(ctx context.Context, store rendezvous.Store, cfg *Config) (*nodes, error) {
	base := rendezvous.Prefix(store, nodesPrefix)
	if cfg.RunID == "" {
		id, err := base.CompareAndSet(ctx, "run", nil, []byte(randomID()))
		if err != nil {
			return nil, err
		}
		cfg.RunID = string(id)
	}
	n := &nodes{store: rendezvous.Prefix(base, cfg.RunID), cfg: cfg, log: cfg.Log}
	mine := fmt.Sprintf("%d nodes with %d ranks each", cfg.Nodes, cfg.Ranks)
	theirs, err := n.store.CompareAndSet(ctx, "shape", nil, []byte(mine))
	if err != nil {
		return nil, err
	}
	if string(theirs) != mine {
		return nil, fmt.Errorf("this launcher was told of %s, another of %s: give all the same numbers", mine, theirs)
	}
	claims, err := n.store.Add(ctx, n.key("claims"), 1)
	if err != nil {
		return nil, err
	}
	if claims > 1 {
		n.log.Warn("another launcher has said that it is this node; if it still runs, its ranks and these have the same numbers",
			"node", cfg.Node)
	}
	n.life, n.end = context.WithCancel(context.Background())
	return n, nil
}

func (n *nodes) key(name string) string { return n.keyOf(n.cfg.Node, name) }

func (n *nodes) keyOf(node int, name string) string { return fmt.Sprintf("%d/%s", node, name) }

// watch says that this launcher lives until leave, and calls failed when another one's rank has failed.
func (n *nodes) watch(tasks *sync.WaitGroup, failed func()) {
	tasks.Go(func() {
		told := false
		for n.life.Err() == nil {
			if err := n.add("beat"); err != nil && !told && n.life.Err() == nil {
				told = true
				n.log.Warn("the launcher of node 0 does not answer; the ranks go on", "err", err)
			}
			select {
			case <-n.life.Done():
			case <-time.After(beatTime):
			}
		}
	})
	if n.cfg.FailFast {
		tasks.Go(func() {
			if n.store.Wait(n.life, "failed") == nil {
				failed()
			}
		})
	}
}

// add counts one of this node's counters up.
func (n *nodes) add(name string) error {
	ctx, cancel := context.WithTimeout(n.life, storeTime)
	defer cancel()
	_, err := n.store.Add(ctx, n.key(name), 1)
	return err
}

func (n *nodes) tellAll() {
	ctx, cancel := context.WithTimeout(n.life, storeTime)
	defer cancel()
	if err := n.store.Set(ctx, "failed", []byte("1")); err != nil {
		n.log.Warn("cannot tell the other nodes that a rank has failed", "err", err)
	}
}

func (n *nodes) leave() {
	_ = n.add("done") // if the other launcher is gone, nobody is there to know
	n.end()
}

// linger returns when every other node is done, or silent for a while, or never came.
func (n *nodes) linger(ctx context.Context) error {
	seen, since := make([]int64, n.cfg.Nodes), make([]time.Time, n.cfg.Nodes)
	told := false
	for {
		var open []string
		for node := range n.cfg.Nodes {
			if node == n.cfg.Node {
				continue
			}
			done, err := n.store.Add(ctx, n.keyOf(node, "done"), 0)
			if err != nil {
				return err
			}
			beat, err := n.store.Add(ctx, n.keyOf(node, "beat"), 0)
			if err != nil {
				return err
			}
			if done > 0 || beat == 0 {
				continue
			}
			if beat != seen[node] {
				seen[node], since[node] = beat, time.Now()
			}
			if time.Since(since[node]) < silentTime {
				open = append(open, fmt.Sprint(node))
			}
		}
		if len(open) == 0 {
			return nil
		}
		if !told {
			told = true
			n.log.Warn("the ranks of this node have ended; serving the rendezvous until those of others have, or a signal",
				"nodes", strings.Join(open, ","))
		}
		select {
		case <-time.After(lingerPoll):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

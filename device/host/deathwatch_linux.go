package host

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// DeathWatch waits for the death words of many peers and reports each that the
// kernel marks. It holds one sleeping goroutine (and so one thread) for each
// 127 words.
//
// All methods may be called from any goroutine, also from the callback.
type DeathWatch struct {
	onDeath func(id uint64)

	mu     sync.Mutex
	shards []*deathShard
	closed bool
}

// deathShard is one sleeper. Its words are read only while its mutex is held
// or while waiting is set.
type deathShard struct {
	control *atomic.Uint32 // first of the words; changes with the set

	mu      sync.Mutex
	idle    sync.Cond // waiting became false
	waiting bool
	rounds  uint64 // how often it did
	closed  bool
	ids     []uint64
	words   []*atomic.Uint32

	// of the sleeper's goroutine
	snap []*atomic.Uint32
	vals []uint32
	dead []uint64
}

// NewDeathWatch returns a watch without peers. onDeath is called on a goroutine
// of the watch, once for each id, and should be short: while it runs, other
// deaths wait.
func NewDeathWatch(onDeath func(id uint64)) (*DeathWatch, error) {
	return &DeathWatch{onDeath: onDeath}, nil
}

// Add watches a death word under an id of the caller's choice. The word stays
// mapped until Remove or Close has returned; being reported is not enough. A
// word that is marked already is reported at once. The id must not be watched
// already.
func (w *DeathWatch) Add(id uint64, word *atomic.Uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return fmt.Errorf("host: death watch: add %d: the watch is closed", id)
	}
	for _, s := range w.shards {
		if s.has(id) {
			return fmt.Errorf("host: death watch: add %d: it is watched already", id)
		}
	}
	for _, s := range w.shards {
		if s.add(id, word) {
			return nil
		}
	}
	s := &deathShard{control: new(atomic.Uint32)}
	s.idle.L = &s.mu
	s.add(id, word)
	w.shards = append(w.shards, s)
	go s.run(w.onDeath)
	return nil
}

// Remove ends the watching of id, if it is watched. When it has returned, the
// watch does not touch the word any more; a callback for it may still be
// running.
func (w *DeathWatch) Remove(id uint64) {
	w.mu.Lock()
	shards := w.shards[:len(w.shards):len(w.shards)]
	w.mu.Unlock()
	for _, s := range shards {
		s.remove(id)
	}
}

// Close ends the watch. When it has returned, the watch touches no word and no
// callback starts; one may still be running.
func (w *DeathWatch) Close() {
	w.mu.Lock()
	w.closed = true
	shards := w.shards
	w.mu.Unlock()
	for _, s := range shards {
		s.close()
	}
}

func (s *deathShard) has(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.index(id) >= 0
}

func (s *deathShard) index(id uint64) int {
	for i, v := range s.ids {
		if v == id {
			return i
		}
	}
	return -1
}

func (s *deathShard) add(id uint64, word *atomic.Uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ids) == FutexWaitvMax-1 {
		return false
	}
	s.ids = append(s.ids, id)
	s.words = append(s.words, word)
	s.kick()
	return true
}

func (s *deathShard) remove(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.index(id); i >= 0 {
		s.drop(i)
	}
	// Also for an id that is not there: it may have been reported a moment ago
	// by a sleeper that still waits on the others.
	s.settle()
}

func (s *deathShard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.ids, s.words = nil, nil
	s.settle()
}

func (s *deathShard) drop(i int) {
	last := len(s.ids) - 1
	s.ids[i], s.words[i] = s.ids[last], s.words[last]
	s.words[last] = nil
	s.ids, s.words = s.ids[:last], s.words[:last]
}

// settle returns when the sleeper has seen the present set.
func (s *deathShard) settle() {
	s.kick()
	for r := s.rounds; s.waiting && s.rounds == r; {
		s.idle.Wait()
	}
}

func (s *deathShard) kick() {
	s.control.Add(1)
	_, _ = FutexWake(s.control, 1)
}

func (s *deathShard) run(onDeath func(uint64)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed {
		s.snap = append(s.snap[:0], s.control)
		s.vals = append(s.vals[:0], s.control.Load())
		s.dead = s.dead[:0]
		for i := 0; i < len(s.ids); {
			v := s.words[i].Load()
			if OwnerDied(v) {
				s.dead = append(s.dead, s.ids[i])
				s.drop(i)
				continue
			}
			s.snap = append(s.snap, s.words[i])
			s.vals = append(s.vals, v)
			i++
		}
		if len(s.dead) > 0 {
			for i := 0; i < len(s.dead) && !s.closed; i++ {
				s.mu.Unlock()
				onDeath(s.dead[i])
				s.mu.Lock()
			}
			continue
		}
		s.waiting = true
		s.mu.Unlock()
		// An error means that a word is not mapped: the caller broke the
		// contract of Add, and there is nobody to tell but by the crash that
		// the next load is.
		_, _ = FutexWaitv(s.snap, s.vals, -1)
		s.mu.Lock()
		s.waiting = false
		s.rounds++
		s.idle.Broadcast()
	}
}

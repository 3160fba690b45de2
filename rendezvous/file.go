package rendezvous

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A directory is a store: one file per key, and a file that is locked (flock) by who writes.
//
//	lock          empty, never removed
//	k-<key>       the key with all but letters, digits, "-" and "_" as %XX
//	h-<sha256>    a key for whose name that is too long
//	t-*           a value on its way: written, then renamed over the old one
//
// So at any moment, a kill -9 included, a key has its old value or its new one, and a lock dies with its owner. Nothing
// is synced: what a host forgets in a power cut belongs to a run that the power cut has ended. A file is
//
//	"SRV1" | u32 length of the key | key | value | u32 CRC-32C of all before     (big endian)
const (
	fileMagic   = "SRV1"
	filePollMin = time.Millisecond
	filePollMax = 50 * time.Millisecond // for a key
	fileLockMax = 5 * time.Millisecond  // for the lock, which is held for less
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type fileStore struct {
	dir     string
	closing chan struct{}
	once    sync.Once
}

// OpenFile returns the store in the directory dir, which it makes if needed, but not the one around it. All processes
// that open the directory share the store; on a network file system this takes one where flock works. Waiting is by
// looking every 50 ms or more often. A file system that hangs holds a call up beyond its context. Use a new directory for
// each run: one run finds what an earlier one left.
func OpenFile(ctx context.Context, dir string) (Store, error) {
	s := &fileStore{dir: filepath.Clean(dir), closing: make(chan struct{})}
	if err := s.mkdir(); err != nil {
		return nil, s.fail("open", "", err)
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, s.fail("open", "", err)
	}
	defer unlock()
	// Whoever writes holds the lock, so these are of processes that died.
	stale, _ := filepath.Glob(filepath.Join(s.dir, "t-*"))
	for _, name := range stale {
		_ = os.Remove(name)
	}
	return s, nil
}

// mkdir makes the directory unless it is there. The one around it must be: a path that is mistyped would otherwise be a
// store of its own, where a rank waits for the others.
func (s *fileStore) mkdir() error {
	err := os.Mkdir(s.dir, 0o700)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", errNoParent, err)
	case errors.Is(err, fs.ErrExist):
		if st, statErr := os.Stat(s.dir); statErr != nil || st.IsDir() {
			return statErr
		}
		return &fs.PathError{Op: "open", Path: s.dir, Err: syscall.ENOTDIR}
	}
	return err
}

var errNoParent = errors.New("the directory around it does not exist")

func (s *fileStore) fail(op, key string, err error) error {
	e := &Error{Store: "file://" + s.dir, Op: op, Key: key, Err: err}
	switch {
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		e.Hint = "its disk or your quota is full: make room, or choose a directory elsewhere"
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS):
		e.Hint = fmt.Sprintf("user id %d may not write there: choose a directory that every rank can write", os.Getuid())
	case errors.Is(err, errNoParent):
		e.Hint = fmt.Sprintf("correct the path, or make %s", filepath.Dir(s.dir))
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "the directory was removed while in use"
	case errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTDIR):
		e.Hint = "something on that path is not a directory: choose another"
	case errors.Is(err, ErrCorrupt):
		e.Hint = "remove the directory and start again"
	}
	return e
}

func (s *fileStore) check(ctx context.Context, keys ...string) error {
	select {
	case <-s.closing:
		return ErrClosed
	default:
	}
	for _, k := range keys {
		if err := checkKey(k); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// poll calls try, less and less often, until it says that it is done.
func (s *fileStore) poll(ctx context.Context, what string, most time.Duration, try func() (done bool, err error)) error {
	since, pause := time.Now(), filePollMin
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		if done, err := try(); done || err != nil {
			return err
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
		case <-s.closing:
			return ErrClosed
		case <-ctx.Done():
			return ctxError(ctx, what, since, nil)
		}
		pause = min(2*pause, most)
	}
}

// lock waits until this call is the only writer, in this process and all others.
func (s *fileStore) lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(s.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = s.poll(ctx, "locked by another process", fileLockMax, func() (bool, error) { return tryLock(f) })
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

func fileName(key string) string {
	const most = 200 // file systems allow 255
	var b strings.Builder
	b.WriteString("k-")
	for i := 0; i < len(key) && b.Len() <= most; i++ {
		c := key[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	if b.Len() > most {
		sum := sha256.Sum256([]byte(key))
		return "h-" + hex.EncodeToString(sum[:])
	}
	return b.String()
}

func encodeFile(key string, value []byte) []byte {
	b := make([]byte, 0, len(fileMagic)+4+len(key)+len(value)+4)
	b = append(b, fileMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(key)))
	b = append(b, key...)
	b = append(b, value...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decodeFile returns the value in a file that is to hold key.
func decodeFile(b []byte, key string) ([]byte, error) {
	const frame = len(fileMagic) + 4 + 4
	if len(b) < frame || string(b[:len(fileMagic)]) != fileMagic {
		return nil, fmt.Errorf("%w: not a value of this store", ErrCorrupt)
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return nil, fmt.Errorf("%w: its checksum does not match", ErrCorrupt)
	}
	rest := body[len(fileMagic):]
	n := uint64(binary.BigEndian.Uint32(rest))
	rest = rest[4:]
	if n > uint64(len(rest)) || string(rest[:n]) != key {
		return nil, fmt.Errorf("%w: it holds another key", ErrCorrupt)
	}
	return append([]byte{}, rest[n:]...), nil
}

// read returns the value of key, and false if there is none.
func (s *fileStore) read(key string) ([]byte, bool, error) {
	name := filepath.Join(s.dir, fileName(key))
	b, err := os.ReadFile(name)
	if errors.Is(err, syscall.ESTALE) { // NFS, when the file was replaced between look-up and read
		b, err = os.ReadFile(name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		if _, dirErr := os.Stat(s.dir); dirErr != nil {
			return nil, false, dirErr
		}
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	v, err := decodeFile(b, key)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", name, err)
	}
	return v, true, nil
}

// write replaces the value of key. The lock is held.
func (s *fileStore) write(key string, value []byte) (err error) {
	f, err := os.CreateTemp(s.dir, "t-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(encodeFile(key, value))
	if closeErr := f.Close(); err == nil {
		err = closeErr // where a network file system reports a full disk
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(s.dir, fileName(key)))
}

func (s *fileStore) Get(ctx context.Context, key string) ([]byte, error) {
	var value []byte
	err := s.check(ctx, key)
	if err != nil {
		return nil, s.fail("get", key, err)
	}
	err = s.poll(ctx, "not there", filePollMax, func() (ok bool, err error) {
		value, ok, err = s.read(key)
		return ok, err
	})
	if err != nil {
		return nil, s.waitFail("get", key, err)
	}
	return value, nil
}

func (s *fileStore) Wait(ctx context.Context, keys ...string) error {
	if err := s.check(ctx, keys...); err != nil {
		return s.fail("wait", firstKey(keys), err)
	}
	err := s.poll(ctx, "not there", filePollMax, func() (bool, error) {
		for len(keys) > 0 {
			if _, ok, err := s.read(keys[0]); err != nil || !ok {
				return false, err
			}
			keys = keys[1:]
		}
		return true, nil
	})
	if err != nil {
		return s.waitFail("wait", firstKey(keys), err)
	}
	return nil
}

func (s *fileStore) waitFail(op, key string, err error) error {
	err = s.fail(op, key, err)
	var e *Error
	var waited *waitedError
	if errors.As(err, &e) && errors.As(err, &waited) {
		e.Hint = hintWait
	}
	return err
}

// change reads the value of key and stores the new one that update returns, if it returns one, while nobody else writes.
func (s *fileStore) change(ctx context.Context, op, key string, update func(old []byte, ok bool) ([]byte, bool, error)) error {
	err := s.check(ctx, key)
	if err != nil {
		return s.fail(op, key, err)
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return s.fail(op, key, err)
	}
	defer unlock()
	old, ok, err := s.read(key)
	if err != nil {
		return s.fail(op, key, err)
	}
	value, write, err := update(old, ok)
	if err == nil && write {
		err = s.write(key, value)
	}
	if err != nil {
		return s.fail(op, key, err)
	}
	return nil
}

func (s *fileStore) Set(ctx context.Context, key string, value []byte) error {
	return s.change(ctx, "set", key, func([]byte, bool) ([]byte, bool, error) {
		return value, true, checkValue(value)
	})
}

func (s *fileStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	var sum int64
	err := s.change(ctx, "add", key, func(old []byte, ok bool) (_ []byte, _ bool, err error) {
		if ok {
			if sum, err = parseNumber(old); err != nil {
				return nil, false, err
			}
		}
		sum += delta
		return strconv.AppendInt(nil, sum, 10), true, nil
	})
	if err != nil {
		return 0, err
	}
	return sum, nil
}

func (s *fileStore) CompareAndSet(ctx context.Context, key string, expected, desired []byte) ([]byte, error) {
	var now []byte
	err := s.change(ctx, "compare-and-set", key, func(old []byte, ok bool) ([]byte, bool, error) {
		if ok && !bytes.Equal(old, expected) || !ok && len(expected) > 0 {
			now = old
			return nil, false, checkValue(desired)
		}
		now = append([]byte{}, desired...)
		return desired, true, checkValue(desired)
	})
	if err != nil {
		return nil, err
	}
	return now, nil
}

func (s *fileStore) Close() error {
	s.once.Do(func() { close(s.closing) })
	return nil
}

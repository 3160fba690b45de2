package rendezvous

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// The protocol of torch.distributed's TCPStore, as torch 2.13 speaks it on both of its backends (libuv and the older
// one). All integers are little-endian. A client sends u8 query and arguments; what it does not wait for has no answer.
// bytes is a u64 length and so many bytes, keys is a u64 count and so many bytes.
//
//	 0 validate     u32 magic               -             first of all; a wrong one costs the connection
//	 1 set          bytes key, bytes value  -
//	 2 compare_set  bytes key, bytes expected, bytes desired
//	                                        bytes         what is there; expected if nothing is there
//	 3 get          bytes key               bytes         asked after a wait, since it does not wait
//	 4 add          bytes key, i64 delta    i64 sum       the value is decimal text
//	 5 check        keys                    u8            0 if all are there, else 1
//	 6 wait         keys                    u8 0          once all are there
//	 7 num_keys                             i64
//	 8 delete       bytes key               i64           how many there were
//	 9 append       bytes key, bytes value  -
//	10 multi_get    keys                    n x bytes
//	11 multi_set    u64 n, n x (bytes key, bytes value)
//	                                        -
//	12 cancel_wait                          u8 1          the wait itself then has no answer
//	13 ping         u32 nonce               u32 nonce
//	14 queue_push   bytes key, bytes value  -
//	15 queue_pop    bytes key               i64 n         how many there were; then bytes, if n > 0
//	16 queue_len    bytes key               i64
//	17 list_keys                            keys
//	18 barrier      bytes key, i64 world    u8 0          once world have come; it counts like add
//
// Torch's client puts "/" before every key that its user names. A queue that holds something counts as a key for check
// and wait, not for the others. There is no error answer: the server closes the connection.
const (
	torchValidate = iota
	torchSet
	torchCompareSet
	torchGet
	torchAdd
	torchCheck
	torchWait
	torchNumKeys
	torchDelete
	torchAppend
	torchMultiGet
	torchMultiSet
	torchCancelWait
	torchPing
	torchQueuePush
	torchQueuePop
	torchQueueLen
	torchListKeys
	torchBarrier
)

const (
	torchMagic    = 0x3C85F7CE
	torchReady    = 0 // to check and wait
	torchNotReady = 1 // to check; to wait, that it was canceled

	torchMaxKey      = 8 << 10   // as torch's server has it, "/" included
	torchMaxKeys     = 128 << 10 // in one query, as torch's server has it
	torchMaxKeyBytes = 16 << 20  // in one query, all keys together
	torchMaxAnswer   = 1 << 30   // to one multi_get
)

var errTorchFrame = errors.New("not a message of torch's TCPStore protocol")

func torchBytes(b, s []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
	return append(b, s...)
}

func torchKeys(b []byte, keys []string) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(len(keys)))
	for _, k := range keys {
		b = torchBytes(b, []byte(k))
	}
	return b
}

func torchInt(b []byte, n int64) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

// torchReader takes fields off a stream. After the first failure err is set and all fields are zero.
type torchReader struct {
	r    io.Reader
	err  error
	keys int // bytes of keys in this query
}

func (t *torchReader) fixed(b []byte) []byte {
	if t.err == nil {
		_, err := io.ReadFull(t.r, b)
		t.err = unexpected(err)
	}
	if t.err != nil {
		clear(b)
	}
	return b
}

func (t *torchReader) u8() byte    { return t.fixed(make([]byte, 1))[0] }
func (t *torchReader) u32() uint32 { return binary.LittleEndian.Uint32(t.fixed(make([]byte, 4))) }
func (t *torchReader) u64() uint64 { return binary.LittleEndian.Uint64(t.fixed(make([]byte, 8))) }

func (t *torchReader) bytes(most uint64) []byte {
	n := t.u64()
	if t.err == nil && n > most {
		t.err = fmt.Errorf("%w: a length of %d where at most %d are allowed", errTorchFrame, n, most)
	}
	if t.err != nil {
		return nil
	}
	b, err := readBytes(t.r, n)
	t.err = err
	return b
}

func (t *torchReader) value() []byte { return t.bytes(MaxValue) }

func (t *torchReader) key() string {
	k := t.bytes(torchMaxKey)
	if t.keys += len(k); t.keys > torchMaxKeyBytes {
		t.err = fmt.Errorf("%w: more than %d bytes of keys", errTorchFrame, torchMaxKeyBytes)
	}
	return string(k)
}

func (t *torchReader) count() int {
	n := t.u64()
	if n > torchMaxKeys {
		t.err = fmt.Errorf("%w: %d keys where at most %d are allowed", errTorchFrame, n, torchMaxKeys)
		return 0
	}
	return int(n)
}

func (t *torchReader) keyList() []string {
	var keys []string
	for range t.count() {
		if keys = append(keys, t.key()); t.err != nil {
			return nil
		}
	}
	return keys
}

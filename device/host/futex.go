package host

// FutexResult says why a futex wait ended. None of them says what the word is
// now: the caller loads it again.
type FutexResult uint8

const (
	// FutexWoken: somebody woke the word, or a signal ended the wait.
	FutexWoken FutexResult = iota
	// FutexChanged: the word did not have the expected value.
	FutexChanged
	// FutexTimedOut: the timeout passed.
	FutexTimedOut
)

func (r FutexResult) String() string {
	switch r {
	case FutexWoken:
		return "woken"
	case FutexChanged:
		return "changed"
	case FutexTimedOut:
		return "timed out"
	}
	return "unknown"
}

// FutexWaitvMax is the largest number of words that FutexWaitv takes.
const FutexWaitvMax = 128

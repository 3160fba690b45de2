package harness

import "time"

// MonoOf is a time on Mono's clock. Who is taken off its core between the two readings tries again: else what happened
// would be told too early.
func MonoOf(at time.Time) (mono int64) {
	for range 100 {
		before := Mono()
		mono = before - int64(time.Since(at))
		if Mono()-before < int64(50*time.Microsecond) {
			break
		}
	}
	return mono
}

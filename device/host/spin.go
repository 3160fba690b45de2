package host

// maxSpin bounds one call, because assembly cannot be preempted and would hold
// up the garbage collector: about 15 microseconds where PAUSE takes longest.
const maxSpin = 256

// Spin executes n PAUSE (amd64) or YIELD (arm64) instructions, at most 256 a
// call: a wait that leaves the core's other thread and the memory bus alone.
func Spin(n int) { spin(min(n, maxSpin)) }

// Package proof is the proof that the foundations hold, as a test: ranks as processes run one varied program, one of them
// is killed at each of the worst places, and the survivors' outcomes, sets, epochs and bits are compared with each other
// and with what the contributors give.
package proof

package collectives

import (
	"fmt"
	"testing"

	"github.com/serry-project/serry/internal/dtype"
)

// BenchmarkAllReduce is what an operation costs all ranks of a host together, in one goroutine: nobody waits.
func BenchmarkAllReduce(b *testing.B) {
	for _, ranks := range []int{1, 2, 4} {
		for _, bytes := range []int{8, 4096} {
			b.Run(fmt.Sprintf("ranks=%d/bytes=%d", ranks, bytes), func(b *testing.B) {
				w := newSim(b, 1, ranks, Shape{SlotBytes: testSlot, Depth: 4, Lanes: 1})
				ops := make([]Op, ranks)
				for r := range ops {
					ops[r].Call = Call{Kind: AllReduce, DType: dtype.F32, Reduce: dtype.Sum, In: make([]byte, bytes), Out: make([]byte, bytes)}
				}
				b.ReportAllocs()
				for seq := uint64(1); b.Loop(); seq++ {
					for r, x := range w.ranks {
						if err := x.comm.Start(&ops[r], seq, x.comm.Current()); err != nil {
							b.Fatal(err)
						}
						x.comm.Step(&ops[r], true)
					}
					for r, x := range w.ranks {
						if r < ranks-1 {
							if st := x.comm.Step(&ops[r], true); st != Done {
								b.Fatal(st)
							}
						}
					}
				}
			})
		}
	}
}

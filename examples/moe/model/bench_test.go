package model

import "testing"

func BenchmarkStep(b *testing.B) {
	m := loadShared(b)
	for _, n := range []int{1, 4, 16, 64} {
		b.Run("decode"+string(rune('0'+n/10))+string(rune('0'+n%10)), func(b *testing.B) {
			batch := m.NewBatch()
			rows := make([]Row, n)
			for i := range rows {
				rows[i] = Row{Cache: m.NewCache(), Token: byte('a' + i%26)}
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				for r := range rows {
					rows[r].Pos = i % 256
				}
				if _, err := m.Step(batch, rows); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

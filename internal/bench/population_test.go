package bench

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// staged is a population of three without processes: what they say is put into its events.
func staged(t *testing.T) (*population, func(rank int, text string)) {
	c := &crew{ctx: t.Context(), events: make(chan event, 100)}
	p := &population{crew: c, res: &Result{Name: "test"}, live: map[int]*member{}}
	for r := range 3 {
		p.live[r] = &member{proc: &proc{rank: r, done: make(chan struct{})}}
	}
	p.doom(p.live[1], "a test")
	return p, func(rank int, text string) {
		c.events <- event{p: p.live[rank].proc, text: text, end: text == ""}
	}
}

func TestSurvivorsThatAgree(t *testing.T) {
	p, say := staged(t)
	for _, r := range []int{0, 2} {
		say(r, fmt.Sprintf("epoch 5 70 9 %d 0,2", 1000+r))
		say(r, fmt.Sprintf("lost 5 %d 1 its pidfd says so", 900-r))
	}
	view, last, err := p.outlive(p.live[1])
	require.NoError(t, err)
	require.Empty(t, p.res.Violations)
	require.EqualValues(t, 1002, last)
	require.EqualValues(t, 900, view)
}

func TestViolationsAreFound(t *testing.T) {
	for want, lines := range map[string][2]string{
		"goes on with ranks 2":                {"epoch 5 70 9 1 2|lost 5 1 1 x", "epoch 5 70 9 1 2|lost 5 1 1 x"},
		"rank 2 was told that rank 0 is lost": {"epoch 5 70 9 1 0,2|lost 5 1 1 x", "epoch 5 70 9 1 0,2|lost 5 1 0 x"},
		"told that rank 0,1 is lost":          {"epoch 5 70 9 1 0,2|lost 5 1 1 x", "epoch 5 70 9 1 0,2|lost 5 1 0,1 x"},
		"survivors of rank 1 differ: epoch 5 with ranks 0,2 at step 9, operation 70; rank 2: epoch 5 with ranks 0,2 at step 10": {
			"epoch 5 70 9 1 0,2|lost 5 1 1 x", "epoch 5 71 10 1 0,2|lost 5 1 1 x"},
		"rank 2: step 3: all_reduce": {"epoch 5 70 9 1 0,2|lost 5 1 1 x", "violation step 3: all_reduce|epoch 5 70 9 1 0,2|lost 5 1 1 x"},
	} {
		p, say := staged(t)
		for i, r := range []int{0, 2} {
			for l := range strings.SplitSeq(lines[i], "|") {
				say(r, l)
			}
		}
		_, _, err := p.outlive(p.live[1])
		require.NoError(t, err)
		require.Contains(t, strings.Join(p.res.Violations, "\n"), want)
	}
}

func TestHangIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, say := staged(t)
		say(0, "epoch 5 70 9 1 0,2")
		say(0, "lost 5 1 1 x")
		begin := time.Now()
		_, _, err := p.outlive(p.live[1])
		require.ErrorIs(t, err, errBroken)
		require.Equal(t, hang, time.Since(begin))
		require.Contains(t, p.res.Violations[0], "hang: 5s after rank 1 died in a test, ranks 2")
	})
}

func TestSurvivorThatEndsIsFound(t *testing.T) {
	p, say := staged(t)
	p.live[2].cmd = exec.Command("true")
	_, _ = p.live[2].Write([]byte("evicted"))
	say(2, "")
	_, _, err := p.outlive(p.live[1])
	require.ErrorIs(t, err, errBroken)
	require.Contains(t, p.res.Violations[0], "rank 2 ended")
	require.Contains(t, p.res.Violations[0], "evicted")
}

func TestWrongStepIsFound(t *testing.T) {
	l := &layer{shape: shape{Tokens: 2, Hidden: 3, TopK: 2, Experts: 4}, rank: 1}
	l.base = []float32{1, 2, 3, 4, 5, 6}
	l.x, l.want, l.mass = make([]float32, 6), make([]float32, 6), make([]float32, 2)
	l.w, l.e = []float32{0.5, 0.25, 0.5, 0.25}, make([]int32, 4)
	l.fill(2, factor)
	require.NotEqual(t, l.e[0], l.e[1])
	l.y = append([]float32(nil), l.want...)
	require.Empty(t, l.wrong())
	l.y[4] += 1e-6
	require.Contains(t, l.wrong(), "token 1: element 1")
	l.y[4] = l.want[4]
	l.mass[0] = 0.25
	require.Contains(t, l.wrong(), "token 0 lost weight 0.25")
}

// Every rank dies as often as the others, in both phases, half of the times in an ep step.
func TestPlanIsEven(t *testing.T) {
	f := &failover{cfg: FailoverDefaults(), rng: rand.New(rand.NewPCG(7, 0))}
	f.choose()
	ranks, phases, points := map[int]int{}, map[string]int{}, map[string]int{}
	for i := range f.cfg.Kills {
		k := f.plan(i)
		ranks[k.Rank]++
		phases[fmt.Sprint(k.Phase == phaseEP, k.Rank)]++
		points[k.Phase+" "+k.Point]++
	}
	require.Equal(t, map[int]int{0: 50, 1: 50, 2: 50, 3: 50}, ranks)
	require.Len(t, phases, 8)
	for k, n := range phases {
		require.Equal(t, 25, n, k)
	}
	require.Len(t, points, len(epPoints)+len(worldPoints))
	for k, n := range points {
		require.GreaterOrEqual(t, n, 4, k)
	}
}

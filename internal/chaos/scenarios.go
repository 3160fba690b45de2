package chaos

import (
	"context"
	"fmt"
	"strings"
)

// Scenario is a row of what the project asks for: faults of one sort, with bars.
type Scenario struct {
	Name, About string
	run         func(ctx context.Context, o Options, cfg Config) (*Result, error)
}

var scenarios []Scenario

// Scenarios lists them, the most important first.
func Scenarios() []Scenario { return scenarios }

// RunScenarios runs the named scenario, all of them, or (no name) drawn faults.
func RunScenarios(ctx context.Context, o Options, cfg Config, name string) (rs []*Result, err error) {
	if name == "" {
		r, err := Run(ctx, o, cfg)
		return []*Result{r}, err
	}
	var names []string
	for _, s := range scenarios {
		names = append(names, s.Name)
		if s.Name != name && name != "all" {
			continue
		}
		r, err := s.run(ctx, o, cfg)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		rs = append(rs, r)
	}
	if len(rs) == 0 {
		return nil, &UsageError{fmt.Errorf("--scenario %s: want list, all or one of %s", name, strings.Join(names, ", "))}
	}
	return rs, nil
}

// Package broken says which line of the production code is broken in this process. Only files that mutate.Write has made
// import it, and who builds with them: production code knows nothing of it.
package broken

import (
	"flag"
	"fmt"
	"strings"
)

// Chosen is the number of the mutation that is in force, 0 if none is. It is to be set, by Choose, before anything runs.
var Chosen int

func init() {
	flag.Func("broken", "break the line of production code that mutate's table has under this `name`", Choose)
}

// Choose puts the mutation of this name in force; "" is none.
func Choose(name string) error {
	if name == "" {
		Chosen = 0
		return nil
	}
	for i, n := range names {
		if n == name {
			Chosen = i + 1
			return nil
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("broken: %q: this program was built without mutations: build it with -overlay", name)
	}
	return fmt.Errorf("broken: %q: this program has %s", name, strings.Join(names, ", "))
}

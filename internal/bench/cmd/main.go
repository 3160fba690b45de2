// Command cmd is `serry bench` alone.
package main

import (
	"os"

	"github.com/serry-project/serry/internal/bench"
)

func main() {
	if bench.Command().Execute() != nil {
		os.Exit(1)
	}
}

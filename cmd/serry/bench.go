package main

import (
	"github.com/serry-project/serry/internal/bench"

	"github.com/spf13/cobra"
)

func benchCommand() *cobra.Command { return bench.Command() }

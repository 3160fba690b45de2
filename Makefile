# Go 1.26 and make are needed; gcc and Python 3.11 for some of it (make deps says for what).

PKG       ?= ./...
P         ?= 2
FUZZTIME  ?= 20s
BENCH     ?= .
BENCHTIME ?= 100x
BENCHPKG  ?= ./collectives/... ./ep/...

CHECK = go run scripts/check.go scripts/gotest.go -p $(P) -pkg "$(PKG)" -fuzztime $(FUZZTIME)

.PHONY: help deps build test test-long race nocgo lint fuzz bench demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PKG="./device/... ./mesh" chooses packages, P=2 how many are tested at once, FUZZTIME, BENCH, BENCHTIME, BENCHPKG.'

deps: ## bring what the other targets need, or say how
	@scripts/deps.sh

build: ## compile everything
	go build $(PKG)

test: ## all checks: build, lint, other systems, tests, race detector (up to 20 min)
	@$(CHECK) build fmt vet staticcheck nocgo cross test tags race

test-long: ## the tests with the build tag long, also under the race detector
	@$(CHECK) long longrace

race: ## tests of the packages with goroutines under the race detector (needs gcc)
	@$(CHECK) race

nocgo: ## compile everything without cgo
	@$(CHECK) nocgo

lint: ## gofmt, go vet, staticcheck, the rules of the house
	@$(CHECK) fmt vet staticcheck lint

fuzz: ## every fuzz target for FUZZTIME
	@$(CHECK) fuzz

bench: ## benchmarks of collectives and expert parallelism, BENCHTIME each
	go test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) $(BENCHPKG)

demo: ## mixture of experts that survives a kill
	go run ./examples/moe/cmd/demo

clean: ## remove what was built
	rm -rf build bin dist out

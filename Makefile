# Go 1.26 and make are needed; gcc and Python 3.11 for some of it (make deps says for what).

PKG       ?= ./...
P         ?= 2
FUZZTIME  ?= 20s
BENCHARGS ?= all
BENCH     ?= .
BENCHTIME ?= 100x
SIMARGS   ?= --schedules 20000
CHAOSARGS ?= --faults 200
BENCHPKG  ?= ./collectives/... ./ep/...

CHECK = go run scripts/check.go scripts/gotest.go -p $(P) -pkg "$(PKG)" -fuzztime $(FUZZTIME)

.PHONY: help deps venv build test test-long race nocgo lint fuzz sim chaos bench bench-go demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PKG="./device/... ./mesh" chooses packages, P=2 how many are tested at once, FUZZTIME how long each target is fuzzed.'
	@echo 'BENCHARGS="ep --ranks 8" is what serry bench runs (serry bench --help); SIMARGS and CHAOSARGS are for sim and chaos; BENCH, BENCHTIME, BENCHPKG for bench-go.'

deps: ## bring what the other targets need, or say how
	@scripts/deps.sh

venv: ## a Python with torch in build/venv, for the tests that want one (some GB)
	python3 -m venv build/venv
	build/venv/bin/pip install torch numpy

build: ## compile everything
	go build $(PKG)

test: deps ## all checks: build, lint, other systems, tests, race detector (8 min)
	@$(CHECK) build fmt vet staticcheck nocgo cross test tags race

test-long: deps ## every point of the proof, soaks, torch at all sizes, also under the race detector (half an hour)
	@$(CHECK) long tags longrace

race: ## tests of the packages with goroutines under the race detector (needs gcc)
	@$(CHECK) race

nocgo: ## compile everything without cgo
	@$(CHECK) nocgo

lint: ## gofmt, go vet, staticcheck, the rules of the house
	@$(CHECK) fmt vet staticcheck lint

fuzz: ## every fuzz target for FUZZTIME
	@$(CHECK) fuzz

sim: ## simulated worlds with faults, checked against every promise (2 min)
	go build -o build/serry ./cmd/serry
	build/serry sim $(SIMARGS) --json build/sim.json

chaos: ## ranks as processes, killed and stopped and cut off, checked the same way (1 min)
	go build -o build/serry ./cmd/serry
	go build -tags faultpoint -o build/serry-faultpoint ./cmd/serry
	build/serry chaos $(CHAOSARGS) --faultpoint build/serry-faultpoint --json build/chaos.json

bench: ## everything that the project asks a time for: failover, join, ep, allreduce, idle (4 min)
	go build -o build/serry ./cmd/serry
	go build -tags faultpoint -o build/serry-faultpoint ./cmd/serry
	build/serry bench $(BENCHARGS) --faultpoint build/serry-faultpoint --json build/bench.json

bench-go: ## Go benchmarks of collectives and expert parallelism, BENCHTIME each
	go test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) $(BENCHPKG)

demo: ## mixture of experts that survives two kills
	go run ./examples/moe/cmd/demo

clean: ## remove what was built
	rm -rf build bin dist out

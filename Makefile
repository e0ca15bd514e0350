# Every target works on a fresh machine with Go, git and make; what needs more
# installs it (Debian packages as root) or says what is missing.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# No clock is right that shows less than when the source was committed.
BUILT ?= $(shell git log -1 --format=%ct 2>/dev/null)
LDFLAGS := -s -w -X github.com/dunlin-project/dunlin/internal/version.Version=$(VERSION) -X github.com/dunlin-project/dunlin/internal/version.built=$(BUILT)
GOBUILD := CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)'
# Platforms we ship, and why: amd64 gateways, arm64 Pi 3 to 5, arm/7 Pi 2 and
# 32-bit Pi OS, arm/6 Pi 1 and Zero, riscv64 boards.
PLATFORMS := amd64 arm64 arm/7 arm/6 riscv64
export GOFLAGS ?= -buildvcs=false

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

build: ## build bin/dunlin, bin/dunlin-wasm, bin/dunlin-proxy and bin/dunlin-ingress
	@mkdir -p bin
	$(GOBUILD) -o bin/dunlin ./cmd/dunlin
	$(GOBUILD) -o bin/dunlin-wasm ./cmd/dunlin-wasm
	$(GOBUILD) -o bin/dunlin-proxy ./cmd/dunlin-proxy
	$(GOBUILD) -o bin/dunlin-ingress ./cmd/dunlin-ingress

bin/dunlin-testclock: build # a build for tests, whose clock a file moves
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS) -X github.com/dunlin-project/dunlin/internal/clock.moved=DUNLIN_TEST_CLOCK' -o $@ ./cmd/dunlin

bin/dunlin-next: build # a build for tests, as the next release would be: its feature level is one higher
	CGO_ENABLED=0 go build -trimpath -tags dunlin_next -ldflags '-s -w -X github.com/dunlin-project/dunlin/internal/version.Version=next' -o $@ ./cmd/dunlin

examples: ## build the example modules from source into bin/examples
	@$(MAKE) --no-print-directory -C examples

demo: build ## start a one-node cluster, deploy an app, call it (ONCE=1: then exit)
	@$(MAKE) --no-print-directory -C examples hello
	@ONCE=$(ONCE) test/demo.sh

test: ## run the tests (installs what they need when it can)
	@test/setup.sh
	@if command -v gcc >/dev/null || command -v clang >/dev/null; then set -- -race -exec "'$(CURDIR)/test/raced/run.sh'"; \
	else set --; echo "No C compiler here: the race detector is left out"; fi; \
	set -x; go test "$$@" -shuffle=on -timeout 20m ./test/sim ./test/nodelink ./... # the longest first

e2e: build bin/dunlin-testclock bin/dunlin-next examples ## end-to-end tests on real processes (SHORT=1: fewer rounds; TESTS=regexp: some of them; PARALLEL=n (3) side by side); logs of what failed in bin/e2e
	@test/setup.sh
	@test/modules.sh
	CGO_ENABLED=0 go test -c -trimpath -tags e2e -o bin/e2e.test ./test/e2e
	CGO_ENABLED=0 go build -trimpath -o bin/runner ./test/runner
	cd test/e2e && DUNLIN_NEXT=$(CURDIR)/bin/dunlin-next ../../bin/runner -once $(if $(SHORT),-short) -parallel $(or $(PARALLEL),3) -tests '$(or $(TESTS),^Test)' -outside '^TestShop' \
	  -logs ../../bin/e2e $(CURDIR)/bin/e2e.test

e2e-long: build bin/dunlin-testclock examples ## the long forms: 100 times kill -9 with 20 pods, five idle minutes, every crash point; prints the figures
	@test/setup.sh
	DUNLIN_E2E_LOOPS=100 DUNLIN_E2E_IDLE=5m go test -count=1 -timeout 2h -v -tags e2e -run '^(TestKilledServerAdoptsItsGuests|TestIdleClusterWritesNothing)$$' ./test/e2e
	go test -count=1 -timeout 1h -v -run '^TestCrash' ./controlplane/consensus -args -crash.all

soak: build examples ## rolling restarts under 200 kept connections: no request may fail, nothing may leak; DURATION=30m, what is done is kept in bin/soak.job, so an interrupted one goes on
	@test/setup.sh
	DUNLIN_SOAK=$(or $(DURATION),30m) DUNLIN_SOAK_JOB=$(CURDIR)/bin/soak.job go test -count=1 -timeout 0 -v -tags e2e -run '^TestSoak$$' ./test/e2e

stories: build bin/dunlin-testclock bin/dunlin-next examples ## the failure stories on real processes: CYCLES=n (1) times each, or those that STORIES=regexp names, PARALLEL=n (2) cycles side by side; prints every cycle, then a table; what passed is kept in bin/stories.job, so a long job goes on where it was; logs in bin/stories
	@test/setup.sh
	CGO_ENABLED=0 go test -c -trimpath -tags e2e -o bin/e2e.test ./test/e2e
	CGO_ENABLED=0 go build -trimpath -o bin/runner ./test/runner
	cd test/e2e && DUNLIN_NEXT=$(CURDIR)/bin/dunlin-next ../../bin/runner -cycles $(or $(CYCLES),1) -parallel $(or $(PARALLEL),2) -tests '$(or $(STORIES),^TestStory)' \
	  -job ../../bin/stories.job -logs ../../bin/stories $(addprefix $(CURDIR)/bin/,e2e.test dunlin dunlin-testclock dunlin-next dunlin-wasm dunlin-proxy)

clients: build examples ## real kubectl (1.37 and Debian's 1.20), Helm 3 and 4, informers and a controller against a real server, gRPC through Service and Ingress
	@test/setup.sh
	cd test/grpc && CGO_ENABLED=0 go test -count=1 -v ./...
	test/clients/run.sh

sim: ## whole clusters in virtual time: SEEDS=n (300) from FIRST=n (1), stories, a link that is cut for CUT (504h); what passed is kept in bin/sim.job, so a long job goes on where it was
	@mkdir -p bin
	CGO_ENABLED=0 go test -c -trimpath -o bin/sim.test ./test/sim
	cd test/sim && ../../bin/sim.test -test.timeout 0 -seeds $(or $(SEEDS),300) -first $(or $(FIRST),1) -cut $(or $(CUT),504h) -job ../../bin/sim.job

sim-mutants: ## faults planted into the sources, one build each: the simulation must find every one within MUTANTS=n (24) seeds
	CGO_ENABLED=0 go test -count=1 -timeout 0 -v -run '^TestMutantsAreFound$$' ./test/sim -mutants $(or $(MUTANTS),24)

bench: build examples ## measure the budgets and print them beside their targets
	bench/run.sh

bench-loss: build ## 30 minutes at 5 % packet loss: no pod may move (LOSS=2h is longer)
	DUNLIN_BENCH_LOSS=$(or $(LOSS),30m) bench/run.sh TestFalseMoves

cross: ## build for every platform we ship
	@for p in $(PLATFORMS); do \
	  arch=$${p%%/*}; arm=$${p#*/}; [ "$$arm" = "$$p" ] && arm=; \
	  out=dist/linux-$$arch$${arm:+v$$arm}; mkdir -p $$out; \
	  echo "GOARCH=$$arch GOARM=$$arm"; \
	  GOOS=linux GOARCH=$$arch GOARM=$$arm $(GOBUILD) -o $$out/dunlin ./cmd/dunlin; \
	  GOOS=linux GOARCH=$$arch GOARM=$$arm $(GOBUILD) -o $$out/dunlin-wasm ./cmd/dunlin-wasm; \
	  GOOS=linux GOARCH=$$arch GOARM=$$arm $(GOBUILD) -o $$out/dunlin-proxy ./cmd/dunlin-proxy; \
	  GOOS=linux GOARCH=$$arch GOARM=$$arm $(GOBUILD) -o $$out/dunlin-ingress ./cmd/dunlin-ingress; \
	done; ls -l dist/*/*

lint: ## golangci-lint, pinned in tools/lint
	@mkdir -p bin
	cd tools/lint && go build -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	bin/golangci-lint run ./...

vulncheck: ## govulncheck, where its database can be reached
	@if timeout 10 curl -fsS -o /dev/null https://vuln.go.dev/index/db.json 2>/dev/null; then \
	  go run golang.org/x/vuln/cmd/govulncheck@latest ./...; \
	else echo "SKIPPED govulncheck: https://vuln.go.dev cannot be reached from here"; fi

tidy: ## modules tidy, sources formatted
	go mod tidy
	gofmt -w $$(git ls-files '*.go')

check: ## everything that must hold before a commit
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	go mod tidy -diff
	go vet ./...
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory vulncheck
	$(MAKE) --no-print-directory cross
	git diff --exit-code

clean: ## remove what was built
	rm -rf bin dist

.PHONY: help build examples demo test e2e e2e-long soak stories clients sim sim-mutants bench bench-loss cross lint vulncheck tidy check clean

conformance: build ## the Kubernetes conformance tests that we claim (long; SLICE=8 runs some)
	test/clients/build.sh
	test/conformance/run.sh

oracle: ## our defaults, validation, tables, scheduling and controllers against upstream's (long to build)
	for m in . printers arithmetic; do (cd test/oracle/$$m && CGO_ENABLED=0 go test ./...); done

.PHONY: conformance oracle

vm: ## tests in QEMU guests: control groups v2, arm64, no memory group, a clock at 1970
	test/vm/run.sh

.PHONY: vm

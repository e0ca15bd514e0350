#!/usr/bin/env bash
# Measures every budget that can be measured here and prints one table.
# DUNLIN_BENCH_IDLE=5m lengthens the idle measurements.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp)
trap 'rm -f "$out"' EXIT
GOARCH=arm64 CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out.bin" ./cmd/dunlin
printf 'BUDGET|stripped binary, linux/arm64|≤ 40 MB|%s MB|\n' "$(($(stat -c %s "$out.bin") / 1000000))" | tee -a "$out"
rm -f "$out.bin"
go test -count=1 -timeout 30m -tags bench -v ./bench | tee -a "$out" || echo "a measurement failed, see above"
micro() { # package, benchmark, unit, what, target
  go test -run '^$' -bench "$2" -benchtime "${6:-2s}" "$1" | tee /dev/stderr | awk -v unit="$3" -v what="$4" -v target="$5" '
    /^Benchmark/ { for (i = 3; i < NF; i += 2) if ($(i+1) == unit) printf "BUDGET|%s (%s)|%s|%s %s|\n", what, $1, target, $i, unit }' >>"$out"
}
micro ./controlplane/scheduler/plan 'Decision5000Nodes' 'decisions/s' 'a pure decision at 5,000 nodes' '≥ 50,000/s a core'
micro ./controlplane/consensus 'Commit' 'commits/s' 'durable commits' '(peer: raft-boltdb 3,095 / 17,770 / 46,825)'
micro ./controlplane/consensus 'Commit' 'fsyncs/commit' 'fsyncs a commit' '1 or less'
micro ./runtime/wasm 'StartToFirstLine' 'p50-ms' 'module in cache: agent told → first line' '≤ 25 ms (C guest)' 30x
micro ./runtime/wasm 'IdlePods' 'PSS-KiB/pod' 'idle Wasm pod, PSS' '≤ 2,560 KiB' 1x
echo
grep -h '^BUDGET|' "$out" | sort -u | awk -F'|' 'BEGIN { printf "%-78s %-42s %-44s %s\n", "WHAT", "TARGET", "FIGURE", "BESIDE" } { printf "%-78s %-42s %-44s %s\n", $2, $3, $4, $5 }'

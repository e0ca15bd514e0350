#!/usr/bin/env bash
# Measures every budget that can be measured on one machine and prints one
# table. Figures of a machine that did other work at the time are marked.
#
#   DUNLIN_BENCH_IDLE=5m   lengthens the idle measurements (default 30s)
#   DUNLIN_BENCH_LOSS=30m  lengthens the one with packet loss (default 2m)
#   DUNLIN_BENCH_NODES, DUNLIN_BENCH_FLEET_PODS   size of the fleet (5000, 100000)
#   DUNLIN_BENCH_KIND      one kind of placement (plain, spread, ...)
#   bench/run.sh TestFalseMoves ...   runs these measurements alone
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp)
trap 'rm -f "$out" "$out.bin"' EXIT
failed=
began=$(date +%s)
load() { cut -d' ' -f1 /proc/loadavg; }

row() { # what, target, figure, verdict, beside
  printf 'BUDGET|%s|%s|%s|%s|%s|%s\n' "$1" "$2" "$3" "$4" "$5" "$(load)" | tee -a "$out"
}

tests() { # -run pattern
  go test -count=1 -timeout 150m -tags bench -v -run "$1" ./bench | tee -a "$out" || failed="$failed $1"
}

binary() { # program, limit in MB or -
  GOOS=linux GOARCH=arm64 CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out.bin" "./cmd/$1"
  local bytes limit=$2 verdict=- target='(none)'
  bytes=$(stat -c %s "$out.bin")
  if [ "$limit" != - ]; then
    target="≤ $limit MB"
    if [ "$bytes" -le $((limit * 1000000)) ]; then verdict=held; else verdict=MISSED; fi
  fi
  row "stripped binary, linux/arm64, $1" "$target" "$(awk -v b="$bytes" 'BEGIN { printf "%.1f MB", b / 1e6 }')" "$verdict" "$3"
}

micro() { # package, benchmark, -benchtime, unit, what, target, test of the figure x (awk; - is none), beside
  local text
  text=$(go test -run '^$' -bench "$2" -benchtime "$3" "$1" 2>&1) || failed="$failed $2"
  echo "$text"
  echo "$text" | awk -v unit="$4" '/^Benchmark/ { for (i = 3; i < NF; i += 2) if ($(i + 1) == unit) { sub(/^Benchmark/, "", $1); sub(/-[0-9]+$/, "", $1); print $1, $i } }' >"$out.bin"
  if [ ! -s "$out.bin" ]; then
    row "$5" "$6" "not measured" - "see the output above"
    failed="$failed $2"
  fi
  while read -r name x; do
    local verdict=-
    if [ "$7" != - ]; then
      if awk -v x="$x" "BEGIN { exit !($7) }"; then verdict=held; else verdict=MISSED; fi
    fi
    row "$5 ($name)" "$6" "$x $4" "$verdict" "$8"
  done <"$out.bin"
}

# What ours is measured beside, where it can be installed.
if ! command -v nginx >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # Not the service: the bench runs it in the foreground.
  apt-get update -qq || true
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light libnginx-mod-stream >/dev/null 2>&1 ||
    echo "nginx cannot be installed: rows say nothing of it"
fi

machine="$(nproc) cores, $(awk -F': ' '/^(model name|Model|uarch)/ { print $2; exit }' /proc/cpuinfo), $(awk '/^MemTotal/ { printf "%.1f GiB", $2 / 1048576 }' /proc/meminfo), Linux $(uname -r) $(uname -m)"
first=$(load)
echo "machine: $machine; load $first"

if [ $# -gt 0 ]; then
  tests "$(IFS='|'; echo "^($*)\$")"
else
  binary dunlin 40 'kube-apiserver, scheduler and controller-manager in one: 134 MB (amd64)'
  binary dunlin-wasm - 'installed beside it'
  # What is small and slow to wake first: the large ones leave load behind.
  micro ./runtime/wasm StartToFirstLine 30x p50-ms 'module in cache: agent told → first line printed' '≤ 25 ms (C guest)' 'x <= 25' 'runc + conmon 37, docker 107, Nomad 304; bare process 5'
  micro ./runtime/wasm IdlePods 1x PSS-KiB/pod 'one more idle Wasm pod, PSS' '≤ 2,560 KiB' 'x <= 2560' 'bare process 1,756; Nomad raw_exec 29,286'
  micro ./runtime/oci FirstLine 20x x-bare 'container: agent told → first line' '≤ 1.3 × bare conmon + runc' 'x <= 1.3' 'the same bundle by conmon and runc alone, in turns'
  tests '^TestContainersBesideGuests$'
  tests '^(TestServerAndAgentInOneProcess|TestAgentAlone|TestNodeKilled|TestStartToFirstLine|TestFalseMoves)$'
  micro ./controlplane/scheduler/plan Decision5000Nodes 2s decisions/cpu-s 'a pure decision at 5,000 nodes, a core' '≥ 50,000/s' 'x >= 50000' 'limit measured with flat arrays: 62,000'
  micro ./controlplane/consensus Commit 2s commits/s 'durable commits' '(none)' - 'raft-boltdb 3,095 (1), 17,770 (16), 46,825 (64)'
  micro ./controlplane/consensus Commit 1s fsyncs/commit 'fsyncs a commit' '≤ 1' 'x <= 1.001' 'raft-boltdb 2'
  micro ./runtime/images BenchmarkPullOverABreakingLink 1x x-size "pull of 200 MB over a link that breaks every 5 s, bytes sent" "≤ 1.1 × size" "x <= 1.1" "5 MB/s, Go's in-memory registry"
  tests '^(TestProxyBesideNginx|TestIngressBesideNginx)$'
  tests '^TestEndpointChange$'
  tests '^TestScheduling$'
  tests '^TestPlacement$'
  tests '^TestLeaderKilled$'
  tests '^TestRollout$'
  tests '^TestFlood$'
  tests '^TestReturn$'
  tests '^TestControlPlaneAtSize$'
fi

echo
echo "machine: $machine"
echo "load: $first at the start, $(load) at the end; taken in $((($(date +%s) - began) / 60)) min"
grep -h '^BUDGET|' "$out" | awk -F'|' '
  BEGIN { line("WHAT", "TARGET", "FIGURE", "VERDICT", "BESIDE (docs/RATIONALE.md)") }
  { mark = $7 + 0 > 1.5 ? "; busy machine, load " $7 : ""; line($2, $3, $4, $5, $6 mark) }
  function line(a, b, c, d, e) { print pad(a, 82) pad(b, 38) pad(c, 46) pad(d, 8) e }
  # Widths are of characters: mawk counts bytes.
  function pad(s, n,   t) { t = s; gsub(/[\200-\277]/, "", t); while (length(t) < n) { t = t " "; s = s " " } return s " " }'
echo "(load counts what is measured too: a mark means that figures in wall time may be worse than on a machine of its own)"
if [ -n "$failed" ]; then
  echo "could not be measured:$failed"
  exit 1
fi

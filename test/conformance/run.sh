#!/usr/bin/env bash
# Runs the Kubernetes conformance tests that we claim (claimed.txt) against a
# real server with two nodes. Every test that passes is recorded in
# passing.txt, which may only grow: a test listed there that fails is an
# error. A run of all claimed tests takes the one process that is quickest;
# what did not pass there is tried once more in a process of its own, which
# leaves its log in bin/conformance/logs.
#
#   SLICE=N        only every N-th test of passing.txt (what CI runs)
#   ONLY=REGEX     only claimed tests whose name matches
#   BUILD_ONLY=1   only build the suite
#   DUNLIN_BIN     the binary to test (default bin/dunlin)
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
out=$root/bin/conformance
mkdir -p "$out/logs"
if [ ! -x "$out/e2e.test" ] || [ go.mod -nt "$out/e2e.test" ]; then
  echo "building the suite (some minutes)"
  # No cgo, as the client programs are built, so that they share packages.
  CGO_ENABLED=0 go test -c -trimpath -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2' -o "$out/e2e.new" k8s.io/kubernetes/test/e2e
  mv "$out/e2e.new" "$out/e2e.test"
fi
[ "${BUILD_ONLY:-}" = 1 ] && exit 0
command -v jq >/dev/null || { echo "conformance: jq is needed (apt-get install jq)" >&2; exit 1; }
[ -x "$root/bin/clients/kubectl" ] || ../clients/build.sh
dunlin=${DUNLIN_BIN:-$root/bin/dunlin}
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-conf.XXXXXX")
chmod 711 "$dir"
ns=dnc$((RANDOM % 10000))
port=$((20000 + RANDOM % 10000))
pids=()
folders() { echo --state-dir "$dir/$1/state" --run-dir "$dir/$1/run" --config-dir "$dir/$1/config" --netns "$ns$1"; }
cleanup() {
  trap - EXIT INT TERM
  [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait || true
  for i in a b; do
    # shellcheck disable=SC2046
    "$dunlin" server sweep $(folders $i) >/dev/null || echo "conformance: node-$i was not swept" >&2
  done
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# until COMMAND succeeds, for a minute.
until_ok() {
  local i
  for i in $(seq 300); do
    "$@" >/dev/null 2>&1 && return 0
    sleep 0.2
  done
  echo "conformance: waited a minute for: $*" >&2
  tail -n 20 "$out"/server.log "$out"/agent.log >&2
  return 1
}
ready() { "$dunlin" get nodes "$1" -o json | jq -e '.status.conditions[] | select(.type == "Ready" and .status == "True")'; }
: >"$out/agent.log"
# shellcheck disable=SC2046
"$dunlin" server $(folders a) --node-name node-a --gossip-port 0 --listen "127.0.0.1:$port" >"$out/server.log" 2>&1 &
pids+=($!)
export KUBECONFIG=$dir/a/config/admin.kubeconfig
until_ok ready node-a
# shellcheck disable=SC2046
"$dunlin" agent $(folders b) --node-name node-b --gossip-port 0 --join "$("$dunlin" token create)" >"$out/agent.log" 2>&1 &
pids+=($!)
until_ok ready node-b

touch passing.txt
if [ -n "${SLICE:-}" ]; then
  awk -v n="$SLICE" 'NR % n == 1 || n == 1' passing.txt >"$dir/list"
else
  grep -E -- "${ONLY:-.}" claimed.txt >"$dir/list"
fi
escape() { sed -e 's/[][\.*^$+?(){}|/]/\\&/g'; }
# suite REGEX NAME LIMIT: one process of the suite, its log and report kept.
suite() {
  timeout "$(($3 + 30))" "$out/e2e.test" --kubeconfig="$KUBECONFIG" --provider=skeleton --ginkgo.focus="$1" --ginkgo.timeout="$3s" \
    --ginkgo.no-color --ginkgo.json-report="$dir/report.json" --disable-log-dump --dump-logs-on-failure=false \
    --allowed-not-ready-nodes=-1 --kubectl-path="$root/bin/clients/kubectl" >"$out/logs/$2.log" 2>&1 || true
}
# passed_of prints the names of what passed in the last suite.
passed_of() {
  [ -s "$dir/report.json" ] || return 0
  jq -r '.[].SpecReports[]? | select(.State == "passed" and .LeafNodeType == "It") | ((.ContainerHierarchyTexts // []) + [.LeafNodeText]) | join(" ")' "$dir/report.json"
  rm -f "$dir/report.json"
}
: >"$dir/passed"
total=$(wc -l <"$dir/list")
echo "conformance: $total tests in one process"
suite "($(escape <"$dir/list" | paste -sd'|'))\$" all $((total * 60 + 120))
passed_of >>"$dir/passed"
while IFS= read -r name; do
  grep -qxF -- "$name" "$dir/passed" && continue
  id=$(printf '%s' "$name" | tr -cs 'A-Za-z0-9' '-' | cut -c1-100)
  suite "$(printf '%s' "$name" | escape)\$" "$id" 150
  passed_of >>"$dir/passed"
  grep -qxF -- "$name" "$dir/passed" || echo "FAIL $name (bin/conformance/logs/$id.log)"
done <"$dir/list"

passed=0 failed=0 lost=0
while IFS= read -r name; do
  if grep -qxF -- "$name" "$dir/passed"; then
    passed=$((passed + 1))
    grep -qxF -- "$name" passing.txt || echo "$name" >>passing.txt
  else
    failed=$((failed + 1))
    if grep -qxF -- "$name" passing.txt; then
      echo "LOST $name (it passed before)"
      lost=$((lost + 1))
    fi
  fi
done <"$dir/list"
LC_ALL=C sort -o passing.txt passing.txt
echo "conformance: $passed passed, $failed failed, $lost lost"
[ "$lost" = 0 ]

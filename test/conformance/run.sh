#!/usr/bin/env bash
# Runs the Kubernetes conformance tests that we claim (claimed.txt) against a
# real server with two nodes. Every test that passes is recorded in
# passing.txt, which may only grow: a test listed there that fails is an
# error. SLICE=N runs only every N-th test of passing.txt. Resumable: results
# of this checkout's binary are kept in bin/conformance/results.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
out=$root/bin/conformance
mkdir -p "$out/results"
if [ ! -x "$out/e2e.test" ] || [ go.mod -nt "$out/e2e.test" ]; then
  echo "building the suite (some minutes)"
  go test -c -trimpath -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2' -o "$out/e2e.test" k8s.io/kubernetes/test/e2e
fi
[ "${BUILD_ONLY:-}" = 1 ] && exit 0
dunlin=$root/bin/dunlin
stamp=$(sha256sum "$dunlin" | cut -c1-12)
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-conf.XXXXXX")
ns=dnc$((RANDOM % 10000))
port=$((20000 + RANDOM % 10000))
pids=()
node() { echo --state-dir "$dir/$1/state" --run-dir "$dir/$1/run" --config-dir "$dir/$1/config" --netns "$ns$1" --node-name "node-$1"; }
cleanup() {
  kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  for i in a b; do "$dunlin" server sweep $(node $i) >/dev/null 2>&1 || true; done
  rm -rf "$dir"
}
trap cleanup EXIT
"$dunlin" server $(node a) --listen "127.0.0.1:$port" >"$out/server.log" 2>&1 &
pids+=($!)
export KUBECONFIG=$dir/a/config/admin.kubeconfig
for _ in $(seq 200); do "$dunlin" get nodes node-a >/dev/null 2>&1 && break; sleep 0.2; done
"$dunlin" agent $(node b) --join "$("$dunlin" token create)" >"$out/agent.log" 2>&1 &
pids+=($!)
for _ in $(seq 200); do "$dunlin" get nodes node-b 2>/dev/null | grep -q Ready && break; sleep 0.2; done
"$dunlin" get nodes

list=claimed.txt
if [ -n "${SLICE:-}" ]; then
  awk -v n="$SLICE" 'NR % n == 1 || n == 1' passing.txt >"$dir/slice"
  list=$dir/slice
fi
escape() { printf '%s' "$1" | sed -e 's/[][\.*^$+?(){}|/]/\\&/g'; }
one() {
  local name=$1 id log
  id=$(printf '%s' "$name" | sha256sum | cut -c1-16)
  log=$out/results/$stamp-$id
  [ -s "$log.ok" ] && return 0
  if timeout 120 "$out/e2e.test" --kubeconfig="$KUBECONFIG" --provider=skeleton --ginkgo.focus="$(escape "$name")\$" --ginkgo.timeout=110s \
    --ginkgo.no-color --disable-log-dump --dump-logs-on-failure=false --allowed-not-ready-nodes=-1 --kubectl-path="$root/bin/clients/kubectl" >"$log.log" 2>&1 \
    && grep -q '^Ran 1 of' "$log.log"; then
    echo "$name" >"$log.ok"
    echo "PASS $name"
  else
    echo "FAIL $name"
  fi
}
passed=0 failed=0 lost=0
while IFS= read -r name; do
  [ -n "$name" ] || continue
  result=$(one "$name")
  [ -n "$result" ] && echo "$result"
  case $result in
  FAIL*)
    failed=$((failed + 1))
    if grep -qxF "$name" passing.txt; then echo "LOST $name (it passed before)"; lost=$((lost + 1)); fi
    ;;
  *)
    passed=$((passed + 1))
    grep -qxF "$name" passing.txt || echo "$name" >>passing.txt
    ;;
  esac
done <"$list"
sort -o passing.txt passing.txt
echo "conformance: $passed passed, $failed failed, $lost lost"
[ "$lost" = 0 ]

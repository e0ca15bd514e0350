#!/usr/bin/env bash
# Runs the Kubernetes conformance tests that we claim (claimed.txt) against a
# real server with two nodes, each in a network namespace of its own on one
# bridge; the suite runs in a third. Their pods run as containers where runc
# and conmon are, from images of our own (images.sh). Every test that passes is
# recorded in passing.txt, which may only grow: a test listed there that fails
# is an error. What did not pass is tried once more in a process of its own,
# which leaves its log in bin/conformance/logs.
#
#   SLICE=N        only every N-th quick test of passing.txt (what CI runs)
#   ONLY=REGEX     only claimed tests whose name matches
#   LIST=FILE      the names in FILE instead of those in claimed.txt; what
#                  passes is printed and not recorded, nothing is tried again
#   PROCS=N        so many processes of the suite at once (2); [Serial] tests
#                  come after the others, in one
#   BUILD_ONLY=1   only build the suite and the images
#   DUNLIN_BIN     the binary to test (default bin/dunlin)
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
out=$root/bin/conformance
mkdir -p "$out/logs"
if [ ! -x "$out/e2e.test" ] || [ go.mod -nt "$out/e2e.test" ]; then
  echo "building the suite (some minutes)"
  # No cgo, as the client programs are built, so that they share packages; and
  # vet would look at every package of Kubernetes first.
  CGO_ENABLED=0 go test -c -vet=off -trimpath -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2' -o "$out/e2e.new" k8s.io/kubernetes/test/e2e
  mv "$out/e2e.new" "$out/e2e.test"
fi
./images.sh
[ "${BUILD_ONLY:-}" = 1 ] && exit 0
command -v jq >/dev/null || { echo "conformance: jq is needed (apt-get install jq)" >&2; exit 1; }
[ -x "$root/bin/clients/kubectl" ] || ../clients/build.sh
dunlin=${DUNLIN_BIN:-$root/bin/dunlin}
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-conf.XXXXXX")
chmod 711 "$dir"
ns=dnc$((RANDOM % 10000))
port=6443
pids=()
folders() { echo --state-dir "$dir/$1/state" --run-dir "$dir/$1/run" --config-dir "$dir/$1/config" --netns "$ns$1"; }
# on WHERE COMMAND runs it in the network of a node (a, b) or of the suite
# (hub). Not by ip netns exec, which hides the control groups. What is to be
# killed is started with nsenter itself, which becomes it.
on() {
  local where=$1
  shift
  nsenter --net="/run/netns/$ns-$where" "$@"
}
cleanup() {
  trap - EXIT INT TERM
  [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait || true
  for i in a b; do
    # shellcheck disable=SC2046
    on $i "$dunlin" server sweep $(folders $i) >/dev/null || echo "conformance: node-$i was not swept" >&2
  done
  for i in a b hub; do ip netns del "$ns-$i" || true; done
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

for i in hub a b; do
  ip netns add "$ns-$i"
  ip -n "$ns-$i" link set lo up
done
ip -n "$ns-hub" link add br0 address 02:00:0a:59:00:01 type bridge
ip -n "$ns-hub" addr add 10.89.0.1/24 dev br0
ip -n "$ns-hub" link set br0 up
host=2
for i in a b; do
  ip -n "$ns-hub" link add "v$i" type veth peer name eth0 netns "$ns-$i"
  ip -n "$ns-hub" link set "v$i" master br0 up
  ip -n "$ns-$i" addr add "10.89.0.$host/24" dev eth0
  ip -n "$ns-$i" link set eth0 up
  ip -n "$ns-$i" route add default via 10.89.0.1
  host=$((host + 1))
  for image in "$out"/images/*.tar; do
    "$dunlin" import --state-dir "$dir/$i/state" --run-dir "$dir/$i/run" "$image" >/dev/null 2>"$dir/import" || { cat "$dir/import" >&2; exit 1; }
  done
done

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
ready() { on hub "$dunlin" get nodes "$1" -o json | jq -e '.status.conditions[] | select(.type == "Ready" and .status == "True")'; }
: >"$out/agent.log"
# shellcheck disable=SC2046
nsenter --net="/run/netns/$ns-a" "$dunlin" server $(folders a) --node-name node-a --gossip-port 0 --listen "10.89.0.2:$port" >"$out/server.log" 2>&1 &
pids+=($!)
export KUBECONFIG=$dir/a/config/admin.kubeconfig
until_ok ready node-a
# shellcheck disable=SC2046
nsenter --net="/run/netns/$ns-b" "$dunlin" agent $(folders b) --node-name node-b --gossip-port 0 --join "$(on a "$dunlin" token create)" >"$out/agent.log" 2>&1 &
pids+=($!)
until_ok ready node-b

touch passing.txt
if [ -n "${LIST:-}" ]; then
  cp "$LIST" "$dir/list"
elif [ -n "${SLICE:-}" ]; then
  # What mostly waits is left out: minutes of watching that nothing happens.
  grep -vE -- '\[Slow\]|\[Serial\]|CronJob|StatefulSet|Probing container|issue 500 podspec' passing.txt | awk -v n="$SLICE" 'NR % n == 1 || n == 1' >"$dir/list"
else
  grep -E -- "${ONLY:-.}" claimed.txt >"$dir/list"
fi
# The suite was written for clusters in which something is always written. An
# idle one of ours writes nothing, so a list made minutes ago is still the
# newest there is, which the test of outdated continue tokens does not foresee.
while sleep 30; do
  on hub "$root/bin/clients/kubectl" annotate --overwrite namespace kube-system "dunlin.dev/conformance=$SECONDS" || true
done >/dev/null 2>&1 &
pids+=($!)
escape() { sed -e 's/[][\.*^$+?(){}|/]/\\&/g'; }
# suite LIST NAME LIMIT: one process of the suite for the names in a file, its
# log kept, and what passed noted.
suite() {
  [ -s "$1" ] || return 0
  local report=$dir/report-$2.json
  on hub timeout "$(($3 + 30))" "$out/e2e.test" --kubeconfig="$KUBECONFIG" --provider=skeleton --ginkgo.focus="($(escape <"$1" | paste -sd'|'))\$" \
    --ginkgo.timeout="$3s" --ginkgo.no-color --ginkgo.json-report="$report" --disable-log-dump --dump-logs-on-failure=false \
    --allowed-not-ready-nodes=-1 --kubectl-path="$root/bin/clients/kubectl" >"$out/logs/$2.log" 2>&1 || true
  [ -s "$report" ] || return 0
  jq -r '.[].SpecReports[]? | select(.State == "passed" and .LeafNodeType == "It") | ((.ContainerHierarchyTexts // []) + [.LeafNodeText]) | join(" ")' "$report" >>"$dir/passed"
  jq -r '.[].SpecReports[]? | select(.LeafNodeType == "It" and .State != "skipped") | "\(.RunTime / 1e9 | floor)\t\(.State)\t\((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" "))"' "$report" >>"$out/times.tsv"
}
# limit LIST is how long a process may take for it, in seconds.
limit() { echo $(($(wc -l <"$1") * 90 + $(grep -cF -- '[Slow]' "$1" || true) * 640 + 300)); }
: >"$dir/passed"
: >"$out/times.tsv"
procs=${PROCS:-2}
echo "conformance: $(wc -l <"$dir/list") tests, $procs processes"
grep -vF -- '[Serial]' "$dir/list" | awk -v n="$procs" -v d="$dir" '{print >(d "/list-" NR % n)}'
grep -F -- '[Serial]' "$dir/list" >"$dir/list-serial" || true
running=()
for ((i = 0; i < procs; i++)); do
  [ -s "$dir/list-$i" ] || continue
  suite "$dir/list-$i" "all-$i" "$(limit "$dir/list-$i")" &
  running+=($!)
done
[ ${#running[@]} = 0 ] || wait "${running[@]}"
suite "$dir/list-serial" all-serial "$(limit "$dir/list-serial")"
if [ -n "${LIST:-}" ]; then
  sort "$dir/passed"
  exit 0
fi
while IFS= read -r name; do
  grep -qxF -- "$name" "$dir/passed" && continue
  id=$(printf '%s' "$name" | tr -cs 'A-Za-z0-9' '-' | cut -c1-100)
  printf '%s\n' "$name" >"$dir/one"
  suite "$dir/one" "$id" "$(limit "$dir/one")"
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

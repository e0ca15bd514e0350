#!/usr/bin/env bash
# make demo: a one-node cluster in a temporary folder, an app deployed from a
# manifest, one HTTP request to it. Leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."
dunlin=$PWD/bin/dunlin
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-demo.XXXXXX")
chmod 711 "$dir" # guests run as other users
netns=dndemo$((RANDOM % 10000))
# Pod addresses that nothing else on this machine has (RFC 2544).
pods=198.18.$((RANDOM % 256)).0/24
server=
export DUNLIN_CONFIG=/dev/null # not what this machine is configured for
bold= plain=
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\e[1m' plain=$'\e[0m'; fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
fail() {
  echo "$1" >&2
  echo "The server's log ends:" >&2
  tail -n 20 "$dir/server.log" >&2
  exit 1
}
cleanup() {
  trap - EXIT
  trap '' INT TERM # a second Ctrl-C must not stop the cleaning up
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  "$dunlin" server sweep --state-dir "$dir/state" --run-dir "$dir/run" --netns "$netns" >"$dir/sweep.log" 2>&1 || cat "$dir/sweep.log" >&2
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

step "1. Starting a one-node cluster in $dir"
if [ "$(id -u)" != 0 ]; then
  echo "   Not root: guests run as $(id -un), without memory and CPU limits and with the node's address instead of their own."
fi
"$dunlin" server --state-dir "$dir/state" --run-dir "$dir/run" --config-dir "$dir/config" --netns "$netns" \
  --listen 127.0.0.1:0 --node-name demo --gossip-port 0 --pod-cidr "$pods" >"$dir/server.log" 2>&1 &
server=$!
export KUBECONFIG=$dir/config/admin.kubeconfig
ready=
for _ in $(seq 300); do
  if [ -s "$KUBECONFIG" ] && "$dunlin" get nodes --no-headers 2>/dev/null | grep -q ' Ready '; then
    ready=yes
    break
  fi
  kill -0 "$server" 2>/dev/null || fail "The server ended."
  sleep 0.2
done
[ -n "$ready" ] || fail "The node did not become Ready within a minute."
"$dunlin" get nodes

step "2. Giving the node the app's module"
"$dunlin" import hello.wasm bin/examples/hello.wasm --run-dir "$dir/run" --state-dir "$dir/state"

step "3. Applying examples/hello/"
"$dunlin" apply -f examples/hello/
"$dunlin" rollout status deploy/hello --timeout 120s || {
  "$dunlin" describe pods -l app=hello >&2 || true
  fail "The app did not become available."
}
"$dunlin" get pods -o wide

list=$("$dunlin" get pods -l app=hello -o json)
pod=$(sed -n 's/.*"podIP": "\([^"]*\)".*/\1/p' <<<"$list" | head -n 1)
# Without addresses of their own pods say where their ports are:
# "dunlin.dev/ports": "{\"8080\":37777}"
port=$(sed -n 's/.*"dunlin.dev\/ports": .*8080[^0-9]*\([0-9][0-9]*\).*/\1/p' <<<"$list" | head -n 1)
port=${port:-8080}
step "4. GET http://$pod:$port/"
if command -v curl >/dev/null 2>&1; then
  answer=$(curl -fsS --noproxy '*' --max-time 10 "http://$pod:$port/")
else
  exec 3<>"/dev/tcp/$pod/$port"
  printf 'GET / HTTP/1.0\r\nHost: hello\r\n\r\n' >&3
  answer=$(sed '1,/^\r*$/d' <&3)
fi
[ -n "$answer" ] || fail "No answer."
echo "$answer"
[ -n "${ONCE:-}" ] && exit 0

step "The cluster is up. In another terminal:"
cat <<T
  export KUBECONFIG=$KUBECONFIG
  kubectl get pods -o wide                  # or: $dunlin get pods -o wide
  kubectl logs deploy/hello -f
  kubectl scale deploy/hello --replicas=5
  kubectl describe deploy/hello
  curl http://$pod:$port/
Ctrl-C ends it and leaves nothing behind.
T
wait "$server" || fail "The server ended."

#!/usr/bin/env bash
# make demo: a one-node cluster in a temporary folder, an app deployed from a
# manifest, one HTTP request to it. Leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."
dunlin=$PWD/bin/dunlin
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-demo.XXXXXX")
netns=dndemo$((RANDOM % 10000))
server=
cleanup() {
  trap - EXIT INT TERM
  [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null || true
  "$dunlin" server sweep --state-dir "$dir/state" --run-dir "$dir/run" --netns "$netns" >"$dir/sweep.log" 2>&1 || cat "$dir/sweep.log" >&2
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 0' INT TERM

if [ "$(id -u)" != 0 ]; then
  echo "Not root: guests run as $(id -un), without memory and CPU limits and with the node's address instead of their own."
fi
echo "Starting a one-node cluster in $dir ..."
"$dunlin" server --state-dir "$dir/state" --run-dir "$dir/run" --config-dir "$dir/config" --netns "$netns" \
  --listen 127.0.0.1:0 --node-name demo --gossip-port 0 >"$dir/server.log" 2>&1 &
server=$!
export KUBECONFIG=$dir/config/admin.kubeconfig
for _ in $(seq 300); do
  [ -s "$KUBECONFIG" ] && "$dunlin" get nodes >/dev/null 2>&1 && break
  kill -0 "$server" 2>/dev/null || { echo "the server ended:" >&2; tail -n 5 "$dir/server.log" >&2; exit 1; }
  sleep 0.1
done
echo "Importing bin/examples/hello.wasm (compiled once, cached) ..."
"$dunlin" import hello.wasm bin/examples/hello.wasm --run-dir "$dir/run" --state-dir "$dir/state"
"$dunlin" apply -f examples/hello/
"$dunlin" rollout status deploy/hello --timeout 120s || { "$dunlin" describe pods -l app=hello >&2 || true; tail -n 20 "$dir/server.log" >&2; exit 1; }
pod=$("$dunlin" get pods -l app=hello -o json | sed -n 's/.*"podIP": "\([^"]*\)".*/\1/p' | head -n 1)
ports=$("$dunlin" get pods -l app=hello -o json | sed -n 's/.*"dunlin.dev\/ports": "\(.*\)",\{0,1\}$/\1/p' | head -n 1)
port=$(printf '%s' "$ports" | sed -n 's/.*8080[^0-9]*\([0-9][0-9]*\).*/\1/p')
port=${port:-8080}
echo "GET http://$pod:$port/"
if command -v curl >/dev/null 2>&1; then
  answer=$(curl -fsS --max-time 10 "http://$pod:$port/")
else
  exec 3<>"/dev/tcp/$pod/$port"
  printf 'GET / HTTP/1.0\r\nHost: hello\r\n\r\n' >&3
  answer=$(cat <&3)
fi
echo "$answer"
[ -n "${ONCE:-}" ] && exit 0
cat <<T

The cluster is up. In another terminal:
  export KUBECONFIG=$KUBECONFIG
  kubectl get pods -o wide          # or $dunlin get pods -o wide
  kubectl logs deploy/hello
  kubectl scale deploy/hello --replicas=3
Ctrl-C ends it and leaves nothing behind.
T
wait "$server"

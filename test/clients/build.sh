#!/usr/bin/env bash
# Builds the client programs into bin/clients, and unpacks Debian's kubectl
# 1.20 beside them. What exists is kept.
set -euo pipefail
cd "$(dirname "$0")"
out=$PWD/../../bin/clients
mkdir -p "$out"
flags='-s -w -X k8s.io/component-base/version.gitVersion=v1.37.2 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37'
for m in kubectl informer manager; do
  [ -x "$out/$m" ] && [ "$out/$m" -nt "$m/main.go" ] && [ "$out/$m" -nt "$m/go.mod" ] && continue
  echo "building $m"
  (cd "$m" && CGO_ENABLED=0 go build -trimpath -ldflags "$flags" -o "$out/$m" .)
done
for v in 3 4; do
  [ -x "$out/helm$v" ] && [ "$out/helm$v" -nt "helm$v/go.mod" ] && continue
  echo "building helm $v"
  (cd "helm$v" && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out/helm$v" "helm.sh/helm/v$v/cmd/helm")
done
if [ ! -x "$out/kubectl-1.20" ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "unpacking Debian's kubernetes-client"
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  (cd "$tmp" && { apt-get download -qq kubernetes-client || { apt-get update -qq && apt-get download -qq kubernetes-client; } } && dpkg -x kubernetes-client_*.deb x)
  cp "$tmp/x/usr/bin/kubectl" "$out/kubectl-1.20"
fi

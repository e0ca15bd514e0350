#!/usr/bin/env bash
# Installs what the tests need and this machine lacks (Debian packages, as
# root); otherwise says what is missing. Idempotent and quick when all is there.
set -euo pipefail
declare -A need=(
  [wat2wasm]=wabt [clang]=clang [wasm-ld]=lld [ip]=iproute2 [nft]=nftables
  [mkfs.ext4]=e2fsprogs [systemd-analyze]=systemd [curl]=curl [jq]=jq
  [mosquitto]=mosquitto [mosquitto_sub]=mosquitto-clients [runc]=runc [conmon]=conmon [busybox]=busybox-static [iptables]=iptables [docker-registry]=docker-registry
)
packages=()
for program in "${!need[@]}"; do
  command -v "$program" >/dev/null 2>&1 || packages+=("${need[$program]}")
done
command -v gcc >/dev/null 2>&1 || packages+=(gcc libc6-dev) # for the race detector
[ -e /usr/lib/wasm32-wasi/crt1.o ] || packages+=(wasi-libc libclang-rt-14-dev-wasm32)
[ -e /usr/lib/cni/bridge ] || packages+=(containernetworking-plugins)
[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "test/setup.sh: not installed: ${packages[*]}; the tests that need them are skipped, each with a line that says so" >&2
  exit 0
fi
echo "test/setup.sh: installing ${packages[*]}"
export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null

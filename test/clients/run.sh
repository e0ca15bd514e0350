#!/usr/bin/env bash
# Real clients against a real server.
set -euo pipefail
cd "$(dirname "$0")"
./build.sh
cd ../..
exec go test -count=1 -timeout 25m -tags clients ./test/clients/

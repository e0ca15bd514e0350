#!/usr/bin/env bash
# Runs a test binary that was built with -race, as `go test -exec` asks for it.
#
# In a synctest bubble, goroutines of several processors share one context of
# the race detector when they receive from timers that are due, and then the
# detector itself may die (golang/go#78156, Go 1.26): no fault of the test.
# Only a binary that died of that is run once more, on one processor, where it
# cannot happen; this is said, and what the second run says is what counts.
set -uo pipefail
out=$(mktemp)
trap 'rm -f "$out"' EXIT
"$@" >"$out" 2>&1
rc=$?
cat "$out"
detector_died() {
  grep -q '^ThreadSanitizer: CHECK failed' "$out" ||
    { grep -q 'runtime\.(\*timer)\.maybeRunChan' "$out" && grep -qE '^(SIGSEGV: segmentation violation|fatal error: fault)' "$out"; }
}
if [ "$rc" != 0 ] && detector_died; then
  echo "RACE DETECTOR DIED (golang/go#78156): the same tests again, on one processor"
  GOMAXPROCS=1 "$@" 2>&1
  rc=$?
fi
exit "$rc"

#!/usr/bin/env bash
# Runs the end-to-end tests. One or two tests that fail are run again, alone:
# what fails twice fails the run; what then passes is named as FLAKY at the
# end, and is a fault to be found, in the product or in its test.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p ../../bin
go test -c -tags e2e -o ../../bin/e2e.test .
log=$(mktemp "${TMPDIR:-/tmp}/dunlin-e2e.XXXXXX")
trap 'rm -f "$log"' EXIT
# Of a test that passed one line with its time, of every other one all that it said.
tell() {
  awk '/^=== RUN +[^\/]*$/ { said = ""; next }
    /^=== / { next }
    /^--- PASS/ { print; fflush(); said = ""; next }
    /^--- (FAIL|SKIP)/ { printf "%s\n%s", $0, said; fflush(); said = ""; next }
    { said = said $0 "\n" }
    END { printf "%s", said }'
}
if ../../bin/e2e.test -test.timeout 50m -test.v "$@" 2>&1 | tee "$log" | tell; then exit 0; fi
mapfile -t failed < <(sed -n 's/^--- FAIL: \(Test[A-Za-z0-9_]*\) .*/\1/p' "$log" | sort -u)
if [ ${#failed[@]} -eq 0 ] || [ ${#failed[@]} -gt 2 ]; then exit 1; fi
echo "=== again, alone: ${failed[*]}"
../../bin/e2e.test -test.timeout 20m "$@" -test.v -test.run "^($(IFS='|'; echo "${failed[*]}"))\$"
echo "FLAKY: ${failed[*]} failed, and passed when run again"

#!/bin/sh
# The program that the conformance suite runs as an OCI container; its
# counterpart for Wasm is runtime/wasm/testdata/guest.c.
what=$1
shift
case $what in
print) for i; do echo "$i"; done; echo "to stderr" >&2 ;;
exit) exit "$1" ;;
env) env ;;
cat) cat "$1" ;;
write) printf %s "$2" >"$1" ;;
lines) i=0; while [ $i -lt "$1" ]; do echo "line $i of some length, so that files fill up"; i=$((i + 1)); done ;;
wait) trap 'echo bye; exit 0' TERM; echo waiting; sleep 100000 & while :; do wait; done ;;
stubborn) trap '' TERM; echo waiting; while :; do sleep 1000; done ;;
spin) echo spinning; while :; do :; done ;;
eat) echo eating; exec tail /dev/zero ;;
*) echo "unknown command" >&2; exit 2 ;;
esac

#!/bin/sh
# Builds the examples into bin/examples. Go is enough for hello, journal and shop; the others
# need wat2wasm (wabt) or clang with wasi-libc, and are skipped with a line
# that says so when those are not there.
set -eu
cd "$(dirname "$0")"
out=../bin/examples
mkdir -p "$out"

go_guest() { # folder, output, ldflags
	echo "building $2"
	(cd "$1" && GOOS=wasip1 GOARCH=wasm CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $3" -o "../$out/$2" .)
}

wat_guest() { # source, output
	if command -v wat2wasm >/dev/null 2>&1; then
		echo "building $2"
		wat2wasm --debug-names "$1" -o "$out/$2"
	else
		echo "skipped $2: wat2wasm is not installed (Debian: wabt)"
	fi
}

c_guest() { # source, output, what else the compiler gets
	source=$1 made=$2
	shift 2
	if command -v clang >/dev/null 2>&1 && clang --target=wasm32-wasi -Os -s -o "$out/$made" "$source" "$@" 2>/dev/null; then
		echo "built $made"
	else
		echo "skipped $made: clang for wasm32-wasi is not installed (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32)"
	fi
}

only=${1:-all}
if [ "$only" = all ] || [ "$only" = hello ]; then
	go_guest hello hello.wasm ""
fi
if [ "$only" = all ] || [ "$only" = journal ]; then
	go_guest journal journal.wasm ""
fi
if [ "$only" = all ] || [ "$only" = sensor ]; then
	c_guest sensor/sensor.c sensor.wasm
fi
if [ "$only" = all ] || [ "$only" = crashloop ]; then
	wat_guest crashloop/crashloop.wat crashloop.wasm
fi
if [ "$only" = all ] || [ "$only" = neverready ]; then
	go_guest hello neverready-1.wasm "-X main.version=1"
	go_guest hello neverready-2.wasm "-X main.version=2 -X main.broken=yes"
fi
if [ "$only" = all ] || [ "$only" = outbound-http ]; then
	go_guest outbound-http outbound-http.wasm ""
fi
if [ "$only" = all ] || [ "$only" = mqtt ]; then
	c_guest mqtt/mqtt.c mqtt.wasm -I../sdk/c ../sdk/c/dunlin_outbound.c
fi
if [ "$only" = all ] || [ "$only" = shop ]; then
	go_guest shop shop.wasm ""
fi

// Command dunlin-wasm runs one Wasm guest for a dunlin agent.
package main

import (
	"os"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
)

func main() { os.Exit(host.Main(os.Args[1:])) }

// Command dunlin is the whole product: control plane, node agent and the
// commands that work with them.
package main

import (
	"os"

	"github.com/dunlin-project/dunlin/cli"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
)

func main() {
	// Without dunlin-wasm beside it this program is its own Wasm host.
	host.MaybeRun()
	os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

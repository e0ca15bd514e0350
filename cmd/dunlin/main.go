// Command dunlin is the whole product: control plane, node agent and the
// commands that work with them.
package main

import (
	"os"

	"github.com/dunlin-project/dunlin/cli"
	"github.com/dunlin-project/dunlin/node/ingress"
	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
)

func main() {
	// Without dunlin-wasm beside it this program is its own Wasm host.
	host.MaybeRun()
	proxy.MaybeRun()   // and its own proxy
	ingress.MaybeRun() // and its own ingress
	os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

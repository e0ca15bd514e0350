// Command dunlin-proxy is the node's service proxy and DNS, and nothing else,
// so that it is small. The agent starts it; without it beside dunlin, dunlin
// runs itself again instead.
package main

import (
	"os"

	"github.com/dunlin-project/dunlin/node/proxy"
)

func main() { os.Exit(proxy.Main(os.Args[1:])) }

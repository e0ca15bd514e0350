// Command dunlin-ingress serves Ingresses on a node, and nothing else, so that
// it is small and nodes without Ingresses pay nothing. The agent starts it;
// without it beside dunlin, dunlin runs itself again instead.
package main

import (
	"os"

	"github.com/dunlin-project/dunlin/node/ingress"
)

func main() { os.Exit(ingress.Main(os.Args[1:])) }

// Package ingress is the node's part of Ingresses: an HTTP reverse proxy in a
// process of its own, on nodes that serve Ingresses and only while there are
// any. It speaks HTTP/1.1 and HTTP/2 with TLS, upgrades (WebSocket) and
// trailers (gRPC), chooses an endpoint for each request as the service proxy
// does for each connection, and streams bodies in both directions.
//
// The process (Main: the program dunlin-ingress, or dunlin run again) has one
// engine; package companion keeps it beside the agent, which feeds it the
// items of the service table that Ingresses lead to, and their certificates
// (Supervisor and Feed are the agent's side). Private keys are never on its
// disk: a process that starts anew gets them from the agent, which has them
// with the rest of the node's assignment.
//
// What a request meets is an immutable table, replaced by every change, so a
// new certificate or rule cuts nothing. Goroutines of the process: net/http's
// (one a connection, one a request of HTTP/2, two for an upgraded connection),
// one a listener, one that ticks each second, and the companion's.
package ingress

import (
	"context"
	"log/slog"
	"os"

	"github.com/dunlin-project/dunlin/node/companion"
)

// argv0 is the program's name, and marks a re-executed main program.
const argv0 = "dunlin-ingress"

// MaybeRun runs the ingress if this process was started as one by re-executing
// the main program, and then does not return. Main calls it first.
func MaybeRun() {
	if len(os.Args) > 1 && os.Args[0] == argv0 {
		os.Exit(Main(os.Args[1:]))
	}
}

// Main is the ingress's program.
func Main(args []string) int {
	return companion.Main(argv0, "serves Ingresses", args, func(dir string, log *slog.Logger) companion.Worker[Settings] {
		e := newEngine(log)
		e.dir = dir
		return e
	})
}

// Settings are what the agent tells the process of its node.
type Settings struct {
	Node string `cbor:"1,keyasint"`
	Zone string `cbor:"2,keyasint,omitempty"`
	// HTTP and HTTPS are addresses to listen on (host:port); "" is none.
	HTTP  string `cbor:"3,keyasint,omitempty"`
	HTTPS string `cbor:"4,keyasint,omitempty"`
	// Connections bounds those that are open, and the requests that are under
	// way; 0 is DefaultConnections.
	Connections int `cbor:"5,keyasint,omitempty"`
}

// Status is what the process tells of itself.
type Status struct {
	companion.Head
	Connections int64 `cbor:"3,keyasint,omitempty"` // open
	Requests    int64 `cbor:"4,keyasint,omitempty"` // under way
	Upgraded    int64 `cbor:"5,keyasint,omitempty"` // of them, connections that speak something else by now
	// Answers counts what was answered, by hundreds of the status.
	Answers [6]int64 `cbor:"6,keyasint,omitempty"`
	// Faults counts requests and connections that the ingress itself refused or
	// failed, by what was wrong (see faults).
	Faults map[string]int64 `cbor:"7,keyasint,omitempty"`
	// Bytes of bodies: from clients, to clients.
	In           int64 `cbor:"8,keyasint,omitempty"`
	Out          int64 `cbor:"9,keyasint,omitempty"`
	Ingresses    int   `cbor:"10,keyasint,omitempty"`
	Certificates int   `cbor:"11,keyasint,omitempty"`
	// Listening are addresses; Failures those that are not served, with the
	// reason.
	Listening []string          `cbor:"12,keyasint,omitempty"`
	Failures  map[string]string `cbor:"13,keyasint,omitempty"`
}

// Ask returns what the process in a folder says of itself.
func Ask(dir string) (*Status, error) {
	st := new(Status)
	return st, companion.Ask(dir, st)
}

// Stop ends the process in a folder with all its connections, and waits for
// it; without one it does nothing.
func Stop(ctx context.Context, dir string) error { return companion.Stop(ctx, dir) }

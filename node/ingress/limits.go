package ingress

import (
	"sync/atomic"
	"time"
)

// Bounds. Together with GOMEMLIMIT they keep the process small whatever
// clients do: a connection that does nothing holds some 20 KiB, one of TLS
// some 50.
const (
	// DefaultConnections that are open at once, and requests under way.
	DefaultConnections = 1024
	// sourceShare of the connections is what one source may have: a quarter.
	sourceShare = 4

	headerMost    = 32 << 10         // bytes of a request's header
	answerMost    = 64 << 10         // bytes of an answer's header
	headerTimeout = 10 * time.Second // for a request's header to arrive
	idleTimeout   = 60 * time.Second // of a connection between requests
	// bodyTimeout is how long nothing of a body may arrive, or be taken.
	bodyTimeout = 30 * time.Second
	// answerTimeout is how long a backend may take until its answer begins,
	// counted anew with every piece of the request's body.
	answerTimeout = 60 * time.Second
	dialTimeout   = 2 * time.Second
	// dialsMost bounds the endpoints that one request tries.
	dialsMost = 5
	// keepIdle is how long a connection to a backend waits for the next
	// request: less than the 5 s after which many servers close it.
	keepIdle     = 4 * time.Second
	keepMost     = 256 // idle connections to all backends
	keepEach     = 16  // to one
	copyBuffer   = 16 << 10
	streamsMost  = 100       // requests at once on one connection of HTTP/2
	streamWindow = 64 << 10  // bytes of a request's body that wait in memory
	connWindow   = 256 << 10 // of all requests of a connection
	pingAfter    = 30 * time.Second
	retryListen  = 3 * time.Second
)

// patience is how long a client may do nothing. Shorter in tests.
type patience struct {
	header time.Duration // headerTimeout
	idle   time.Duration // idleTimeout
	body   time.Duration // bodyTimeout
}

// fault is what the ingress itself refused or failed.
type fault int

const (
	faultRoute fault = iota
	faultMisdirected
	faultEndpoint
	faultDial
	faultBackend
	faultTimeout
	faultBusy
	faultBody
	faultBroken
	faultSource
	faultConnections
	faultsAll
)

// faults are their names in figures.
var faults = [faultsAll]string{
	faultRoute: "no-rule", faultMisdirected: "misdirected", faultEndpoint: "no-endpoint", faultDial: "unreachable", faultBackend: "backend",
	faultTimeout: "timeout", faultBusy: "busy", faultBody: "slow-body", faultBroken: "bad-body", faultSource: "connections-of-source", faultConnections: "connections",
}

// counters are what there is to tell.
type counters struct {
	conns, requests, upgraded atomic.Int64 // now
	in, out                   atomic.Int64 // bytes of bodies
	answers                   [6]atomic.Int64
	faults                    [faultsAll]atomic.Int64
}

func (c *counters) answered(status int) {
	if i := status / 100; i > 0 && i < len(c.answers) {
		c.answers[i].Add(1)
	}
}

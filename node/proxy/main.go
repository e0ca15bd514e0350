// Package proxy is the node's part of Services: TCP and UDP in user space, and
// DNS, in a process of their own, which outlives the agent. Nothing is
// translated or tracked in the kernel: a Service's address is local to the
// node's network namespace (one AnyIP route for the whole range), a listener
// on it leads to an endpoint, and the endpoint sees the proxy's address.
//
// The process (Main: the program dunlin-proxy, or dunlin run again) has one
// engine, fed by the agent with deltas of the service table (Supervisor is the
// agent's side); package companion keeps it, beside the agent.
//
// Goroutines of the process: one for each listener, two for each TCP
// connection, one for each UDP flow and each query of DNS, one that ticks
// every second, and the companion's.
package proxy

import (
	"context"
	"log/slog"
	"os"
	"runtime"

	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/node/services"
)

// argv0 is the program's name, and marks a re-executed main program.
const argv0 = "dunlin-proxy"

// MaybeRun runs the proxy if this process was started as one by re-executing
// the main program, and then does not return. Main calls it first.
func MaybeRun() {
	if len(os.Args) > 1 && os.Args[0] == argv0 {
		os.Exit(Main(os.Args[1:]))
	}
}

// Main is the proxy's program.
func Main(args []string) int {
	return companion.Main(argv0, "routes to Services", args, func(_ string, log *slog.Logger) companion.Worker[Settings] { return newEngine(log) })
}

// Status is what the process tells of itself.
type Status struct {
	Build       string            `cbor:"1,keyasint"`
	PID         int               `cbor:"2,keyasint"`
	Listeners   int               `cbor:"3,keyasint,omitempty"`
	Connections int64             `cbor:"4,keyasint,omitempty"`
	UDPFlows    int64             `cbor:"5,keyasint,omitempty"`
	Refused     int64             `cbor:"6,keyasint,omitempty"`
	Failed      int64             `cbor:"7,keyasint,omitempty"`
	Drained     int64             `cbor:"8,keyasint,omitempty"`
	Services    int               `cbor:"9,keyasint,omitempty"`
	Failures    map[string]string `cbor:"10,keyasint,omitempty"` // places that are not served, with the reason
	// Ports are where Services are reached without root: namespace/name:port to
	// an address.
	Ports map[string]string `cbor:"11,keyasint,omitempty"`
	// Goroutines are what a leak would show in.
	Goroutines int `cbor:"12,keyasint,omitempty"`
	// OverShare are connections and UDP flows that were refused, because their
	// source had half of what the others left.
	OverShare int64 `cbor:"14,keyasint,omitempty"`
	// Silent are connections that were closed, since a side was not there any more.
	Silent int64 `cbor:"15,keyasint,omitempty"`
	// Unserved are the Failures that are a Service's, and endpoints that are not
	// used since they lead back to it.
	Unserved []Unserved `cbor:"13,keyasint,omitempty"`
}

// Status implements companion.Worker.
func (e *engine) Status(h companion.Head) any {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &Status{Build: h.Build, PID: h.PID, Listeners: len(e.listeners), Connections: e.counters.conns.Load(), UDPFlows: e.counters.udp.Load(),
		Refused: e.counters.refused.Load(), Failed: e.counters.failed.Load(), Drained: e.counters.drained.Load(), Services: len(e.pool.Tables.Services), Goroutines: runtime.NumGoroutine(),
		OverShare: e.conns.refusals() + e.flows.refusals(), Silent: e.counters.silent.Load()}
	for pl, f := range e.failures {
		if s.Failures == nil {
			s.Failures = map[string]string{}
		}
		s.Failures[pl.protocol+" "+pl.addr.String()+pl.name] = f.err
		if f.want.service != "" {
			u := f.unserved(pl)
			if has, ok := e.inTheWay(pl); ok && u.Why == WhyTaken {
				u = clash(pl, f.want, has)
			}
			s.Unserved = append(s.Unserved, u)
		}
	}
	s.Unserved = append(s.Unserved, e.clashes...)
	for i := range e.loops {
		s.Unserved = append(s.Unserved, loopUnserved(&e.loops[i]))
	}
	for pl, l := range e.listeners {
		if pl.name == "" {
			continue
		}
		if s.Ports == nil {
			s.Ports = map[string]string{}
		}
		s.Ports[pl.name+"/"+pl.protocol] = l.address()
	}
	return s
}

// Supervisor is the agent's side.
type Supervisor struct {
	// Dir, in the run-time folder, holds the proxy's socket and log.
	Dir   string
	Table *services.Table
	// Settings of the node; false while the network is not ready for a proxy.
	Settings func() (Settings, bool)
	Log      *slog.Logger

	tag string
}

func (s *Supervisor) companion() *companion.Supervisor[Settings] {
	return &companion.Supervisor[Settings]{
		Program: argv0, Dir: s.Dir, Settings: s.Settings, Equal: (*Settings).equal, Log: s.Log, Tag: s.tag,
		Subscribe: func() companion.Feed { return s.Table.Subscribe() },
		Known:     func() bool { return s.Table.Generation() != 0 },
		Better: func() bool {
			if s.Table.Fresh() {
				return false
			}
			st, err := Ask(s.Dir)
			return err == nil && st.Services > 0
		},
	}
}

// Run until ctx ends. The proxy goes on.
func (s *Supervisor) Run(ctx context.Context) error { return s.companion().Run(ctx) }

// Ask returns what the proxy in a folder says of itself.
func Ask(dir string) (*Status, error) {
	st := new(Status)
	return st, companion.Ask(dir, st)
}

// Stop ends the proxy in a folder with all its connections, and waits for it;
// without one it does nothing.
func Stop(ctx context.Context, dir string) error { return companion.Stop(ctx, dir) }

package ingress

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/wire"
)

// view is what a request meets. Immutable.
type view struct {
	router *router
	certs  *certificates
}

// engine is the running ingress. mu guards what is decoded and the listeners;
// requests work without it, on a view.
type engine struct {
	log      *slog.Logger
	dir      string // its own folder, all that it sees of the disk
	confined sync.Once
	counters counters
	view     atomic.Pointer[view]
	limit    atomic.Int64 // connections, and requests
	patience patience
	proxy    *httputil.ReverseProxy
	upstream *upstream

	mu        sync.Mutex
	cfg       Settings
	pool      *balance.Pool
	ingresses map[string]*wire.Ingress
	secrets   map[string]*held
	changed   map[string]bool // Services to be looked at
	listeners map[string]*listener
	failures  map[string]failure
	parked    map[string]*os.File // a predecessor's listeners, by place
	handed    bool                // listeners are a successor's now

	sources sources
}

type failure struct {
	err   string
	again time.Time
}

func newEngine(log *slog.Logger) *engine {
	e := &engine{log: log, pool: balance.NewPool(), ingresses: map[string]*wire.Ingress{}, secrets: map[string]*held{}, changed: map[string]bool{},
		listeners: map[string]*listener{}, failures: map[string]failure{}, parked: map[string]*os.File{}, sources: newSources()}
	e.limit.Store(DefaultConnections)
	e.patience = patience{headerTimeout, idleTimeout, bodyTimeout}
	e.view.Store(&view{newRouter(nil, nil), newCertificates(nil, nil)})
	e.upstream = newUpstream(&e.counters)
	e.proxy = &httputil.ReverseProxy{Rewrite: rewrite, Transport: e.upstream, BufferPool: &buffers{}, ErrorHandler: e.failed, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	return e
}

// Configure implements companion.Worker.
func (e *engine) Configure(s *Settings) error {
	e.confined.Do(e.confine)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cfg = *s
	if s.Connections > 0 {
		e.limit.Store(int64(s.Connections))
	}
	for name := range e.pool.Tables.Services {
		e.changed[name] = true
	}
	return nil
}

// confine leaves the process, which everybody may talk to and which holds
// private keys, no privileges but that of low ports, and no files.
func (e *engine) confine() {
	if err := companion.DropPrivileges(); err != nil {
		e.log.Warn("the ingress keeps privileges that it does not need", "error", err)
	}
	if err := landlock.V5.BestEffort().RestrictPaths(landlock.RWDirs(e.dir)); err != nil {
		e.log.Warn("the ingress sees files that it does not need", "error", err)
	}
}

// Park implements companion.Worker.
func (e *engine) Park(parked map[string]*os.File) { e.parked = parked }

// Retain implements companion.Worker.
func (e *engine) Retain(keys map[string]bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, name := range e.pool.Retain(keys) {
		e.changed[name] = true
	}
	for k := range e.ingresses {
		if !keys[wire.ItemIngress+k] {
			delete(e.ingresses, k)
		}
	}
	for k := range e.secrets {
		if !keys[itemCertificate+k] {
			delete(e.secrets, k)
		}
	}
}

// Apply implements companion.Worker.
func (e *engine) Apply(items []wire.ServiceItem, gone []string, last bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, it := range items {
		if err := e.put(it.Key, it.Data); err != nil {
			e.log.Warn("item of the table cannot be read", "key", it.Key, "error", err)
		}
	}
	for _, k := range gone {
		if name, ok := strings.CutPrefix(k, wire.ItemIngress); ok {
			delete(e.ingresses, name)
		} else if name, ok := strings.CutPrefix(k, itemCertificate); ok {
			delete(e.secrets, name)
		} else {
			e.changed[e.pool.Tables.Remove(k)] = true
		}
	}
	if !last {
		return
	}
	for _, name := range e.pool.Tables.Turned() {
		e.changed[name] = true
	}
	for name := range e.changed {
		e.pool.Rebuild(name, e.cfg.Node, e.cfg.Zone)
	}
	clear(e.changed)
	if e.pool.Sweep() {
		e.upstream.closeIdle() // none shall wait at an endpoint that ends
	}
	var list []named
	for k, ing := range e.ingresses {
		ns, name, _ := strings.Cut(k, "/")
		list = append(list, named{ns, name, ing})
	}
	e.view.Store(&view{newRouter(list, e.target), newCertificates(list, e.secrets)})
	e.listen()
}

// put takes one item. e.mu is held.
func (e *engine) put(key string, data []byte) error {
	if name, ok := strings.CutPrefix(key, wire.ItemIngress); ok {
		ing := new(wire.Ingress)
		if err := wire.DecodeItem(data, ing); err != nil {
			return err
		}
		e.ingresses[name] = ing
		return nil
	}
	if name, ok := strings.CutPrefix(key, itemCertificate); ok {
		h := e.secrets[name]
		if h == nil {
			h = &held{}
			e.secrets[name] = h
		}
		h.take(data)
		return h.err
	}
	name, err := e.pool.Tables.Put(key, data)
	if err == nil {
		e.changed[name] = true
	}
	return err
}

// Why a rule leads nowhere, for whoever asks: it tells no names.
const (
	whyNoService = "this address leads to a service that does not exist"
	whyNoPort    = "this address leads to a port that the service does not have"
	whyExternal  = "this address leads to a service of type ExternalName, which the ingress does not serve"
	whyResource  = "this address leads to something else than a service, which the ingress does not serve"
)

// target finds the Service's port of a backend, or says why there is none.
// e.mu is held.
func (e *engine) target(namespace string, b *wire.IngressBackend) (t *balance.Target, h2c bool, why string) {
	name := namespace + "/" + b.Service
	svc := e.pool.Tables.Services[name]
	switch {
	case b.Service == "":
		return nil, false, whyResource
	case svc == nil:
		return nil, false, whyNoService
	case svc.ExternalName != "":
		return nil, false, whyExternal
	}
	i := slices.IndexFunc(svc.Ports, func(p wire.ServicePort) bool {
		return p.Protocol == "TCP" && (b.Name != "" && p.Name == b.Name || b.Name == "" && p.Port == b.Port)
	})
	if i < 0 {
		return nil, false, whyNoPort
	}
	p := &svc.Ports[i]
	return e.pool.Targets[balance.TargetKey{Service: name, Port: p.Name, Protocol: p.Protocol}], p.H2C, whyNoService
}

// Connections implements companion.Worker.
func (e *engine) Connections() int64 { return e.counters.conns.Load() }

// Run implements companion.Worker.
func (e *engine) Run(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			e.tick(now)
		}
	}
}

// tick does what depends on time alone: upgraded connections to endpoints that
// end are closed as those of the service proxy are, ports are tried again.
func (e *engine) tick(now time.Time) {
	e.mu.Lock()
	list := e.pool.Backends()
	if len(e.failures) > 0 {
		e.listen()
	}
	e.mu.Unlock()
	for _, b := range list {
		for _, f := range b.Idle(now) {
			f.End()
		}
	}
}

// Status implements companion.Worker.
func (e *engine) Status(h companion.Head) any {
	c := &e.counters
	s := &Status{Head: h, Connections: c.conns.Load(), Requests: c.requests.Load(), Upgraded: c.upgraded.Load(), In: c.in.Load(), Out: c.out.Load(),
		Faults: map[string]int64{}, Failures: map[string]string{}}
	for i := range c.answers {
		s.Answers[i] = c.answers[i].Load()
	}
	for i, name := range faults {
		s.Faults[name] = c.faults[i].Load()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	s.Ingresses = len(e.ingresses)
	for _, h := range e.secrets {
		if h.pair != nil {
			s.Certificates++
		}
	}
	for _, l := range e.listeners {
		s.Listening = append(s.Listening, l.tcp.Addr().String())
	}
	slices.Sort(s.Listening)
	for at, f := range e.failures {
		s.Failures[at] = f.err
	}
	return s
}

// tlsConfig asks the newest view for every handshake.
func (e *engine) tlsConfig() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		return e.view.Load().certs.of(h.ServerName), nil // nil: unrecognized_name
	}}
}

// servers of net/http keep connections; each listener has one.
func (e *engine) newServer(secure bool) *http.Server {
	s := &http.Server{
		Handler: http.HandlerFunc(e.serve), ReadHeaderTimeout: e.patience.header, IdleTimeout: e.patience.idle, MaxHeaderBytes: headerMost,
		ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: streamsMost, MaxReceiveBufferPerStream: streamWindow, MaxReceiveBufferPerConnection: connWindow,
			SendPingTimeout: pingAfter, PingTimeout: headerTimeout, WriteByteTimeout: e.patience.body},
	}
	if secure {
		s.TLSConfig = e.tlsConfig()
	}
	return s
}

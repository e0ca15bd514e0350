// Package controllers wires every controller of the control plane into the
// components that the leader runs, one context per term.
package controllers

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/bootstrap"
	"github.com/dunlin-project/dunlin/controlplane/controllers/cronjob"
	"github.com/dunlin-project/dunlin/controlplane/controllers/daemonset"
	"github.com/dunlin-project/dunlin/controlplane/controllers/deployment"
	"github.com/dunlin-project/dunlin/controlplane/controllers/disruption"
	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/controllers/endpointslicemirroring"
	"github.com/dunlin-project/dunlin/controlplane/controllers/gc"
	"github.com/dunlin-project/dunlin/controlplane/controllers/ingress"
	"github.com/dunlin-project/dunlin/controlplane/controllers/job"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loadbalancer"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/namespace"
	"github.com/dunlin-project/dunlin/controlplane/controllers/nodelifecycle"
	"github.com/dunlin-project/dunlin/controlplane/controllers/podgc"
	"github.com/dunlin-project/dunlin/controlplane/controllers/quota"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/controllers/serviceaccount"
	"github.com/dunlin-project/dunlin/controlplane/controllers/statefulset"
	"github.com/dunlin-project/dunlin/controlplane/controllers/sweep"
	"github.com/dunlin-project/dunlin/controlplane/controllers/volume"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/leader"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Config of all controllers and the scheduler.
type Config struct {
	Store registry.Store
	// Leases of the nodes; nil leaves node lifecycle out.
	Leases nodelifecycle.Leases
	// LeaderZone is the site of this server, for the freeze rules; "" is
	// "default".
	LeaderZone string
	// ServiceCIDR's first address is the Service default/kubernetes.
	ServiceCIDR netip.Prefix
	// DNS is the address of the Service kube-system/kube-dns.
	DNS netip.Addr
	// Servers returns the addresses (ip:port) at which the API is reachable
	// now, for the Endpoints of default/kubernetes. May be nil.
	Servers func() []netip.AddrPort
	// CAPEM is the cluster CA, for the ConfigMap kube-root-ca.crt.
	CAPEM []byte
	// KeepTerminated bounds the terminated pods that are kept; 0 is 2000.
	KeepTerminated int
	// Profiles of the scheduler; none is the default one.
	Profiles []*scheduler.Profile
	// Events; nil makes none.
	Events *events.Sink
	Clock  clock.Clock
	// Trust returns an error while Clock jumped; see loop.Env. May be nil.
	Trust   func() error
	Log     *slog.Logger
	Metrics prometheus.Registerer // may be nil
	// Rand returns numbers in [0,1) for jitter; nil is a random source.
	Rand func() float64
}

// All returns the components in the order in which to start them. Each may
// be run again in a later term.
func All(cfg Config) []leader.Component {
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Float64
	}
	metrics := loop.NewMetrics(cfg.Metrics)
	sched := scheduler.NewMetrics(cfg.Metrics)
	list := []leader.Component{
		{Name: "controllers", Run: func(ctx context.Context, term uint64) error {
			env := cfg.env(term, "")
			return loop.Run(ctx, env, metrics, cfg.controllers(term)...)
		}},
		{Name: "scheduler", Run: func(ctx context.Context, term uint64) error {
			return scheduler.New(scheduler.Config{
				Store: cfg.Store, Term: term, Clock: cfg.Clock, Log: cfg.Log, Metrics: sched, Rand: cfg.Rand,
				Profiles: cfg.Profiles,
				Events:   cfg.recorder("default-scheduler"),
			}).Run(ctx)
		}},
	}
	if cfg.Events != nil {
		list = append([]leader.Component{{Name: "events", Run: func(ctx context.Context, _ uint64) error { return cfg.Events.Run(ctx) }}}, list...)
	}
	return list
}

// controllers makes the controllers of one term.
func (cfg Config) controllers(term uint64) []*loop.Controller {
	list := []*loop.Controller{
		bootstrap.New(cfg.env(term, "bootstrap"), bootstrap.Config{ServiceCIDR: cfg.ServiceCIDR, DNS: cfg.DNS, Servers: cfg.Servers}),
		serviceaccount.New(cfg.env(term, "serviceaccount-controller")),
		serviceaccount.NewRootCA(cfg.env(term, "root-ca-publisher"), cfg.CAPEM),
		deployment.New(cfg.env(term, "deployment-controller")),
		replicaset.New(cfg.env(term, "replicaset-controller")),
		statefulset.New(cfg.env(term, "statefulset-controller")),
		job.New(cfg.env(term, "job-controller")),
		cronjob.New(cfg.env(term, "cronjob-controller")),
		volume.New(cfg.env(term, "persistentvolume-controller")),
		volume.NewEphemeral(cfg.env(term, "ephemeral-volume-controller")),
		daemonset.New(cfg.env(term, "daemonset-controller")),
		replicaset.NewReplicationController(cfg.env(term, "replication-controller")),
		disruption.New(cfg.env(term, "disruption-controller")),
		endpoints.New(cfg.env(term, "endpoint-slice-controller")),
		loadbalancer.New(cfg.env(term, "loadbalancer-controller")),
		ingress.New(cfg.env(term, "ingress-controller")),
		endpointslicemirroring.New(cfg.env(term, "endpoint-slice-mirroring-controller")),
		gc.New(cfg.env(term, "garbage-collector-controller")),
		namespace.New(cfg.env(term, "namespace-controller")),
		podgc.New(cfg.env(term, "pod-garbage-collector"), podgc.Config{KeepTerminated: cfg.KeepTerminated}),
		quota.New(cfg.env(term, "resourcequota-controller")),
		sweep.New(cfg.env(term, "sweep-controller")),
	}
	if cfg.Leases != nil {
		list = append(list, nodelifecycle.New(cfg.env(term, "node-controller"), nodelifecycle.Config{Leases: cfg.Leases, LeaderZone: cfg.LeaderZone}))
	}
	return list
}

func (cfg Config) recorder(component string) events.Recorder {
	if cfg.Events == nil {
		return events.Discard
	}
	return cfg.Events.For(component)
}

func (cfg Config) env(term uint64, component string) loop.Env {
	return loop.Env{
		Store: cfg.Store, Reader: cfg.Store.Reader(schema.GroupKind{Kind: "Pod"}), Term: term,
		Clock: cfg.Clock, Trust: cfg.Trust, Log: cfg.Log, Rand: cfg.Rand, Events: cfg.recorder(component),
	}
}

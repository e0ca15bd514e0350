package scheduler

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Config of a Scheduler; made anew for each term.
type Config struct {
	Store   registry.Store
	Term    uint64
	Clock   clock.Clock
	Log     *slog.Logger
	Events  events.Recorder
	Metrics *Metrics // may be nil
	Rand    func() float64
	// Batch is how many pods are decided and bound in one Raft entry at most;
	// default 1024.
	Batch int
	// Writers bounds the status writes in flight; default 64. With 1 their
	// order depends on nothing but the state.
	Writers int
	// Profiles by spec.schedulerName (see ParseProfiles); none is upstream's
	// weights, packing, for "default-scheduler".
	Profiles []*Profile
}

// Metrics of the scheduler. A nil *Metrics counts nothing.
type Metrics struct {
	bound     prometheus.Counter
	conflicts prometheus.Counter
	failed    prometheus.Counter
	decide    prometheus.Histogram
	bind      prometheus.Histogram
	victims   prometheus.Counter
	pending   *prometheus.GaugeVec
}

// NewMetrics registers the scheduler's metrics; made once a process.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	buckets := prometheus.ExponentialBuckets(0.00001, 4, 12)
	m := &Metrics{
		bound:     prometheus.NewCounter(prometheus.CounterOpts{Name: "dunlin_scheduler_bound_total", Help: "Pods bound to a node."}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{Name: "bind_conflicts_total", Help: "Bindings that lost a race in the state machine and were queued again."}),
		failed:    prometheus.NewCounter(prometheus.CounterOpts{Name: "dunlin_scheduler_unschedulable_total", Help: "Decisions that found no node."}),
		victims:   prometheus.NewCounter(prometheus.CounterOpts{Name: "dunlin_scheduler_preempted_total", Help: "Pods preempted by more important ones."}),
		decide:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dunlin_scheduler_decide_seconds", Help: "Time to decide a batch.", Buckets: buckets}),
		bind:      prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dunlin_scheduler_bind_seconds", Help: "Time to commit a batch of bindings.", Buckets: buckets}),
		pending:   prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "dunlin_scheduler_pending_pods", Help: "Pods without a node: active, backoff, unschedulable, gated."}, []string{"queue"}),
	}
	if reg != nil {
		reg.MustRegister(m.bound, m.conflicts, m.failed, m.victims, m.decide, m.bind, m.pending)
	}
	return m
}

func (m *Metrics) observe(decide, bind time.Duration, bound, conflicts, failed, victims int) {
	if m == nil {
		return
	}
	m.decide.Observe(decide.Seconds())
	if bind > 0 {
		m.bind.Observe(bind.Seconds())
	}
	m.bound.Add(float64(bound))
	m.conflicts.Add(float64(conflicts))
	m.failed.Add(float64(failed))
	m.victims.Add(float64(victims))
}

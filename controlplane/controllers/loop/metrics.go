package loop

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics of all controllers. A nil *Metrics counts nothing.
type Metrics struct {
	depth   *prometheus.GaugeVec
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

// NewMetrics registers the controllers' metrics; made once a process, since
// controllers come and go with each term.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		depth: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dunlin_controller_queue_depth", Help: "Keys that wait for a worker.",
		}, []string{"controller"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dunlin_controller_reconcile_total", Help: "Reconciles by outcome: done, requeue_after, error, terminal.",
		}, []string{"controller", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dunlin_controller_reconcile_seconds", Help: "Time a reconcile took.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		}, []string{"controller"}),
	}
	if reg != nil {
		reg.MustRegister(m.depth, m.total, m.seconds)
	}
	return m
}

func (m *Metrics) observe(controller, outcome string, took time.Duration, depth int) {
	if m == nil {
		return
	}
	m.total.WithLabelValues(controller, outcome).Inc()
	m.seconds.WithLabelValues(controller).Observe(took.Seconds())
	m.setDepth(controller, depth)
}

func (m *Metrics) setDepth(controller string, depth int) {
	if m != nil {
		m.depth.WithLabelValues(controller).Set(float64(depth))
	}
}

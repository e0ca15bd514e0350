package loop

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Metrics of all controllers. A nil *Metrics counts nothing.
type Metrics struct {
	queues  queues
	total   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

// NewMetrics registers the controllers' metrics; made once a process, since
// controllers come and go with each term.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		queues: queues{
			depth:   prometheus.NewDesc("dunlin_controller_queue_depth", "Keys that wait for a worker.", []string{"controller"}, nil),
			delayed: prometheus.NewDesc("dunlin_controller_queue_delayed", "Keys that are due later: after a back-off, or by the clock.", []string{"controller"}, nil),
			live:    map[string]*Queue[state.Key]{},
		},
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dunlin_controller_reconcile_total", Help: "Reconciles by outcome: done, requeue_after, error, terminal.",
		}, []string{"controller", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dunlin_controller_reconcile_seconds", Help: "Time a reconcile took.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		}, []string{"controller"}),
	}
	if reg != nil {
		reg.MustRegister(&m.queues, m.total, m.seconds)
	}
	return m
}

func (m *Metrics) observe(controller, outcome string, took time.Duration) {
	if m == nil {
		return
	}
	m.total.WithLabelValues(controller, outcome).Inc()
	m.seconds.WithLabelValues(controller).Observe(took.Seconds())
}

// queue shows a controller's queue from now on; nil shows an empty one.
func (m *Metrics) queue(controller string, q *Queue[state.Key]) {
	if m == nil {
		return
	}
	m.queues.mu.Lock()
	defer m.queues.mu.Unlock()
	m.queues.live[controller] = q
}

// queues reads the controllers' queues when it is asked, so that what waits
// is never what waited at the last reconcile.
type queues struct {
	depth, delayed *prometheus.Desc

	mu   sync.Mutex
	live map[string]*Queue[state.Key]
}

// Describe implements prometheus.Collector.
func (q *queues) Describe(ch chan<- *prometheus.Desc) {
	ch <- q.depth
	ch <- q.delayed
}

// Collect implements prometheus.Collector.
func (q *queues) Collect(ch chan<- prometheus.Metric) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for name, one := range q.live {
		var waiting, delayed int
		if one != nil {
			waiting, delayed = one.Waiting()
		}
		ch <- prometheus.MustNewConstMetric(q.depth, prometheus.GaugeValue, float64(waiting), name)
		ch <- prometheus.MustNewConstMetric(q.delayed, prometheus.GaugeValue, float64(delayed), name)
	}
}

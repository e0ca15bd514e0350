package api

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// subresources that are served; others are one label value.
var subresources = []string{
	"status", "scale", "log", "exec", "attach", "portforward", "eviction", "binding", "finalize",
	"ephemeralcontainers", "token", "proxy",
}

type metrics struct {
	requests *prometheus.CounterVec
	latency  *prometheus.HistogramVec
	events   *prometheus.CounterVec
	rejected *prometheus.CounterVec
	panics   prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, l *limiter) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dunlin_api_requests_total", Help: "API requests by verb, resource and HTTP code.",
		}, []string{"verb", "resource", "subresource", "code"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "dunlin_api_request_duration_seconds", Help: "Latency of API requests other than watches and streams.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 15, 60},
		}, []string{"verb", "resource"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dunlin_api_watch_events_total", Help: "Events sent to watchers, by resource.",
		}, []string{"resource"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dunlin_api_rejected_requests_total", Help: "Requests refused because too many were running.",
		}, []string{"kind"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "dunlin_api_panics_total", Help: "Requests that ended in a panic.",
		}),
	}
	if reg == nil {
		return m, nil
	}
	all := []prometheus.Collector{m.requests, m.latency, m.events, m.rejected, m.panics}
	for name, s := range map[string]*slots{"requests": l.short, "watches": l.long} {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "dunlin_api_inflight", Help: "Requests running now.", ConstLabels: prometheus.Labels{"kind": name},
		}, func() float64 { return float64(s.inUse()) }))
	}
	for _, c := range all {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("api: metrics: %w", err)
		}
	}
	return m, nil
}

// observe counts a finished request. known is false for resources that are
// not served, whose names a client could make up without end.
func (m *metrics) observe(in *requestInfo, known bool, code int, took time.Duration) {
	resource, sub := "other", ""
	if in.resource && known {
		resource = in.gvr.Resource
		if sub = in.subresource; sub != "" && !slices.Contains(subresources, sub) {
			sub = "other"
		}
	}
	m.requests.WithLabelValues(in.verb, resource, sub, strconv.Itoa(code)).Inc()
	if !in.long() {
		m.latency.WithLabelValues(in.verb, resource).Observe(took.Seconds())
	}
}

package link

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// figures describe what Collect reads.
var figures = struct {
	connected, connects, bytes, sent, acked, age, streams *prometheus.Desc
}{
	connected: prometheus.NewDesc("dunlin_agent_connected", "1 while the last lease was acknowledged in time.", nil, nil),
	connects:  prometheus.NewDesc("dunlin_agent_connects_total", "Connections to servers that were tried since the agent started.", nil, nil),
	bytes:     prometheus.NewDesc("dunlin_agent_link_bytes_total", "Bytes over connections to servers, TLS included, since the agent started.", []string{"direction"}, nil),
	sent:      prometheus.NewDesc("dunlin_agent_leases_sent_total", "Lease renewals sent, repeats included.", nil, nil),
	acked:     prometheus.NewDesc("dunlin_agent_leases_acknowledged_total", "Lease renewals that a leader acknowledged, by transport.", []string{"by"}, nil),
	age:       prometheus.NewDesc("dunlin_agent_lease_age_seconds", "Time since the newest acknowledged renewal was sent; absent before the first.", nil, nil),
	streams:   prometheus.NewDesc("dunlin_agent_streams", "Streams (logs, exec, attach, port-forward, figures) open now.", nil, nil),
}

// Describe implements prometheus.Collector.
func (l *Link) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{figures.connected, figures.connects, figures.bytes, figures.sent, figures.acked, figures.age, figures.streams} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (l *Link) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	st := l.Status()
	connected := 0.0
	if st.Connected {
		connected = 1
	}
	send(figures.connected, prometheus.GaugeValue, connected)
	send(figures.connects, prometheus.CounterValue, float64(st.Attempts))
	in, out := l.Bytes()
	send(figures.bytes, prometheus.CounterValue, float64(in), "in")
	send(figures.bytes, prometheus.CounterValue, float64(out), "out")
	send(figures.sent, prometheus.CounterValue, float64(l.counter.Load()))
	send(figures.acked, prometheus.CounterValue, float64(l.byUDP.Load()), "udp")
	send(figures.acked, prometheus.CounterValue, float64(l.byTCP.Load()), "tcp")
	if at := l.LastAcked(); !at.IsZero() {
		send(figures.age, prometheus.GaugeValue, time.Since(at).Seconds())
	}
	send(figures.streams, prometheus.GaugeValue, float64(len(l.slots)+len(l.short)))
}

package cli

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/node/proxy"
)

// proxyFigures asks the proxy when somebody asks the agent.
type proxyFigures struct{ dir string }

var proxyDescs = struct{ up, connections, refused, drained, silent, ports *prometheus.Desc }{
	up:          prometheus.NewDesc("dunlin_proxy_up", "1 while this node has a process that serves Services; what follows is absent otherwise.", nil, nil),
	connections: prometheus.NewDesc("dunlin_proxy_connections", "Connections to Services that are open now, by protocol: tcp, udp (flows).", []string{"protocol"}, nil),
	refused: prometheus.NewDesc("dunlin_proxy_refused_total", "Connections that were refused since the process started, by reason: no-endpoint, source-share (one source "+
		"had half of what the others left).", []string{"reason"}, nil),
	drained: prometheus.NewDesc("dunlin_proxy_drained_total", "Idle connections to endpoints that end, closed since the process started.", nil, nil),
	silent:  prometheus.NewDesc("dunlin_proxy_silent_total", "Connections closed since the process started, because a side of them was not there any more.", nil, nil),
	ports:   prometheus.NewDesc("dunlin_proxy_ports", "Addresses and ports of Services that are wanted here, by whether they could be opened.", []string{"state"}, nil),
}

// Describe implements prometheus.Collector.
func (f proxyFigures) Describe(ch chan<- *prometheus.Desc) {
	d := &proxyDescs
	for _, x := range []*prometheus.Desc{d.up, d.connections, d.refused, d.drained, d.silent, d.ports} {
		ch <- x
	}
}

// Collect implements prometheus.Collector.
func (f proxyFigures) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, float64(v), labels...)
	}
	d := &proxyDescs
	st, err := proxy.Ask(f.dir)
	if err != nil {
		send(d.up, prometheus.GaugeValue, 0)
		return
	}
	send(d.up, prometheus.GaugeValue, 1)
	send(d.connections, prometheus.GaugeValue, st.Connections, "tcp")
	send(d.connections, prometheus.GaugeValue, st.UDPFlows, "udp")
	send(d.refused, prometheus.CounterValue, st.Refused, "no-endpoint")
	send(d.refused, prometheus.CounterValue, st.OverShare, "source-share")
	send(d.drained, prometheus.CounterValue, st.Drained)
	send(d.silent, prometheus.CounterValue, st.Silent)
	send(d.ports, prometheus.GaugeValue, int64(st.Listeners), "open")
	send(d.ports, prometheus.GaugeValue, int64(len(st.Failures)), "failed")
}

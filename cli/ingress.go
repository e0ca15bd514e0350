package cli

import (
	"os"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/ingress"
)

// ingressOptions are the flags of a node that serves Ingresses.
type ingressOptions struct {
	http, https string
	connections int
}

func (o *ingressOptions) add(f *pflag.FlagSet) {
	http, https := ":80", ":443"
	if os.Geteuid() != 0 {
		http, https = ":8080", ":8443" // an ordinary user may not open the others
	}
	f.StringVar(&o.http, "ingress-http", http, "address at which this node serves Ingresses over HTTP, where it is chosen to (label dunlin.dev/ingress=true)")
	f.StringVar(&o.https, "ingress-https", https, "the same over HTTPS")
	f.IntVar(&o.connections, "ingress-connections", ingress.DefaultConnections, "how many connections, and requests at once, Ingresses may have on this node")
}

func (o *ingressOptions) check() error {
	if o.connections < 1 {
		return usagef("--ingress-connections=%d: must be at least 1", o.connections)
	}
	if err := checkAddress("ingress-http", o.http); err != nil {
		return err
	}
	return checkAddress("ingress-https", o.https)
}

// ingressDir holds the socket and log of the ingress process.
func ingressDir(runDir string) string { return filepath.Join(runDir, "ingress") }

// ingressSupervisor keeps the process that serves Ingresses, while there shall
// be one.
func (p *nodeProcess) ingressSupervisor() *ingress.Supervisor {
	t := p.traffic
	return &ingress.Supervisor{
		Dir: ingressDir(p.o.run), Table: t.table, Log: p.log.With("part", "ingress"), Changed: p.agent.Assigned(),
		Settings: func() ingress.Settings {
			return ingress.Settings{Node: t.node, Zone: t.zone(), HTTP: p.o.ingress.http, HTTPS: p.o.ingress.https, Connections: p.o.ingress.connections}
		},
		Secrets: func(namespace, name string) (ingress.Certificate, bool) {
			s, ok := p.agent.Secret(namespace, name)
			if !ok || len(s.Data[corev1.TLSCertKey]) == 0 || len(s.Data[corev1.TLSPrivateKeyKey]) == 0 {
				return ingress.Certificate{}, false
			}
			return ingress.Certificate{Cert: s.Data[corev1.TLSCertKey], Key: s.Data[corev1.TLSPrivateKeyKey]}, true
		},
	}
}

// ingressFigures asks the process when somebody asks the agent.
type ingressFigures struct{ dir string }

var ingressDescs = struct{ up, connections, requests, answers, faults, bytes, ports *prometheus.Desc }{
	up:          prometheus.NewDesc("dunlin_ingress_up", "1 while this node has a process that serves Ingresses; what follows is absent otherwise.", nil, nil),
	connections: prometheus.NewDesc("dunlin_ingress_connections", "Connections of clients that are open now, by what they speak: http, upgraded.", []string{"kind"}, nil),
	requests:    prometheus.NewDesc("dunlin_ingress_requests", "Requests under way.", nil, nil),
	answers:     prometheus.NewDesc("dunlin_ingress_requests_total", "Requests answered since the process started, by hundreds of the status.", []string{"code"}, nil),
	faults:      prometheus.NewDesc("dunlin_ingress_faults_total", "Requests and connections that the ingress itself refused or could not pass on, by reason.", []string{"reason"}, nil),
	bytes:       prometheus.NewDesc("dunlin_ingress_bytes_total", "Bytes of bodies passed on.", []string{"direction"}, nil),
	ports:       prometheus.NewDesc("dunlin_ingress_ports", "Ports that are wanted, by whether they could be opened.", []string{"state"}, nil),
}

// Describe implements prometheus.Collector.
func (f ingressFigures) Describe(ch chan<- *prometheus.Desc) {
	d := &ingressDescs
	for _, x := range []*prometheus.Desc{d.up, d.connections, d.requests, d.answers, d.faults, d.bytes, d.ports} {
		ch <- x
	}
}

// Collect implements prometheus.Collector.
func (f ingressFigures) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, float64(v), labels...)
	}
	d := &ingressDescs
	st, err := ingress.Ask(f.dir)
	if err != nil {
		send(d.up, prometheus.GaugeValue, 0)
		return
	}
	send(d.up, prometheus.GaugeValue, 1)
	send(d.connections, prometheus.GaugeValue, st.Connections-st.Upgraded, "http")
	send(d.connections, prometheus.GaugeValue, st.Upgraded, "upgraded")
	send(d.requests, prometheus.GaugeValue, st.Requests)
	for class := 1; class < len(st.Answers); class++ {
		send(d.answers, prometheus.CounterValue, st.Answers[class], string(rune('0'+class))+"xx")
	}
	for reason, n := range st.Faults {
		send(d.faults, prometheus.CounterValue, n, reason)
	}
	send(d.bytes, prometheus.CounterValue, st.In, "in")
	send(d.bytes, prometheus.CounterValue, st.Out, "out")
	send(d.ports, prometheus.GaugeValue, int64(len(st.Listening)), "open")
	send(d.ports, prometheus.GaugeValue, int64(len(st.Failures)), "failed")
}
